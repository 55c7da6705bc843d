"""The oracle: the exact computation in float64, and the error that a kernel may have."""
