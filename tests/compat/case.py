"""Mixed batches in vLLM's arguments, with a known answer and poison wherever nothing may read.

Ordinary magnitudes, real fp8 bytes, scales that are not 1: what the upstream test leaves out. Caches are filled by index formulas
of their own; pages that nobody owns, slots that no query of a row can see, dense rows that the cache must serve, and table cells
without a page hold NaN and -1.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from quire import reference
from quire.compat.vllm.caches import platform_fp8
from support.scenario import Scenario

ScaleOf = {"auto": (None, None), "fp8": (0.021, 0.013), "fp8_e4m3": (0.021, 0.013), "fp8_e5m2": (0.37, 0.29)}


@dataclass
class Case:
    """One call. `arguments` are the fourteen that `chunked_prefill_paged_decode` and `context_attention_fwd` have in common, in
    their order, under the names of the former; `options` are keyword arguments."""

    arguments: dict[str, Any]
    options: dict[str, Any]
    scenario: Scenario
    starts: list[int]
    pages: list[list[int]]
    page_size: int
    dense: tuple[torch.Tensor, torch.Tensor]
    """All keys and values as the rows see them, float64 [sum of seq_lens, kv_heads, head_size]."""

    @property
    def output(self) -> torch.Tensor:
        return self.arguments["output"]

    def run(self, op: Any, **options: Any) -> torch.Tensor:
        """Calls an operator with the fourteen arguments by position, and the others by keyword."""
        op(*self.arguments.values(), **{**self.options, **options})
        return self.output

    def check(self, out: torch.Tensor | None = None, rows: list[int] | None = None, scale: float = 1.0) -> None:
        """Fails unless the rows (all of them, if none are named) are right, and all others untouched."""
        out = self.output if out is None else out
        factors = self.arguments["query"].dtype
        error = (out[: self.scenario.live].double() * scale - self.scenario.expected).abs()
        wrong = ~(error <= self.scenario.budget(out.dtype, factors))
        right_to_be_nan = torch.ones(out.shape[0], dtype=torch.bool, device=out.device)
        for i in range(len(self.starts) - 1) if rows is None else rows:
            right_to_be_nan[self.starts[i] : self.starts[i + 1]] = False
        bad = wrong.flatten(1).any(1) & ~right_to_be_nan[: self.scenario.live]
        count, first = int(wrong[bad].sum()), bad.nonzero().flatten()[:1].tolist()
        assert not bad.any(), f"{count} elements wrong, first in row {first}, largest error {float(error[bad].max()):.3g}"
        touched = ~out.float().isnan().flatten(1).all(1) & right_to_be_nan
        assert not touched.any(), f"output rows {touched.nonzero().flatten()[:4].tolist()} were written and should not have been"


def build(
    device: str,
    q_lens: list[int],
    seq_lens: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 24,
    page_size: int = 16,
    x: int = 8,
    kv_cache_dtype: str = "auto",
    dtype: torch.dtype = torch.float16,
    dense_from: int = 2,
    window: int = 0,
    alibi: bool | torch.Tensor = False,
    sinks: bool = False,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    padding: int = 0,
    hints: tuple[int, int] | None = None,
    index: tuple[torch.dtype, torch.dtype, torch.dtype] = (torch.int32, torch.int32, torch.int32),
    token_major: bool = False,
    seed: int = 0,
) -> Case:
    """Rows with at least `dense_from` new tokens bring those along; the others, and with 0 all of them, have them in the cache."""
    g = torch.Generator(device).manual_seed(seed)
    seqs, live = len(q_lens), sum(q_lens)
    starts = [sum(q_lens[:i]) for i in range(seqs + 1)]
    begins = [sum(seq_lens[:i]) for i in range(seqs + 1)]
    left = window - 1 if window > 0 else None
    normal = {"generator": g, "device": device}
    slopes = 2.0 ** -(1 + torch.arange(heads, device=device) * 7.0 / heads) if alibi is True else alibi
    options: dict[str, Any] = {
        "scale": scale,
        "causal": causal,
        "window": (left, None),
        "softcap": softcap,
        "alibi": slopes if isinstance(slopes, torch.Tensor) else None,
        "sinks": torch.randn(heads, **normal) if sinks else None,
    }

    # Which tokens the cache must hold, and in which pages.
    width = max((-(-n // page_size) for n in seq_lens), default=0) + 2
    count = sum(-(-n // page_size) for n in seq_lens) + 3
    ids = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((seqs, width), -1, dtype=torch.int64)
    pages, sequence, position = [], [], []
    for i, (q_len, seq_len) in enumerate(zip(q_lens, seq_lens)):
        context = seq_len - q_len
        first = 0 if left is None else max(0, context - left)
        end = context if dense_from and q_len >= dense_from else seq_len
        first, end = (first, end) if q_len else (0, 0)
        pages.append([ids.pop() for _ in range(-(-seq_len // page_size))])
        for column in range(first // page_size, -(-end // page_size)) if first < end else ():
            table[i, column] = pages[i][column]
        sequence += [i] * max(end - first, 0)
        position += range(first, end)
    sequence_of, at = torch.tensor(sequence, dtype=torch.long), torch.tensor(position, dtype=torch.long)
    row_of = (torch.tensor(begins)[sequence_of] + at).to(device)
    slot_of = (table[sequence_of, at // page_size] * page_size + at % page_size).to(device)

    # Keys and values of every token; those in the cache are what a reader sees of the bytes there.
    format = {"fp8_e5m2": torch.float8_e5m2, "auto": dtype}.get(kv_cache_dtype) or platform_fp8(torch.device(device)).dtype
    scales = ScaleOf[kv_cache_dtype]
    everything, storage = [], []
    for of_scale in scales:
        values = torch.randn(begins[-1], kv_heads, head_dim, **normal).to(dtype)
        content = torch.full((count * page_size, kv_heads, head_dim), torch.nan, device=device)
        content[slot_of] = values[row_of].float()
        if of_scale is not None:
            most = torch.finfo(format).max
            content = (content / of_scale).clamp(-most, most)
        stored = content.to(format)
        exact = values.double()
        exact[row_of] = stored[slot_of].double() * (of_scale or 1.0) if format.itemsize > 1 else _read(stored, slot_of, of_scale)
        everything.append(exact)
        storage.append(stored.view(count, page_size, kv_heads, head_dim))
    if not token_major:
        bits = [_bits(t) for t in storage]
        storage = [
            bits[0].view(count, page_size, kv_heads, head_dim // x, x).permute(0, 2, 3, 1, 4).contiguous().view(format),
            bits[1].permute(0, 2, 3, 1).contiguous().view(format),
        ]
    if kv_cache_dtype != "auto":
        storage = [t.view(torch.uint8) for t in storage]

    # The new tokens, and the dense rows that nobody may read.
    query = torch.full((live + padding, heads, head_dim), torch.nan, dtype=dtype, device=device)
    query[:live] = torch.randn(live, heads, head_dim, **normal)
    new = [torch.full((live + padding, kv_heads, head_dim), torch.nan, dtype=dtype, device=device) for _ in range(2)]
    for i, (q_len, seq_len) in enumerate(zip(q_lens, seq_lens)):
        if dense_from and q_len >= dense_from:
            for part, exact in zip(new, everything):
                part[starts[i] : starts[i + 1]] = exact[begins[i] + seq_len - q_len : begins[i + 1]].to(dtype)

    parts = [
        _answer(query[a:b], *(e[c:d] for e in everything), options) for (a, b), (c, d) in zip(pairwise(starts), pairwise(begins))
    ]
    nothing = torch.zeros(0, heads, head_dim, dtype=torch.float64, device=device)
    expected, weighted, honest, lse, steepest = ([part[i] for part in parts] for i in range(5))
    scenario: Any = Scenario(
        q=query,
        cache=None,  # type: ignore[arg-type]
        batch=None,  # type: ignore[arg-type]
        options=None,  # type: ignore[arg-type]
        new=None,
        live=live,
        expected=torch.cat([nothing, *expected]),
        expected_lse=torch.cat([nothing[:, :, 0], *lse]),
        weighted=torch.cat([nothing, *weighted]),
        steepest=max(steepest, default=0.0),
        honest=torch.cat([nothing.float(), *honest]),
    )
    max_seq_len, max_query_len = hints or (max(seq_lens, default=0), max(q_lens, default=0))
    arguments = {
        "query": query,
        "key": new[0] if dense_from else None,
        "value": new[1] if dense_from else None,
        "output": torch.full((live + padding, heads, head_dim), torch.nan, dtype=dtype, device=device),
        "kv_cache_dtype": kv_cache_dtype,
        "key_cache": storage[0],
        "value_cache": storage[1],
        "block_table": table.to(index[0]).to(device),
        "query_start_loc": torch.tensor(starts, dtype=index[1], device=device),
        "seq_lens": torch.tensor(seq_lens, dtype=index[2], device=device),
        "max_seq_len": max_seq_len,
        "max_query_len": max_query_len,
        "k_scale": torch.tensor(scales[0] or 1.0, device=device),
        "v_scale": torch.tensor([scales[1] or 1.0], device=device),
    }
    keywords = {"sliding_window": window, "alibi_slopes": options["alibi"], "sinks": options["sinks"]}
    given = {name: value for name, value in keywords.items() if value is not None}
    given |= {} if causal else {"causal": False}
    given |= {} if scale is None else {"sm_scale": scale}
    return Case(arguments, given, scenario, starts, pages, page_size, (everything[0], everything[1]))


def _read(stored: torch.Tensor, slot: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Quantised elements as a reader sees them; torch moves one-byte floats as bytes. Scales are fp32 numbers."""
    return _bits(stored)[slot].view(stored.dtype).double() * float(torch.tensor(scale or 1.0, device="cpu"))


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.dtype.itemsize])


def _answer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """One row: its output, the same over the magnitudes of the values, the same in plain fp32, its LSE, and the largest sum of a
    logit's terms without their signs."""
    dim, q_len, kv_len = v.shape[2], q.shape[0], k.shape[0]
    if not q_len:
        empty = q.double()
        return empty, empty, q.float(), empty[:, :, 0], 0.0
    both, lse = reference.attention(q, k, torch.cat((v, v.abs()), -1), **options)
    group, scale = q.shape[1] // k.shape[1], options["scale"] or q.shape[2] ** -0.5
    k32, v32 = (x.float().repeat_interleave(group, 1) for x in (k, v))
    distance = torch.arange(kv_len - q_len, kv_len, device=q.device)[:, None] - torch.arange(kv_len, device=q.device)
    left, _ = options["window"]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden |= (distance < 0) if options["causal"] else False
    hidden |= (distance > left) if left is not None else False
    logits = torch.einsum("qhd,khd->hqk", q.float(), k32) * scale
    terms = torch.einsum("qhd,khd->hqk", q.float().abs(), k32.abs()).masked_fill(hidden, 0.0).max() * scale
    if options["softcap"] is not None:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    if options["alibi"] is not None:
        logits = logits - options["alibi"][:, None, None] * distance.abs()
    logits = logits.masked_fill(hidden, -torch.inf)
    sink = torch.full((q.shape[1],), -torch.inf, device=q.device) if options["sinks"] is None else options["sinks"]
    with_sink = torch.cat((logits, sink[:, None, None].expand(-1, q_len, 1)), -1)
    weights = torch.softmax(with_sink, -1)[..., :-1]
    return both[..., :dim], both[..., dim:], torch.einsum("hqk,khd->qhd", weights, v32), lse, float(terms)
