"""Compilations counted on a card by Triton's own listener: what `quire.prepare` covers, and what `quire.explain` says of a call."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import quire
from gpu.calls import DEVICE, needs_gpu

SEQS, COLUMNS, PAGE, GROUP = 300, 14, 16, 4


class Layer:
    """A cache, and random calls of it."""

    def __init__(self, kv_heads: int, head_dim: int, format: str = "bf16"):
        self.kv_heads, self.head_dim, self.chance = kv_heads, head_dim, random.Random(head_dim)
        scales: dict[str, Any] = (
            {name: torch.ones((), device=DEVICE) for name in ("k_scale", "v_scale")} if format == "e4m3fn" else {}
        )
        dtype = {"bf16": torch.bfloat16, "e4m3fn": torch.float8_e4m3fn}[format]
        k, v = (torch.zeros(SEQS * COLUMNS, PAGE, kv_heads, head_dim, device=DEVICE).to(dtype) for _ in "kv")
        self.cache = quire.KVCache.wrap(k, v, layout="nhd", format=format, **scales)

    def batch(self) -> tuple[int, quire.Batch]:
        """The number of tokens, and a batch of them: decodes, verifications, prefills or all of these, some rows empty."""
        chance = self.chance
        most = chance.choice((1, 1, 5, 90))
        q_lens = [chance.randint(0, most) for _ in range(chance.choice((1, 3, chance.randint(1, SEQS))))]
        kv_lens = [q_len + chance.randint(0, 120) for q_len in q_lens]
        pages = chance.sample(range(SEQS * COLUMNS), len(q_lens) * COLUMNS)
        table = torch.tensor(pages).view(len(q_lens), COLUMNS)
        starts = torch.tensor([0, *q_lens]).cumsum(0)
        index = [tensor.to(DEVICE, torch.int32) for tensor in (table, torch.tensor(kv_lens), starts)]
        hint = chance.choice((None, max(q_lens) or None))
        return max(1, sum(q_lens)) + chance.choice((0, 0, 7)), quire.Batch(*index, max_q_len=hint)

    def rows(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values: of one projection, or in memory that no vector load can read."""
        heads, how = (self.kv_heads * GROUP, self.kv_heads, self.kv_heads), self.chance.choice(("fused", "fused", "odd"))
        if how == "fused":
            q, k, v = torch.zeros(tokens, sum(heads), self.head_dim, dtype=torch.bfloat16, device=DEVICE).split(heads, 1)
        else:
            wide = [torch.zeros(tokens, n, self.head_dim + 1, dtype=torch.bfloat16, device=DEVICE) for n in heads]
            q, k, v = (tensor[..., 1:] for tensor in wide)
        return q, k, v


class Compilations(list[str]):
    """The kernels that Triton compiled since, by name; those that it found in its cache have their own list."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path):
        from triton import knobs

        self.found: list[str] = []
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
        monkeypatch.setattr(knobs.compilation, "listener", self.listen)

    def listen(self, *, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        (self.found if cache_hit else self).append(metadata["name"])


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compilations:
    """Counted from an empty compile cache, in a process that has loaded no kernel."""
    from quire import launch
    from quire.kernels.triton.host import program

    monkeypatch.setattr(program, "_loaded", {})
    launch._known.clear()
    return Compilations(monkeypatch, tmp_path)


@needs_gpu
@pytest.mark.parametrize("format", ["bf16", "e4m3fn"])
def test_nothing_is_compiled_after_prepare(format: str, compilations: Compilations) -> None:
    layer = Layer(2, 64, format)
    prepared = quire.prepare(layer.cache, q_heads=2 * GROUP, q_dtype=torch.bfloat16, progress=False)
    # Subprocesses have compiled; here their kernels are found in the compile cache and loaded.
    assert compilations == [] and len(compilations.found) == len(prepared.kernels) > 0
    compilations.found.clear()
    for number in range(200):
        tokens, batch = layer.batch()
        q, k, v = layer.rows(tokens)
        if number % 2:
            quire.step(q, k, v, layer.cache, batch)
        else:
            quire.attend(q, layer.cache, batch)
    torch.cuda.synchronize()
    assert compilations == [] and compilations.found == []


@needs_gpu
@pytest.mark.parametrize(("kv_heads", "head_dim", "format"), [(3, 48, "bf16"), (5, 80, "e4m3fn")])
def test_explain_counts_the_compilations(kv_heads: int, head_dim: int, format: str, compilations: Compilations) -> None:
    """Of a problem that nobody has launched before, and of its next batch, which may need others."""
    layer, known = Layer(kv_heads, head_dim, format), set[str]()
    for _ in range(3):
        tokens, batch = layer.batch()
        q, k, v = layer.rows(tokens)
        needed = set(quire.explain(q, layer.cache, batch, k=k, v=v, operation="step").compiled)
        quire.step(q, k, v, layer.cache, batch)
        assert needed and len(compilations) == len(needed - known), compilations
        assert compilations.found == []
        known |= needed
        compilations.clear()
