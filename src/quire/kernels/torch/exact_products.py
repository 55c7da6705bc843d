"""Products in fp32 mean fp32, whatever a process has allowed torch to do elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def exact_products() -> Iterator[None]:
    """Takes back, for its duration, every permission to round the factors of fp32 products: autocast, and
    `torch.set_float32_matmul_precision`. On a CPU they would go through the 16-bit products that this kernel avoids."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), _fp32_means_fp32():
        yield


@contextmanager
def _fp32_means_fp32() -> Iterator[None]:
    settings: Any = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul  # type: ignore[attr-defined]
    allowed = [setting.fp32_precision for setting in settings]
    if all(precision in ("none", "ieee") for precision in allowed):
        yield
        return
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, precision in zip(settings, allowed):
            setting.fp32_precision = precision
