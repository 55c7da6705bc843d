"""One attention layer over several steps: in a single process, with the exact results and their error budgets; and on ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

import quire
from quire.conformance.cases.call import KernelCall
from quire.conformance.oracle.budget import Truth, truth
from quire.problem import default_out_dtype

MIXED = ((33, 5, 1), (1, 17, 2), (1, 1, 1))
"""New tokens of three sequences in three steps: prefill, chunked prefill with decode, decode."""


def slopes(heads: int) -> torch.Tensor:
    """ALiBi slopes of a model with this many heads."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


@dataclass
class Layer:
    """A layer of the whole model, its steps, and random tokens that are the same in every process."""

    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 8
    dtype: torch.dtype = torch.float32
    format: str = "fp32"
    scales: str | None = None
    """Of a quantised cache: tensor, head or token."""
    steps: tuple[tuple[int, ...], ...] = MIXED
    padding: int = 0
    """Rows of q, k and v after the last token."""
    options: dict[str, Any] = field(default_factory=dict)
    ledger: bool = False
    seed: int = 0

    def whole_options(self, step: int) -> quire.Options:
        given = dict(self.options)
        generator = torch.Generator().manual_seed(self.seed)
        if given.get("alibi"):
            given["alibi"] = slopes(self.q_heads)
        if given.get("sinks"):
            given["sinks"] = 2 * torch.randn(self.q_heads, generator=generator)
        if given.get("mask"):
            # A token sees itself, and others with a probability of one half.
            tokens, longest = sum(self.steps[step]) + self.padding, max(self.steps[step])
            index = torch.cat([torch.arange(count) for count in (*self.steps[step], self.padding)])
            given["mask"] = (torch.rand(tokens, longest, generator=generator) < 0.5) | (index[:, None] == torch.arange(longest))
        return quire.Options(**given)

    def whole_scales(self) -> dict[str, torch.Tensor]:
        """Scales that are not 1, and differ between K and V and between heads."""
        if self.scales == "tensor":
            return {"k_scale": torch.tensor(0.03), "v_scale": torch.tensor(0.05)}
        if self.scales == "head":
            heads = 1 + 0.3 * torch.arange(self.kv_heads)
            return {"k_scale": 0.02 * heads, "v_scale": 0.07 / heads}
        return {}

    def tokens(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of all heads. Padding rows are NaN."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        count = sum(self.steps[step])
        heads = (self.q_heads, self.kv_heads, self.kv_heads)
        rows = torch.randn(count, sum(heads), self.head_dim, generator=generator)
        rows = torch.cat((rows, torch.full((self.padding, *rows.shape[1:]), torch.nan)))
        q, k, v = rows.split(heads, dim=1)
        kind = self.dtype
        if kind.itemsize == 1:
            return (q / self.options["q_scale"]).to(kind), k.bfloat16(), v.bfloat16()
        return q.to(kind), k.to(kind), v.to(kind)

    def cache(self, pool: quire.PagePool, kv_heads: int, scales: dict[str, Any]) -> quire.KVCache:
        kind = quire.cache.format.FORMATS[self.format].dtype
        given = {"scales": "token"} if self.scales == "token" else scales
        sizes = {"kv_heads": kv_heads, "head_dim": self.head_dim, "dtype": kind}
        return quire.KVCache.allocate(pool, **sizes, ledger=self.ledger, **given)

    @cached_property
    def answers(self) -> list[tuple[Truth, int]]:
        """Exact results and error budgets of every step of a single process, and the number of its live rows."""
        pool = quire.PagePool(pages=64, page_size=self.page_size)
        cache = self.cache(pool, self.kv_heads, self.whole_scales())
        sequences, found = [pool.sequence() for _ in self.steps[0]], []
        for step, counts in enumerate(self.steps):
            q, k, v = self.tokens(step)
            batch = pool.step(dict(zip(sequences, counts)))
            quire.write(k, v, cache, batch)
            options = self.whole_options(step)
            call = kernel_call(q, cache, batch, options)
            want = truth(call)
            found.append((want, sum(counts)))
            # The single process itself is within the budget, too.
            single = quire.attend(q, cache, batch, options, lse=True)
            assert error(*single, want, sum(counts), slice(None)) <= 1
        return found

    def on_ranks(self, tp: Any, cp: Any, *, split: Any = None, rounding: float = 0.0, buffers: bool = False) -> float:
        """Runs all steps on this rank: `tp` divides heads, `cp` keys, either may be None. With `split`, a TensorParallel over all
        ranks, this rank has only its own query heads; with `buffers`, results go to given ones. The largest error over its
        budget."""
        shard = {} if cp is None else {"shard": cp.shard}
        pool = quire.PagePool(pages=64, page_size=self.page_size, **shard)
        scales, kv_heads = self.whole_scales(), self.kv_heads
        if tp is not None:
            kv_heads = tp.kv_heads
            scales = {name: tp.scale(scale) for name, scale in scales.items()}
        cache = self.cache(pool, kv_heads, scales)
        sequences, worst = [pool.sequence() for _ in self.steps[0]], 0.0
        for step, counts in enumerate(self.steps):
            q, k, v = self.tokens(step)
            options = self.whole_options(step) if tp is None else tp.options(self.whole_options(step))
            own = split or tp
            if own is not None:
                q, k, v = own.q(q), own.kv(k), own.kv(v)
            batch = pool.step(dict(zip(sequences, counts)))
            if cp is None:
                out, lse = quire.step(q, k, v, cache, batch, options, lse=True)
            else:
                dtype = default_out_dtype(q.dtype, options.out_scale is not None)
                given = torch.zeros(*q.shape[:2], self.head_dim, dtype=dtype) if buffers else None
                out, lse = cp.step(q, k, v, cache, batch, options, out=given, lse=True)
            heads = slice(None) if own is None else slice(own.rank * own.q_heads, (own.rank + 1) * own.q_heads)
            want, live = self.answers[step]
            worst = max(worst, error(out, lse, want, live, heads, rounding))
            assert not out[live:].float().any() and not lse[live:].any(), "padding rows are zero"
        return worst


def error(out: torch.Tensor, lse: torch.Tensor, want: Truth, live: int, heads: slice, rounding: float = 0.0) -> float:
    """The largest error over its budget, of the output and the LSE. `rounding` is that of partial results, which are rounded once
    before they are merged: relative to the weighted values."""
    right, budget = want.outcome.out[:live, heads], want.budget[:live, heads] + rounding * want.outcome.weighted[:live, heads]
    off = (out[:live].double() - right).abs() / budget
    lse_right = want.outcome.lse[:live, heads]
    lse_off = (lse[:live].double() - lse_right).abs() / want.lse_budget[:live, heads]
    lse_off = torch.where(lse[:live] == lse_right, 0.0, lse_off)
    return max(float(each.nan_to_num(torch.inf, torch.inf).max()) if each.numel() else 0.0 for each in (off, lse_off))


def kernel_call(q: torch.Tensor, cache: quire.KVCache, batch: quire.Batch, options: quire.Options) -> KernelCall:
    """The call as the oracle takes it."""
    dtype = default_out_dtype(q.dtype, options.out_scale is not None)
    given = {name: getattr(options, name) for name in ("causal", "softcap", "alibi", "sinks", "mask", "q_scale", "out_scale")}
    return KernelCall(
        q, cache.k, cache.v, batch.page_table.clone(), batch.kv_lens.clone(), batch.q_starts.clone(),
        torch.empty(*q.shape[:2], cache.v_head_dim, dtype=dtype),
        scale=q.shape[2] ** -0.5 if options.scale is None else options.scale,
        layout=cache.layout.name, format=cache.format.name, k_scale=cache.k_scale, v_scale=cache.v_scale,
        window=options.sides, **given,
    )  # fmt: skip
