"""Runs a target through cases: in this process, in subprocesses, in parallel."""
