"""`import quire` loads torch and nothing else that is heavy."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

HEAVY = ("triton", "transformers", "vllm", "rich", "quire.reference", "quire.cli", "quire.bench")

PROBE = """
import json, sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
import {module}
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "loaded": sorted(set(sys.modules) - before)}}))
"""


def heavy_in(loaded: list[str]) -> list[str]:
    return [name for name in HEAVY if name in loaded]


def test_import_quire_is_light(python: Callable, record_property: Callable) -> None:
    probe = python("-c", PROBE.format(module="quire"))
    assert probe.returncode == 0, probe.stderr
    answer = json.loads(probe.stdout)
    record_property("import quire, on top of torch", f"{answer['seconds']:.2f} s")
    assert "quire" in answer["loaded"]
    assert heavy_in(answer["loaded"]) == []


@pytest.mark.parametrize("module", ["rich.table", "quire.reference"])
def test_the_probe_sees(python: Callable, module: str) -> None:
    assert heavy_in(json.loads(python("-c", PROBE.format(module=module)).stdout)["loaded"])


def test_quire_runs_where_triton_is_missing(python: Callable) -> None:
    """The package declares triton on Linux only: elsewhere everything but its kernels must work."""
    code = """
import sys
sys.modules["triton"] = sys.modules["rich"] = sys.modules["transformers"] = None
import torch, quire
pool = quire.PagePool(pages=4, page_size=4)
cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=torch.float32)
batch = pool.step({pool.sequence(): 5})
q, k, v = torch.randn(3, 5, 1, 8)
assert torch.isfinite(quire.step(q, k, v, cache, batch)).all()
print(quire.explain(q, cache, batch))
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
