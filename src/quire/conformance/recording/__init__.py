"""Calls of a running program, saved to a file, replayed and checked."""
