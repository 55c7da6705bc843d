"""Operators of other projects, under their own names and with their own arguments, on Quire's kernels."""
