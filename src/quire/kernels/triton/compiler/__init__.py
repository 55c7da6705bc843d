"""Compiler tooling: sample calls, their compiled kernels, and the report of both. It is above `host` and imports it."""
