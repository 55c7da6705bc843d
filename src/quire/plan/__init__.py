"""What the attention part of a step costs: bytes, FLOPs, time, memory, and the parallel split that takes the least time.

The counts are exact. The times are a model of the GPU kernels: few parameters, fitted to a part of the times that were measured on
an H200 (`kernel_rates.py`) and tested with the others (`tests/plan/test_measured.py`). `quire plan` prints the result.
"""
