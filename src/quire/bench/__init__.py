"""Measures the operator beside its peers: workloads as data, every result checked before it is timed, ratios in one run."""
