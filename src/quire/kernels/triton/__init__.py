"""Kernels for GPUs, NVIDIA and AMD from one source. What differs between GPUs is an entry of `tuning`."""
