"""Kernels for GPUs, NVIDIA and AMD from one source. What differs between cards is a row of `tuning`."""
