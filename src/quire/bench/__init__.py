"""Measures the operator against other libraries: workloads as data, every result checked before it is timed, ratios in one run."""
