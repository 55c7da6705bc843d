"""Random calls with a known answer.

Caches are filled here by index formulas of their own, never by `quire.write` or a layout's `pack`; what a query can see is worked
out by brute force; and every slot, table cell, scale and padding row that is not required is poisoned.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch

from quire import Batch, KVCache, Options, Prefixes, Select, reference
from support import ds_mla, nvfp4, zero_points

TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int4": torch.uint8,
    "int4_zp": torch.uint8,
    "nvfp4": torch.uint8,
    "nvfp4_swizzled": torch.uint8,
}
"""The type of the storage; a byte of the last three has two elements."""
LARGEST = {"e4m3fn": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0, "int8": 127.0, "int4": 7.0, "int4_zp": 15.0}
LARGEST |= {"nvfp4": 448.0 * 6, "nvfp4_swizzled": 448.0 * 6}
Stored = torch.Tensor | nvfp4.Grouped | ds_mla.Stored | zero_points.WithZeros
"""The elements of K or V as they are stored."""


@dataclass
class Scenario:
    """A call, and what it must give: `expected [live, q_heads, v_head_dim]` and `expected_lse [live, q_heads]` in float64."""

    q: torch.Tensor
    cache: KVCache
    batch: Batch
    options: Options
    new: tuple[torch.Tensor, torch.Tensor | None] | None
    live: int
    expected: torch.Tensor
    expected_lse: torch.Tensor
    weighted: torch.Tensor
    """The same over the magnitudes of the values: what rounding errors are relative to."""
    steepest: float
    """The largest sum of a logit's terms without their signs: what its rounding error is relative to."""
    honest: torch.Tensor
    """The same in fp32, computed plainly: its error is what an honest implementation may lose."""

    def budget(self, dtype: torch.dtype, factors: torch.dtype = torch.float32) -> torch.Tensor:
        """The error allowed in each element of an output of this type: twice what plain fp32 loses here, and one rounding to the
        type. Plain fp32 may be lucky, so it counts at least as what one rounding of a logit's terms, or four of the weighted values
        before they cancel, must be expected to do.

        A kernel whose products take 16-bit factors rounds each weight once, and each value once if its scale is applied before: at
        most two roundings of the weighted values."""
        lost = (self.honest.double() - self.expected).abs().amax() if self.expected.numel() else torch.tensor(0.0)
        size = self.weighted.amax() if self.expected.numel() else torch.tensor(0.0)
        rounding = torch.finfo(dtype).eps / 2
        smallest = torch.finfo(dtype).smallest_normal * rounding
        return (
            2 * torch.maximum(lost, max(4.0, self.steepest) * torch.finfo(torch.float32).eps * size)
            + rounding * self.expected.abs()
            + smallest
            + (0.0 if factors is torch.float32 else torch.finfo(factors).eps * self.weighted)
        )

    def check(
        self, out: torch.Tensor, lse: torch.Tensor | None = None, scale: float = 1.0, factors: torch.dtype = torch.float32
    ) -> None:
        """Fails unless every live row is within its budget."""
        got = out[: self.live].double() * scale
        error = (got - self.expected).abs()
        wrong = ~(error <= self.budget(out.dtype, factors))
        where = wrong.nonzero()[:1].tolist()
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {where}, largest error {error.max():.3g}"
        if lse is not None:
            want = self.expected_lse
            same = (lse[: self.live].double() == want) | (
                (lse[: self.live].double() - want).abs() <= 4e-6 * want.abs().clamp(min=1)
            )
            assert same.all(), f"LSE wrong at {(~same).nonzero()[:1].tolist()}"


def build(
    seed: int,
    q_lens: list[int],
    kv_lens: list[int],
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    v_in_k: int | None = None,
    page_size: int = 16,
    layout: str = "nhd",
    x: int = 4,
    format: str = "fp32",
    v_format: str | None = None,
    scales: str = "tensor",
    storage: str = "native",
    q_dtype: str = "fp32",
    index: tuple[torch.dtype, ...] = (torch.int32, torch.int32, torch.int32),
    form: str = "full",
    context_from: int = 1,
    padding: int = 0,
    poison: float = math.nan,
    bad_id: int = -1,
    device: str = "cpu",
    shard: tuple[int, int, int] | None = None,
    spans: str | list[tuple[int, int]] | None = None,
    select: str | None = None,
    select_heads: int = 1,
    prefixes: list[tuple[tuple[int, ...], int, int]] | None = None,
    read_as: torch.dtype = torch.float64,
    **features: Any,
) -> Scenario:
    """A batch of sequences of these lengths. `features` are fields of Options; tensors among them are made here. In context form,
    sequences with fewer new tokens than `context_from` have them in the cache all the same, and not beside it. With a shard the
    cache holds the keys of one rank; queries, keys and values are those of the same call without it. `spans` has those of the live
    tokens, or is the name of a kind of them. `select` is positions or columns, for each of `select_heads`. Those of `prefixes` have
    the same pages in the columns [begin, end). With `v_in_k`, V is the first elements of K. A kernel may round what it reads from
    pages to `read_as`."""
    g, shuffle = torch.Generator().manual_seed(seed), random.Random(seed).shuffle
    v_head_dim = v_in_k or v_head_dim or head_dim
    formats = {"k": format, "v": v_format or format}
    seqs, q_heads, live = len(q_lens), kv_heads * group, sum(q_lens)
    tokens = live + padding
    starts = [sum(q_lens[:i]) for i in range(seqs + 1)]
    made = TYPES[q_dtype] if q_dtype not in LARGEST else torch.bfloat16
    options = _options(g, q_lens, kv_lens, tokens, q_heads, features)
    if isinstance(spans, str):
        spans = spans_like(spans, random.Random(seed), q_lens, kv_lens)
    visible = [_visible(options, starts[i], q_lens[i], kv_lens[i], i, spans) for i in range(seqs)]

    # The positions of each sequence that are on this rank, in order: the n-th of them is the n-th key of its pages.
    kept = [torch.tensor([p for p in range(n) if _is_kept(p, shard)], dtype=torch.long) for n in kv_lens]
    for i in range(seqs):
        hidden = torch.ones(kv_lens[i], dtype=torch.bool)
        hidden[kept[i]] = False
        visible[i][:, hidden] = False

    # What each kv head sees.
    sees = [v.expand(kv_heads, -1, -1) for v in visible]
    chosen: list[torch.Tensor | None] = [None] * seqs
    selection = None
    if select is not None:
        entries, made_positions = _selection(g, select, select_heads, q_lens, kv_lens, page_size, tokens)
        selection, chosen = Select(**{select: entries.to(index[0]).to(device)}), list(made_positions)
        sees = [v & _picked(at, n) for v, at, n in zip(sees, made_positions, kv_lens)]

    # Which tokens must be in the cache.
    required = [v.any(0).any(0) for v in sees]
    cached = [r.clone() for r in required]
    beside = [form == "context" and q_len >= context_from for q_len in q_lens]
    for i in range(seqs):
        if beside[i]:
            cached[i][kv_lens[i] - q_lens[i] :] = False

    # Pages in a shuffled order, three of which nobody owns. A cell is filled if its page holds a token that must be there.
    columns = [-(-len(at) // page_size) for at in kept]
    pages = sum(columns) + 3
    ids = list(range(pages))
    shuffle(ids)
    owned = [[ids.pop() for _ in range(n)] for n in columns]
    for members, begin, end in prefixes or ():
        for i in members[1:]:
            owned[i][begin:end] = owned[members[0]][begin:end]
    table = torch.full((seqs, max(columns, default=0) + 2), bad_id)
    for i, row in enumerate(owned):
        for c, page in enumerate(row):
            if cached[i][kept[i][c * page_size : (c + 1) * page_size]].any():
                table[i, c] = page

    dense, stored, scale = {}, {}, {}
    for part, dim in (("k", head_dim), ("v", v_head_dim)):
        if v_in_k is not None and part == "v":
            dense["v"] = [keys[..., :v_in_k] for keys in dense["k"]]
            continue
        dense[part] = [torch.randn(n, kv_heads, dim, generator=g).to(made).double() for n in kv_lens]
        for members, begin, end in prefixes or ():
            for i in members[1:]:
                same = slice(begin * page_size, end * page_size)
                dense[part][i][same] = dense[part][members[0]][same]
        content = torch.full((pages, page_size, kv_heads, dim), poison, dtype=torch.float64)
        scale[part] = _scales(g, part, formats[part], scales, pages, page_size, kv_heads, poison)
        for i, row in enumerate(owned):
            key = cached[i][kept[i]].nonzero().flatten()
            at, page, offset = kept[i][key], torch.tensor(row, dtype=torch.long)[key // page_size], key % page_size
            content[page, offset] = dense[part][i][at]
            if scales == "token" and formats[part] in LARGEST:
                scale[part][page, offset] = _token_scales(dense[part][i][at], formats[part])
        stored[part] = _stored(content, formats[part], scale[part])
        # What a reader sees is what was stored; new tokens in context form are seen as they are.
        read = stored[part].double()
        if scale[part] is not None:
            factor = (zero_points.factors(scale[part]) if formats[part] == zero_points.NAME else scale[part]).double()
            read = read * (factor.unsqueeze(-1) if scales == "token" else factor.reshape(-1, 1))
        read = read.to(read_as).double()
        for i, row in enumerate(owned):
            key = cached[i][kept[i]].nonzero().flatten()
            dense[part][i][kept[i][key]] = read[torch.tensor(row, dtype=torch.long)[key // page_size], key % page_size]

    cache = _wrap(stored, scale, layout, x, formats, storage, head_dim, device, v_in_k)
    q = torch.randn(tokens, q_heads, head_dim, generator=g)
    q_scale = float(options.q_scale) if options.q_scale is not None else 1.0
    q = q / q_scale
    if q_dtype in LARGEST:
        q = q.clamp(-LARGEST[q_dtype], LARGEST[q_dtype])  # what a cast makes of more than that depends on torch's version
    q = q.to(TYPES[q_dtype])
    q[live:] = torch.tensor(poison).to(q.dtype)
    new = None
    if form == "context":
        new_k = torch.full((tokens, kv_heads, head_dim), poison, dtype=made)
        new_v = torch.full((tokens, kv_heads, v_head_dim), poison, dtype=made)
        for i in range(seqs):
            if beside[i]:
                at = kept[i][kept[i] >= kv_lens[i] - q_lens[i]]
                token = starts[i] + at - (kv_lens[i] - q_lens[i])
                new_k[token], new_v[token] = dense["k"][i][at].to(made), dense["v"][i][at].to(made)
        new = (new_k.to(device), new_v.to(device) if v_in_k is None else None)
    batch = Batch(
        table.to(index[0]).to(device),
        torch.tensor(kv_lens, dtype=index[1], device=device),
        torch.tensor(starts, dtype=index[2], device=device),
        shard=shard,
        spans=None if spans is None else _padded(spans, padding, index[1]).to(device),
        select=selection,
        prefixes=None if prefixes is None else Prefixes(prefixes, seqs, device),
    )

    outs, lses, honest, weighted, steepest = [], [], [], [], 0.0
    for i in range(seqs):
        rows = slice(starts[i], starts[i + 1])
        causal = bool(options.causal[i]) if isinstance(options.causal, torch.Tensor) else options.causal
        mine: dict[str, Any] = {
            "scale": options.scale,
            "causal": causal,
            "window": options.sides,
            "softcap": options.softcap,
            "alibi": options.alibi,
            "sinks": options.sinks,
            "mask": None if options.mask is None else options.mask[rows],
            "positions": None if options.positions is None else options.positions[rows],
            "shard": shard,
            "spans": None if spans is None else torch.tensor(spans[rows]).view(-1, 2),
            "select": chosen[i],
        }
        exact_q = q[rows].double() * q_scale
        out, lse = reference.attention(exact_q, dense["k"][i], dense["v"][i], **mine)
        weighted.append(reference.attention(exact_q, dense["k"][i], dense["v"][i].abs(), **mine)[0])
        outs.append(out)
        if q_lens[i] and required[i].any():
            keys = dense["k"][i][required[i]].abs().repeat_interleave(group, 1)
            terms = torch.einsum("qhd,khd->hqk", exact_q.abs(), keys) * abs(options.scale or head_dim**-0.5)
            steepest = max(steepest, float(terms.max()))
        lses.append(lse)
        honest.append(_plain_fp32(q[rows].float() * q_scale, dense["k"][i], dense["v"][i], sees[i], options, rows, group))
    nothing = torch.zeros(0, q_heads, v_head_dim, dtype=torch.float64)
    return Scenario(
        q.to(device),
        cache,
        batch,
        _to(options, device),
        new,
        live,
        torch.cat([nothing, *outs]).to(device),
        torch.cat([nothing[:, :, 0], *lses]).to(device),
        torch.cat([nothing, *weighted]).to(device),
        steepest,
        torch.cat([nothing.float(), *honest]).to(device),
    )


def _selection(
    g: torch.Generator, select: str, heads: int, q_lens: list[int], kv_lens: list[int], page_size: int, tokens: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A random selection, and for each sequence the positions that it selects, `[q_len, heads, n]`. Entries are in no order, with
    -1 between them; some rows have none. Rows of padding, and of sequences without new tokens, hold nonsense."""
    rows = [[n] * q for q, n in zip(q_lens, kv_lens)] if select == "positions" else [[-(-n // page_size)] for n in kv_lens]
    many = 24 if select == "positions" else 6
    width = many + 3
    parts = []
    for limits in rows:
        part = torch.full((len(limits), heads, width), -1)
        for row, limit in enumerate(limits):
            for head in range(heads):
                count = min(limit, int(torch.randint(0, many + 1, (), generator=g)))
                places = torch.randperm(width, generator=g)[:count]
                part[row, head, places] = torch.randperm(limit, generator=g)[:count]
        parts.append(part)
    if select == "positions":
        found = parts
        nonsense = torch.full((tokens - sum(q_lens), heads, width), 10**6)
        return torch.cat([nonsense[:0], *parts, nonsense]), found
    found = []
    for part, q_len, kv_len in zip(parts, q_lens, kv_lens):
        at = torch.where(part[..., None] < 0, -1, part[..., None] * page_size + torch.arange(page_size)).flatten(2)
        found.append(torch.where(at < kv_len, at, -1).expand(q_len, -1, -1))
    entries = torch.cat(parts) if parts else torch.zeros(0, heads, width, dtype=torch.long)
    entries[torch.tensor(q_lens) == 0] = -7
    return entries, found


def _picked(positions: torch.Tensor, kv_len: int) -> torch.Tensor:
    """Which keys are among the positions of each query and head, bool `[heads, q_len, kv_len]`."""
    picked = torch.zeros(positions.shape[1], positions.shape[0], kv_len, dtype=torch.bool)
    for token, row in enumerate(positions):
        for head, at in enumerate(row):
            picked[head, token, at[at >= 0]] = True
    return picked


def _is_kept(position: int, shard: tuple[int, int, int] | None) -> bool:
    """Whether a key is on this rank: ranks take turns, `interleave` keys each."""
    if shard is None:
        return True
    rank, ranks, interleave = shard
    return position // interleave % ranks == rank


def _options(
    g: torch.Generator, q_lens: list[int], kv_lens: list[int], tokens: int, q_heads: int, features: dict[str, Any]
) -> Options:
    given = dict(features)
    if given.get("alibi") is True:
        given["alibi"] = torch.rand(q_heads, generator=g) * 0.2
    if given.get("sinks") is True:
        given["sinks"] = torch.randn(q_heads, generator=g) * 2
    if given.get("causal") == "mixed":
        given["causal"] = torch.arange(len(q_lens)) % 2 == 0
    if given.get("mask") is True:
        # A random tree: each new token sees itself, its parent, and what its parent sees; depth is its position.
        longest = max(q_lens, default=0)
        mask = torch.rand(tokens, longest + 3, generator=g) > 0.5
        positions = torch.full((tokens,), -(10**6))
        start = 0
        for q_len, kv_len in zip(q_lens, kv_lens):
            tree = torch.zeros(q_len, q_len, dtype=torch.bool)
            depth = torch.zeros(q_len, dtype=torch.long)
            for t in range(q_len):
                parent = int(torch.randint(-1, t, (1,), generator=g)) if t else -1
                if parent >= 0:
                    tree[t] = tree[parent]
                    depth[t] = depth[parent] + 1
                tree[t, t] = True
            mask[start : start + q_len, :q_len] = tree
            positions[start : start + q_len] = kv_len - q_len + depth
            start += q_len
        given["mask"] = mask
        if given.get("window") is not None or given.get("alibi") is not None:
            given["positions"] = positions
    return Options(**given)


def spans_like(kind: str, r: random.Random, q_lens: list[int], kv_lens: list[int]) -> list[tuple[int, int]]:
    """Spans of the new tokens of sequences. causal; chunks of 13 keys; prefix: the first third is seen both ways; images: windows
    of 9 keys, and some runs of tokens that see all of their run; any: unrelated ones, some empty."""
    made = []
    for q_len, kv_len in zip(q_lens, kv_lens):
        low, high = 0, 0
        for at in range(kv_len - q_len, kv_len):
            if kind == "images" and at >= high and r.random() < 0.3:
                low, high = at, min(kv_len, at + r.randint(2, 20))
            a, b = r.randint(0, max(kv_len, 0)), r.randint(0, max(kv_len, 0))
            made.append(
                {
                    "causal": (0, at + 1),
                    "chunks": (max(0, at // 13 * 13), at + 1),
                    "prefix": (0, max(at + 1, kv_len // 3)),
                    "images": (min(low, max(0, at - 8)) if at < high else max(0, at - 8), max(high, at + 1)),
                    "any": r.choice([(a, b), (min(a, b), max(a, b)), (kv_len, 0), (-5, -9)]),
                }[kind]
            )
    return made


def _padded(spans: list[tuple[int, int]], padding: int, dtype: torch.dtype) -> torch.Tensor:
    """Spans as a tensor; those of padding rows are outside of every sequence."""
    return torch.tensor([*spans, *[(-7, 10**9)] * padding], dtype=dtype).view(-1, 2)


def _visible(
    options: Options, start: int, q_len: int, kv_len: int, seq: int, spans: list[tuple[int, int]] | None = None
) -> torch.Tensor:
    """Who sees whom in one sequence, bool [q_len, kv_len], token by token."""
    context = kv_len - q_len
    left, right = options.sides
    causal = bool(options.causal[seq]) if isinstance(options.causal, torch.Tensor) else options.causal
    visible = torch.zeros(q_len, kv_len, dtype=torch.bool)
    for t in range(q_len):
        for j in range(kv_len):
            q_at, k_at = context + t, j
            if options.positions is not None:
                q_at = int(options.positions[start + t])
                k_at = int(options.positions[start + j - context]) if j >= context else j
            if spans is not None:
                see = spans[start + t][0] <= j < spans[start + t][1]
            elif options.mask is not None:
                see = j < context or bool(options.mask[start + t, j - context])
            else:
                see = not causal or k_at <= q_at
            if left is not None:
                see = see and q_at - k_at <= left
            if right is not None:
                see = see and k_at - q_at <= right
            visible[t, j] = see
    return visible


def _plain_fp32(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, options: Options, rows: slice, group: int
) -> torch.Tensor:
    """One sequence in fp32, head by head, with a plain two-pass softmax."""
    seen = visible.any(1).T[..., None]
    k, v = torch.where(seen, k, 0.0).float(), torch.where(seen, v, 0.0).float()
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2])
    context = k.shape[0] - q.shape[0]
    q_at, k_at = torch.arange(context, k.shape[0]), torch.arange(k.shape[0])
    if options.positions is not None:
        q_at = options.positions[rows].long()
        k_at = torch.cat((k_at[:context], q_at))
    for h in range(q.shape[1]):
        s = (q[:, h] @ k[:, h // group].T) * (options.scale if options.scale is not None else q.shape[2] ** -0.5)
        if options.softcap is not None:
            s = options.softcap * torch.tanh(s / options.softcap)
        if options.alibi is not None:
            s = s - options.alibi[h].float() * (q_at[:, None] - k_at).abs()
        s = s.masked_fill(~visible[h // group], -math.inf)
        sink = options.sinks[h].float() if options.sinks is not None else torch.tensor(-math.inf)
        top = torch.maximum(s.amax(-1, keepdim=True) if s.shape[1] else torch.full((s.shape[0], 1), -math.inf), sink)
        top = top.masked_fill(top == -math.inf, 0.0)
        e = torch.exp(s - top)
        total = e.sum(-1, keepdim=True) + torch.exp(sink - top)
        out[:, h] = torch.where(total > 0, e / total, 0.0) @ v[:, h // group]
    return out


def _scales(
    g: torch.Generator, part: str, format: str, kind: str, pages: int, page_size: int, kv_heads: int, poison: float
) -> torch.Tensor | None:
    if format not in LARGEST:
        return None
    base = (4.0 if part == "k" else 5.0) / LARGEST[format]  # data reach past 4 now and then: some of them saturate
    if kind == "tensor":
        return torch.tensor(base)
    if kind == "head":
        return base * (0.75 + 0.5 * torch.rand(kv_heads, generator=g))
    return torch.full((pages, page_size, kv_heads), poison)


def _token_scales(rows: torch.Tensor, format: str) -> torch.Tensor:
    """Scales that fit rows `[tokens, kv_heads, dim]`."""
    if format == zero_points.NAME:
        return zero_points.scales_of(rows)
    largest = rows.float().abs().amax(-1)
    return torch.where(largest == 0, 1.0, largest / LARGEST[format])


def _stored(content: torch.Tensor, format: str, scale: torch.Tensor | None) -> Stored:
    if format == ds_mla.NAME:
        return ds_mla.encoded(content)
    if scale is None:
        return content.to(TYPES[format])
    if format == zero_points.NAME:
        return zero_points.encoded(content, scale)
    wide = scale.unsqueeze(-1) if scale.dim() == 3 else scale.reshape(-1, 1)
    x = (content.float() / wide).clamp(-LARGEST[format], LARGEST[format])
    if format.startswith("nvfp4"):
        return nvfp4.encoded(x)
    if format.startswith("int"):
        x = torch.where(x.isnan(), 101.0 if format == "int8" else 5.0, x.round()).to(torch.int8)
    return x if format == "int4" else x.to(TYPES[format])


def in_bytes(stored: Stored, format: str) -> torch.Tensor:
    """Elements as integers of their size. Two of int4 make a byte, the even one below."""
    if isinstance(stored, ds_mla.Stored):
        return stored.bytes()
    if not format.startswith("int4"):
        return stored.view(_bits(format))
    codes = (stored.codes if isinstance(stored, zero_points.WithZeros) else stored).to(torch.int16) % 16
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def _wrap(
    stored: dict[str, Any],
    scale: dict[str, torch.Tensor | None],
    layout: str,
    x: int,
    formats: dict[str, str],
    storage: str,
    head_dim: int,
    device: str,
    v_in_k: int | None,
) -> KVCache:
    formats = {part: format for part, format in formats.items() if part in stored}
    if layout == "vllm_joint":
        tensors = [place("hnd", "k", torch.cat([in_bytes(stored[part], format) for part, format in formats.items()], -1), x)]
    else:
        tensors = [
            nvfp4.pages_of(stored[part], layout, format == "nvfp4_swizzled")
            if format.startswith("nvfp4")
            else place(layout, part, in_bytes(stored[part], format), x)
            for part, format in formats.items()
        ]
    if storage == "padded":
        # Every page followed by a gap, as engines leave it for alignment; the gap is poisoned too.
        tensors = [torch.cat((t, torch.full_like(t[:, :1], -1)), 1)[:, :-1] for t in tensors]
    if storage != "bytes":
        tensors = [t.view(TYPES.get(format, torch.uint8)) for t, format in zip(tensors, formats.values())]
    names: dict[str, Any] = {f"{part}_format": format for part, format in formats.items()}
    names |= {f"{part}_scale": None if one is None else one.to(device) for part, one in scale.items()}
    return KVCache.wrap(*(t.to(device) for t in tensors), layout=layout, head_dim=head_dim, v_in_k=v_in_k, **names)


def _bits(format: str) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[TYPES[format].itemsize]


def place(layout: str, part: str, pages: torch.Tensor, x: int) -> torch.Tensor:
    """`[pages, page_size, heads, dim]` in a layout, spelled out element by element along the split axis."""
    count, size, heads, dim = pages.shape
    if layout == "nhd":
        return pages.clone()
    if layout == "hnd":
        return pages.transpose(1, 2).contiguous()
    if part == "k":
        out = pages.new_empty(count, heads, dim // x, size, x)
        for d in range(dim):
            out[:, :, d // x, :, d % x] = pages[:, :, :, d].transpose(1, 2)
        return out
    if layout == "vllm_x":
        return pages.permute(0, 2, 3, 1).contiguous()
    out = pages.new_empty(count, heads, size // x, dim, x)
    for s in range(size):
        out[:, :, s // x, :, s % x] = pages[:, s]
    return out


def _to(options: Options, device: str) -> Options:
    values = {name: getattr(options, name) for name in Options.__dataclass_fields__}
    return Options(**{name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in values.items()})
