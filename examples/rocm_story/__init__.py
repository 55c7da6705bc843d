"""A failure of vLLM's attention test on ROCm in November 2025, reproduced on a CPU and explained."""
