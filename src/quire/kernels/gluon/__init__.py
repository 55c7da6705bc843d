"""Kernels in Gluon for Hopper, with specialised warps: a producer that loads and consumers that compute."""
