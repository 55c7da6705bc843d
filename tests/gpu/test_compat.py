"""vLLM's operators, with other numbers in the next call: launchers are kept for calls of a kind, and a number makes a kind."""

from __future__ import annotations

from typing import Any

from compat.calls import in_cache, unified
from compat.case import build
from gpu.calls import DEVICE
from quire.compat import vllm

LENS: dict[str, Any] = {"q_lens": [1, 9, 1, 30], "seq_lens": [40, 40, 1, 75]}
NUMBERS: list[dict[str, Any]] = [{"scale": 0.05}, {"scale": 1.0}, {"scale": 0.05, "window": 12}, {"scale": 0.05}]


def test_chunked_prefill() -> None:
    for numbers in NUMBERS:
        case = build(DEVICE, **LENS, **numbers)
        case.run(vllm.chunked_prefill_paged_decode)
        case.check()


def test_unified() -> None:
    for numbers in NUMBERS:
        case = in_cache(DEVICE, **LENS, **numbers)
        unified(case)
        case.check()
