"""Test cases: from one line of text to the tensors of a call."""
