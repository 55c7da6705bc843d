"""The exact computation in float64, and how far from it a kernel may be."""
