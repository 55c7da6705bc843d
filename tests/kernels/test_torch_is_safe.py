"""The torch kernel cannot crash a user, and its memory does not grow with the context."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import quire
from quire.kernels.torch import strip
from support.scenario import build

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "linear", "_scaled_dot_product", "matmul", "addmv")


class Watch(TorchDispatchMode):
    """Notes every operation: the products of 16-bit factors, and the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow: list[str] = []
        self.asked: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if any(name.startswith(p) for p in PRODUCTS) and any(t.dtype.itemsize < 4 for t in tensors):
            self.narrow.append(name)
        result = func(*args, **(kwargs or {}))
        self.asked.add(name)
        if isinstance(result, torch.Tensor) and not any(
            result.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in tensors
        ):
            self.largest = max(self.largest, result.numel() * result.element_size())
        return result


def test_the_watch_sees_products_of_16_bits() -> None:
    with Watch() as watch:
        torch.bmm(torch.ones(1, 2, 2).bfloat16(), torch.ones(1, 2, 2).bfloat16())
        torch.ones(1, 2) @ torch.ones(2)
    assert watch.narrow == ["bmm"]
    assert watch.largest == 16


@pytest.mark.parametrize("form", ["full", "context"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3fn"])
def test_no_16_bit_product_is_computed_by_torch(dtype: str, form: str) -> None:
    # torch's own end the process with an illegal instruction on some CPUs: one that is never called cannot.
    s = build(90, [1, 40], [30, 70], format=dtype, q_dtype=dtype, form=form, q_scale=0.1 if dtype == "e4m3fn" else None)
    with Watch() as watch:
        quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, kernel="torch")
    assert watch.narrow == []
    assert any(name.startswith(PRODUCTS) for name in watch.asked)


@pytest.mark.parametrize("feature", [{}, {"window": 9}, {"alibi": True}, {"sinks": True}, {"mask": True}, {"causal": "mixed"}])
def test_the_fused_operator_and_separate_operators_agree(feature: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    s = build(92, [1, 40, 3], [30, 70, 600], **feature)
    fused = quire.attend(s.q, s.cache, s.batch, s.options, lse=True, kernel="torch")
    s.check(*fused)
    monkeypatch.setattr(strip, "_fused", lambda rows, k, v, bias: strip._plain(rows, k, v, bias, s.options))
    s.check(*quire.attend(s.q, s.cache, s.batch, s.options, lse=True, kernel="torch"))


def test_bf16_with_no_variable_set() -> None:
    code = """
import torch, quire
pool = quire.PagePool(40, 16)
cache = quire.KVCache.allocate(pool, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
a, b = pool.sequence(), pool.sequence()
torch.manual_seed(0)
for new in ({a: 130, b: 1}, {a: 1, b: 40}):
    q, k, v = (torch.randn(sum(new.values()), h, 128, dtype=torch.bfloat16) for h in (32, 8, 8))
    out = quire.step(q, k, v, cache, pool.step(new))
assert out.isfinite().all()
print("alive")
"""
    environment = {name: value for name, value in os.environ.items() if "ONEDNN" not in name and "DNNL" not in name}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "alive\n"


@pytest.mark.parametrize("page_size", [16, 8192])
@pytest.mark.parametrize("q_len", [1, 64])
def test_temporaries_do_not_grow_with_the_context(q_len: int, page_size: int) -> None:
    sizes = []
    for kv_len in (131072, 262144):
        pages = kv_len // page_size
        cache = quire.KVCache.wrap(*torch.randn(2, pages, page_size, 2, 32).bfloat16(), layout="nhd")
        batch = quire.Batch(torch.randperm(pages).view(1, -1), torch.tensor([kv_len]), torch.tensor([0, q_len]))
        with Watch() as watch:
            quire.attend(torch.randn(q_len, 4, 32), cache, batch, kernel="torch")
        sizes.append(watch.largest)
    assert sizes[0] == sizes[1]
    assert sizes[0] <= 16 << 20


def test_reduced_precision_settings_do_not_affect_the_kernel() -> None:
    s = build(91, [64], [900], head_dim=128, kv_heads=2)
    torch.set_float32_matmul_precision("medium")
    try:
        s.check(quire.attend(s.q, s.cache, s.batch, kernel="torch"))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.fixture(params=[1, 2, 3], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Any:
    """Workers of the suite have one thread each; a decode's tile is cut into one part a thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("format", ["fp32", "bf16", "e4m3fn"])
@pytest.mark.parametrize(
    "feature", [{}, {"window": 200}, {"alibi": True}, {"softcap": 2.0}, {"sinks": True}, {"form": "context"}], ids=str
)
def test_a_decode_divided_among_threads(
    feature: dict[str, Any], format: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    merged = strip._merged
    monkeypatch.setattr(strip, "_merged", lambda parts: seen.append(max(p.lse.shape[0] for p in parts)) or merged(parts))
    s = build(93, [1, 1, 1], [576, 1201, 20], format=format, scales="token", **feature)
    s.check(*quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, lse=True, kernel="torch"))
    if not feature.get("form"):  # whole pages that the threads divide: a window starts inside one
        assert max(seen) == (1 if feature.get("window") else threads)
