"""Matrix products in full fp32, whatever precision the process has allowed torch to use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def exact_products() -> Iterator[None]:
    """Disables autocast and reduced fp32 matmul precision inside the context. On a CPU they would use the 16-bit products that this
    kernel avoids."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), _full_precision():
        yield


@contextmanager
def _full_precision() -> Iterator[None]:
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
