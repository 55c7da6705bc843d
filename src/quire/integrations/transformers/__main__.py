"""Prints the variable with which transformers finds the kernel folder: `export $(python -m quire.integrations.transformers)`."""

from quire.integrations.transformers.hub import VARIABLE, local_kernels

print(f"{VARIABLE}={local_kernels()}")
