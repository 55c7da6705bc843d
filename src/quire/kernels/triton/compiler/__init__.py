"""Compiler tooling: what Triton is asked to compile, and what it made of it."""
