"""Test cases: what is asked of a kernel, from one line of text to tensors."""
