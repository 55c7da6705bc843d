"""Kernels in Gluon, for cards whose matrix unit wants to be fed by hand: Hopper."""
