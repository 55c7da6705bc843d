"""Builds the call of a case: numbers, pages, page table, and poison in everything that must not be read.

Caches are filled by index formulas of the kit itself. Visibility is computed here too, so that everything else can be poisoned:
slots after the end of a sequence, pages of no sequence, entries of the page table outside the window, and padding rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from quire.conformance.cases.call import KernelCall, checksum, guarded
from quire.conformance.cases.case import Case
from quire.conformance.cases.formats import (
    DS_MLA,
    GROUP,
    LARGEST,
    PACK,
    TYPES,
    ZERO_POINTS,
    encode_groups,
    encode_latent,
    encode_with_zero_point,
    grouped_at,
    hadamard,
    numbers_of_groups,
    pairs,
    scale_with_zero_point,
    units_of,
    without_zero_point,
    zero_point,
)
from quire.conformance.cases.page_plan import PagePlan, generator, kept_positions, page_plan, page_table, prefixes_of
from quire.options import NUMBERS

Q_SCALE = 0.25
"""The q_scale of fp8 queries."""
MOST_COMPENSATED = 12.0
"""The largest ALiBi bias that the query of a needle compensates."""

Index = Callable[..., tuple[torch.Tensor, ...]]
LAYOUT_INDEX: dict[str, tuple[Index, Index]] = {
    "nhd": (lambda p, s, h, d, x: (p, s, h, d),) * 2,
    "hnd": (lambda p, s, h, d, x: (p, h, s, d),) * 2,
    "vllm_joint": (lambda p, s, h, d, x: (p, h, s, d),) * 2,
    "vllm_x": (lambda p, s, h, d, x: (p, h, d // x, s, d % x), lambda p, s, h, d, x: (p, h, d, s)),
    "aiter": (lambda p, s, h, d, x: (p, h, d // x, s, d % x), lambda p, s, h, d, x: (p, h, s // x, d, s % x)),
}
"""For each layout, the index of element (page, offset, head, dim) in the tensor of K and in that of V. Where a byte has several
elements, dim counts bytes."""


def x_of(case: Case, part: str) -> int:
    return case.x or 16 // TYPES[case.formats[part]].itemsize


def build(case: Case, device: torch.device | str = "cpu") -> KernelCall:
    """The call of a case, with filled outputs and checksums of the inputs."""
    if case.only >= 0:
        return _alone(build(case.replace(only=-1), device), case)
    live, tokens, seqs = case.live, case.live + case.padding, case.seqs
    starts = [sum(case.q_lens[:i]) for i in range(seqs + 1)]
    options = _options(case, starts, tokens)
    visible, entries = _visible(case, options, starts)
    cached = _cached(case, visible)

    made = TYPES[case.q_dtype] if case.q_dtype not in LARGEST else torch.bfloat16
    plan = page_plan(case)
    dense, pages, scales = _keys_and_values(case, made, plan, cached)
    k_pages, v_pages = laid_out(case, pages, plan, device)

    q = _queries(case, options, starts, visible, dense["k"], tokens)
    q[live:] = poison_of(case, "q", q[live:].shape)
    kinds = [getattr(torch, name) for name in case.index]
    max_q_len, max_kv_len = _hints(case)
    moved: dict[str, Any] = {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in options.items() if n != "scale"}
    moved |= {f"{part}_scale": None if scale is None else scale.to(device) for part, scale in scales.items()}
    if case.form == "context":
        moved |= {f"new_{part}": _new_tokens(case, part, dense[part], starts, made, device) for part in pages}
    if case.v_in_k:
        moved |= {"v_in_k": True, "v_scale": moved["k_scale"]}
        moved |= {"new_v": moved["new_k"][..., : case.v_in_k]} if "new_k" in moved else {}
    moved |= {f"select_{case.select}": x.to(kinds[0]).to(device) for x in entries}
    call = KernelCall(
        q=strided(case, _cast(q, case.q_dtype), 1, device),
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=strided(case, page_table(case, plan, cached).to(kinds[0]), 1, device),
        kv_lens=torch.tensor(case.kv_lens, dtype=kinds[1], device=device),
        q_starts=torch.tensor(starts, dtype=kinds[2], device=device),
        out=guarded((tokens, case.q_heads, case.dims["v"]), TYPES[case.problem.out_dtype], device),
        scale=options["scale"],
        layout=case.layout,
        format=case.format,
        v_format=case.v_format,
        hadamard=case.hadamard,
        lse=guarded((tokens, case.q_heads), torch.float32, device) if case.lse else None,
        q_scale=Q_SCALE if case.q_dtype in LARGEST else None,
        batch_invariant=case.batch_invariant,
        shard=None if case.shard[1] == 1 else (case.shard[0], case.shard[1], case.shard[2]),
        prefixes=prefixes_of(case, plan),
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        fill_byte=case.fill_byte,
        case=case,
        **moved,
    )
    if plan.sparse:
        # Memory without contents is not read, so that it is not allocated: only pages with contents have a checksum.
        for name, tensor in (("k_pages", call.k_pages), ("v_pages", call.v_pages)):
            used = indexable(tensor)[plan.touched[plan.touched >= 0].to(tensor.device)]
            call.checksums[name] = used, checksum(used)
    return call.take_checksums()


def _keys_and_values(case: Case, made: torch.dtype, plan: PagePlan, cached: list[torch.Tensor]) -> tuple[dict[str, Any], ...]:
    """By part: the numbers that a reader decodes, the stored pages with contents, and the scales. If V is a part of K, only K is
    stored."""
    dense: dict[str, Any] = {}
    pages: dict[str, Any] = {}
    scales: dict[str, Any] = {}
    for part, dim in case.dims.items():
        if part == "v" and case.v_in_k:
            dense["v"] = [keys[..., : case.v_in_k] for keys in dense["k"]]
            continue
        dense[part] = _dense(case, part, dim, made, plan)
        turns = case.hadamard and part == "k"
        if turns:
            dense[part] = [hadamard(x) for x in dense[part]]
        pages[part], scales[part] = _store(case, part, dim, plan, cached, dense[part])
        if turns:
            dense[part] = [hadamard(x) for x in dense[part]]  # its own inverse: a reader's numbers, in terms of the queries
    return dense, pages, scales


def _visible(case: Case, options: dict[str, Any], starts: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Which keys of each sequence some head sees, bool [q_len, kv_len], and the entries of a selection if there is one."""
    visible = [visibility(options, starts[i], case.q_lens[i], case.kv_lens[i], i) for i in range(case.seqs)]
    if case.shard[1] > 1:
        _hide_other_ranks(case, visible)
    if case.select == "none":
        return visible, []
    entries, chosen = selection(case)
    return [mask & mine.any(0) for mask, mine in zip(visible, chosen)], [entries]


def _hide_other_ranks(case: Case, visible: list[torch.Tensor]) -> None:
    """Hides the keys that are not in the shard of the case."""
    for mask, kv_len in zip(visible, case.kv_lens):
        elsewhere = torch.ones(kv_len, dtype=torch.bool)
        elsewhere[kept_positions(case, kv_len)] = False
        mask[:, elsewhere] = False


def _cached(case: Case, visible: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tokens of every sequence that must be in the cache: the visible ones, in context form without the new ones."""
    cached = [mask.any(0) for mask in visible]
    if case.form == "context":
        for seen, q_len, kv_len in zip(cached, case.q_lens, case.kv_lens):
            seen[kv_len - q_len :] = False
    return cached


def _hints(case: Case) -> tuple[int | None, int | None]:
    q_len, kv_len = max(case.q_lens, default=0), max(case.kv_lens, default=0)
    if case.hints == "none":
        return None, None
    return (q_len, kv_len) if case.hints == "exact" else (max(q_len // 2, 1), max(kv_len // 2, 1))


def _new_tokens(
    case: Case, part: str, dense: list[torch.Tensor], starts: Sequence[int], made: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """The keys or values of the new tokens, [tokens, kv_heads, dim], with poison in padding rows."""
    rows = poison_of(case, f"new_{part}", (case.live + case.padding, case.kv_heads, case.dims[part]))
    for i in range(case.seqs):
        rows[starts[i] : starts[i + 1]] = dense[i][case.kv_lens[i] - case.q_lens[i] :]
    return strided(case, rows.to(made), 1, device)


def _alone(call: KernelCall, case: Case) -> KernelCall:
    """The call with only one of its sequences. Pages, scales and options are those of the batch."""
    i = case.only
    first, last = (int(call.q_starts[n]) for n in (i, i + 1))
    alone = case.replace(q_lens=case.q_lens[i : i + 1], kv_lens=case.kv_lens[i : i + 1], only=-1)
    max_q_len, max_kv_len = _hints(alone)
    names = ("q", "new_k", "new_v", "mask", "positions", "spans", "select_positions")
    per_token = {name: getattr(call, name) for name in names}
    of_sequence = {name: value[first:last] for name, value in per_token.items() if value is not None}
    if isinstance(call.causal, torch.Tensor):
        of_sequence["causal"] = call.causal[i : i + 1]
    if call.select_columns is not None:
        of_sequence["select_columns"] = call.select_columns[i : i + 1]
    sparse = {name: checked for name, checked in call.checksums.items() if name.endswith("_pages")}
    cut = replace(
        call,
        page_table=call.page_table[i : i + 1],
        kv_lens=call.kv_lens[i : i + 1],
        q_starts=call.q_starts[i : i + 2] - first,
        out=guarded((last - first, *call.out.shape[1:]), call.out.dtype, call.device),
        lse=None if call.lse is None else guarded((last - first, call.lse.shape[1]), torch.float32, call.device),
        prefixes=None if call.prefixes is None else (),
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        case=case,
        checksums=sparse,
        memo={},
        **of_sequence,
    )
    return cut.take_checksums()


def strided(case: Case, x: torch.Tensor, dim: int, device: torch.device | str) -> torch.Tensor:
    """A tensor on a device; with strides "views", the middle of a tensor that is wider along `dim`."""
    if case.strides == "dense":
        return x.to(device)
    margin = 2
    shape = [*x.shape[:dim], margin, *x.shape[dim + 1 :]]
    if x.dtype.is_floating_point:
        left, right = (_cast(poison_of(case, side, shape), case.q_dtype).to(x.dtype) for side in ("left", "right"))
    else:
        # Valid page ids: a kernel that ignores strides reads keys of another sequence, not unmapped memory.
        left, right = (x[:, :margin], x[:, :margin].flip(0))
    wide = torch.cat((indexable(left), indexable(x), indexable(right)), dim).view(x.dtype).to(device)
    return wide.narrow(dim, left.shape[dim], x.shape[dim])


def indexable(tensor: torch.Tensor) -> torch.Tensor:
    """One-byte floats as bytes: torch does not index them on all devices."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


# Visibility and options.


def visibility(options: dict[str, Any], start: int, q_len: int, kv_len: int, seq: int) -> torch.Tensor:
    """Visibility mask of one sequence, bool [q_len, kv_len]."""
    context = kv_len - q_len
    positions, mask, causal = options.get("positions"), options.get("mask"), options.get("causal", True)
    left, right = options.get("window", (None, None))
    q_pos, k_pos = torch.arange(context, kv_len), torch.arange(kv_len)
    if isinstance(positions, torch.Tensor):
        q_pos = positions[start : start + q_len].long()
        k_pos = torch.cat((k_pos[:context], q_pos))
    distances = q_pos[:, None] - k_pos[None, :]
    visible = torch.ones(q_len, kv_len, dtype=torch.bool)
    if isinstance(mask, torch.Tensor):
        visible[:, context:] = mask[start : start + q_len, :q_len]
    elif "spans" in options:
        for row, (begin, end) in zip(visible, options["spans"][start : start + q_len].tolist()):
            row[:] = (k_pos >= begin) & (k_pos < end)
    elif bool(causal[seq]) if isinstance(causal, torch.Tensor) else causal:
        visible &= distances >= 0
    if left is not None:
        visible &= distances <= left
    if right is not None:
        visible &= distances >= -right
    return visible


MOST_SELECTED = {"positions": 24, "columns": 5}
"""The most entries of a row; three more places hold -1."""


def selection(case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The entries of a selection, in no order and with gaps, and for each sequence which keys they select, bool
    [kv_heads, q_len, kv_len]. Rows that no query reads hold entries out of range. About one row in ten has no entries."""
    g = generator(case, "select")
    heads, most = case.kv_heads if case.select_heads == "own" else 1, MOST_SELECTED[case.select]
    by_token = case.select == "positions"
    entries = torch.full((case.live + case.padding if by_token else case.seqs, heads, most + 3), 10**6)
    chosen: list[torch.Tensor] = []
    start = 0
    for seq, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens)):
        limit = kv_len if by_token else -(-kv_len // case.page_size)
        picked = torch.zeros(heads, q_len, kv_len, dtype=torch.bool)
        for t in range(q_len if by_token else min(q_len, 1)):
            for head in range(heads):
                count = 0 if float(torch.rand((), generator=g)) < 0.1 else min(limit, most)
                mine = torch.randperm(limit, generator=g)[:count]
                row = torch.full((most + 3,), -1)
                row[torch.randperm(most + 3, generator=g)[:count]] = mine
                entries[start + t if by_token else seq, head] = row
                if by_token:
                    picked[head, t, mine] = True
                else:
                    picked[head] = torch.isin(torch.arange(kv_len) // case.page_size, mine)
        chosen.append(picked.expand(case.kv_heads, -1, -1))
        start += q_len
    return entries, chosen


def alibi_slopes(heads: int) -> torch.Tensor:
    """The usual ALiBi slopes of a model with this number of heads."""
    return torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)])


def causal_sequences(case: Case) -> torch.Tensor:
    """Which sequences of a case with `causal=mixed` are causal: every second one. The first is causal or not, by the seed, unless a
    sequence has more new tokens than keys and cannot be causal."""
    even = torch.arange(case.seqs) % 2 == 0
    can_be_causal = torch.tensor([q_len <= kv_len for q_len, kv_len in zip(case.q_lens, case.kv_lens)], dtype=torch.bool)
    return ~even if case.seed % 2 and bool((can_be_causal | even).all()) else even


def _options(case: Case, starts: Sequence[int], tokens: int) -> dict[str, Any]:
    given: dict[str, Any] = {"scale": _plain_scale(case)}
    given |= {"window": case.window} | {name: getattr(case, name) for name in NUMBERS}
    given["causal"] = {"yes": True, "no": False, "mixed": None}[case.causal]
    if case.causal == "mixed":
        given["causal"] = causal_sequences(case)
    if case.alibi:
        # The middle heads of a model with twice the heads: these slopes cannot be derived from the number of heads of the call.
        given["alibi"] = alibi_slopes(2 * case.q_heads)[case.q_heads // 2 :][: case.q_heads].clone()
    if case.sinks:
        given["sinks"] = torch.randn(case.q_heads, generator=generator(case, "sinks")) + 1.5
    if case.mask:
        given["mask"], positions = _tree(case, starts, tokens)
        if case.window != (None, None) or case.alibi:
            given["positions"] = positions
    if case.spans != "none":
        given["spans"] = strided(case, _spans(case, tokens), 1, "cpu")
    return given


def _spans(case: Case, tokens: int) -> torch.Tensor:
    """The spans of all tokens, [tokens, 2]; padding rows have spans outside of every sequence."""
    g = generator(case, "spans")
    spans = torch.tensor([[-9, 10**6]]).repeat(tokens, 1)
    row = 0
    for q_len, kv_len in zip(case.q_lens, case.kv_lens):
        first, end = 0, 0  # the image of the token
        for at in range(kv_len - q_len, kv_len):
            draw = torch.randint(0, kv_len + 1, (2,), generator=g).tolist()
            if case.spans == "images" and at >= end and int(torch.randint(0, 4, (1,), generator=g)) == 0:
                first, end = at, min(kv_len, at + int(torch.randint(2, 12, (1,), generator=g)))
            spans[row] = torch.tensor(
                {
                    "causal": (0, at + 1),
                    "prefix": (0, max(at + 1, kv_len // 3)),
                    "chunks": (max(at // 24 * 24, 0), at + 1),
                    "images": (max(at - 8, 0), at + 1) if at >= end else (min(first, max(at - 8, 0)), end),
                    "any": draw,
                }[case.spans]
            )
            row += 1
    return spans.to(getattr(torch, case.index[1]))


def _tree(case: Case, starts: Sequence[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random tree of draft tokens for every sequence: a token sees itself, its parent and all keys that the parent sees."""
    g = generator(case, "tree")
    mask = torch.rand(tokens, max(case.q_lens, default=0) + 3, generator=g) > 0.5
    positions = torch.full((tokens,), -(10**6))
    for start, q_len, kv_len in zip(starts, case.q_lens, case.kv_lens):
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
    return mask, positions


# Numbers.


def _dense(case: Case, part: str, dim: int, made: torch.dtype, plan: PagePlan) -> list[torch.Tensor]:
    """The keys or values of every sequence before they are stored, float64 [kv_len, kv_heads, dim]."""
    rows = []
    for i, n in enumerate(case.kv_lens):
        g = generator(case, part, i)
        if case.data == "weak":
            x = (torch.rand(n, case.kv_heads, dim, generator=g) * 2 - 1) * 1e-3
        elif case.data == "even" and part == "v":
            x = torch.randint(1, 16, (n, case.kv_heads, dim), generator=g).float()
        elif case.data == "needle" and part == "v":
            # A unique pattern of signs per slot, so that an output shows which slots contributed.
            sign = torch.randint(0, 2, (n, case.kv_heads, dim), generator=g) * 2.0 - 1.0
            x = sign * (0.75 + 0.5 * torch.rand(n, case.kv_heads, dim, generator=g))
        else:
            x = torch.randn(n, case.kv_heads, dim, generator=g)
            if part == "k" and case.data == "extreme":
                x = _extreme_keys(x, case, n, i)
            elif part == "v" and case.data == "wide":
                x *= 2.0 ** torch.randint(-28, 9, x.shape, generator=g)
            elif part == "v":
                x += 0.5  # otherwise the mean of a long sequence is close to zero
        rows.append(x.to(made).double())
    for i, shared in enumerate(plan.shared):
        # Sequences that share pages have the same keys up to the last one of these pages.
        kept = kept_positions(case, case.kv_lens[i])[: shared * case.page_size]
        same = int(kept[-1]) + 1 if kept.numel() else 0
        rows[i][:same] = rows[plan.leader][:same]
    return rows


STEEP = 200.0
"""The magnitude of extreme logits: their exponentials overflow or underflow in fp32."""


def _direction(case: Case) -> torch.Tensor:
    """The common direction of keys of extreme data, one unit vector per kv head [kv_heads, head_dim]."""
    return torch.nn.functional.normalize(torch.randn(case.kv_heads, case.head_dim, generator=generator(case, "direction")), dim=-1)


def _extreme_keys(x: torch.Tensor, case: Case, n: int, seq: int) -> torch.Tensor:
    """Keys with a common component along `_direction` and random ones across it. In every other sequence the common component
    changes its sign from the first key to the last."""
    along = _direction(case)
    turn = torch.linspace(-1.0, 1.0, n) if seq % 2 else torch.ones(n)
    x = x - (x * along).sum(-1, keepdim=True) * along
    return x + turn[:, None, None] * along * math.sqrt(STEEP / _plain_scale(case))


def _plain_scale(case: Case) -> float:
    return case.head_dim**-0.5 if case.scale is None else case.scale


def _store(
    case: Case, part: str, dim: int, plan: PagePlan, cached: list[torch.Tensor], dense: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The stored pages with contents, [touched, page_size, kv_heads, dim or bytes], and the scales. `dense` is replaced by the
    numbers that a reader decodes."""
    size, heads, format = case.page_size, case.kv_heads, case.formats[part]
    at_of = torch.full((plan.pages + 1,), 0) if plan.pages < 10**6 else None
    place = {int(page): n for n, page in enumerate(plan.touched)} if at_of is None else None
    if at_of is not None:
        inside = plan.touched >= 0
        at_of[plan.touched[inside]] = torch.arange(plan.touched.numel())[inside]
    content = poison_of(case, f"pages {part}", (plan.touched.numel(), size, heads, dim)).double()
    scale = scale_of(case, part, plan)
    spots = []
    for i, row in enumerate(plan.owned):
        kept = kept_positions(case, case.kv_lens[i])
        key = cached[i][kept].nonzero().flatten()
        at, offset = kept[key], key % size
        ids = torch.tensor(row, dtype=torch.long)[key // size]
        page = at_of[ids] if at_of is not None else torch.tensor([place[int(p)] for p in ids], dtype=torch.long)  # type: ignore[index]
        content[page, offset] = dense[i][at]
        spots.append((at, page, offset))
        if case.scales == "token" and scale is not None:
            scale[ids, offset] = _token_scales(dense[i][at], format)
    wide: torch.Tensor | None = None
    if scale is not None:
        wide = scale[plan.touched.clamp(min=0)].unsqueeze(-1) if scale.dim() == 3 else scale.reshape(-1, 1)
    stored, read = _encoded(content, format, wide)
    for i, (at, page, offset) in enumerate(spots):
        dense[i][at] = read[page, offset]
    return stored, scale


def _encoded(content: torch.Tensor, format: str, wide: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers as they lie in memory, scales of groups behind the codes, and what a reader decodes."""
    if format == DS_MLA:
        return encode_latent(content)
    if format in GROUP:
        codes, groups = encode_groups(content.float() / (1.0 if wide is None else wide), LARGEST[format])
        read = numbers_of_groups(codes, groups).double() * (1.0 if wide is None else wide.double())
        return torch.cat((pairs(codes), groups), -1), read
    if format == ZERO_POINTS:
        assert wide is not None
        codes = encode_with_zero_point(content, wide)
        return pairs(codes), (codes.double() - zero_point(wide)) * without_zero_point(wide)
    stored = encode(content, format, wide)
    return packed(stored, format), stored.double() if wide is None else stored.double() * wide.double()


def _token_scales(rows: torch.Tensor, format: str) -> torch.Tensor:
    """The scales of tokens and heads `[tokens, kv_heads, dim]`."""
    if format == ZERO_POINTS:
        return scale_with_zero_point(rows)
    largest = rows.float().abs().amax(-1)
    return torch.where(largest == 0, 1.0, largest / LARGEST[format])


def encode(content: torch.Tensor, format: str, scale: torch.Tensor | None) -> torch.Tensor:
    """Numbers as a format stores them: divided by their scale and saturated; before elements are packed into bytes."""
    if format not in LARGEST:
        return content.to(TYPES[format])
    x = content.float() / (1.0 if scale is None else scale)
    x = x.clamp(-LARGEST[format], LARGEST[format])
    if not TYPES[format].is_floating_point:
        return torch.where(x.isnan(), LARGEST[format] - 2, x.round()).to(torch.int8)
    return x.to(TYPES[format])


def packed(stored: torch.Tensor, format: str) -> torch.Tensor:
    """Stored elements as they lie in memory: two of 4 bits make a byte."""
    if format not in PACK:
        return stored
    return pairs(stored.short() % 16)


def scale_of(case: Case, part: str, plan: PagePlan) -> torch.Tensor | None:
    format = case.formats[part]
    if format not in LARGEST:
        return None
    base = (4.0 if part == "k" else 6.0) / LARGEST[format]
    if case.scales == "head":
        return base * (0.6 + 0.8 * torch.rand(case.kv_heads, generator=generator(case, part, "scales")))
    if case.scales == "token":
        bad = {"nan": math.nan, "inf": math.inf, "zero": 0.0}.get(case.poison, base)
        return torch.full((plan.pages, case.page_size, case.kv_heads), bad)
    return torch.tensor(base)


LARGE = 30.0
"""The standard deviation of poison `large`; that of keys and values is about 1."""


def poison_of(case: Case, what: str, shape: Sequence[int]) -> torch.Tensor:
    """Poison values: the content of everything that must not be read."""
    if case.poison.startswith("decoy"):
        return torch.randn(*shape, generator=generator(case, case.poison, what)) * (1.0 if case.poison == "decoy" else 1.5) + 0.25
    if case.poison == "large":
        return torch.randn(*shape, generator=generator(case, case.poison, what)) * LARGE
    return torch.full(tuple(shape), {"nan": math.nan, "inf": math.inf, "zero": 0.0}[case.poison])


def _cast(x: torch.Tensor, format: str) -> torch.Tensor:
    if format in LARGEST:
        return (x / Q_SCALE).clamp(-LARGEST[format], LARGEST[format]).to(TYPES[format])
    return x.to(TYPES[format])


def _queries(
    case: Case,
    options: dict[str, Any],
    starts: Sequence[int],
    visible: list[torch.Tensor],
    keys: list[torch.Tensor],
    tokens: int,
) -> torch.Tensor:
    """Random queries; with needle data, each query points at one key, whose weight is about that of all other keys together."""
    g = generator(case, "q")
    q = torch.randn(tokens, case.q_heads, case.head_dim, generator=g)
    if case.data == "weak":
        return (torch.rand(tokens, case.q_heads, case.head_dim, generator=g) * 2 - 1) * 1e-3
    if case.data == "extreme":
        # The heads of a group alternate in sign, so that logits are large and positive, or large and negative.
        sign = 1.0 - 2.0 * (torch.arange(case.q_heads) % 2)
        along = _direction(case).repeat_interleave(case.group, 0)
        return q + (sign[:, None] * along) * math.sqrt(STEEP / options["scale"])
    if case.data != "needle":
        return q * 0.0 if case.data == "even" else q
    for i, mask in enumerate(visible):
        aims = needle_positions(case, i)
        for t in range(case.q_lens[i]):
            seen = mask[t].nonzero().flatten()
            if not seen.numel():
                continue
            first, last = int(seen[0]), int(seen[-1])
            mine = [last, first, *(j for j in aims if bool(mask[t, j]))]
            for h in range(case.q_heads):
                j = mine[(t + h) % len(mine)]
                key = keys[i][j, h // case.group].float()
                logit = math.log(seen.numel()) + 2.0
                if case.alibi and options.get("positions") is None:
                    # The query compensates the ALiBi bias of this key, unless that would raise other keys as well.
                    taken = float(options["alibi"][h]) * abs(case.kv_lens[i] - case.q_lens[i] + t - j)
                    logit += taken if taken <= MOST_COMPENSATED else 0.0
                logit = min(logit, case.largest_logit)
                size = float(key @ key) * options["scale"]
                q[starts[i] + t, h] = key * (logit / max(abs(size), 1e-3))
    return q


def needle_positions(case: Case, seq: int) -> list[int]:
    """Key positions for needle queries: at the boundaries of pages, tiles, the context and the sequence."""
    n, context, size = case.kv_lens[seq], case.kv_lens[seq] - case.q_lens[seq], case.page_size
    spots = [
        context - 1,
        context,
        size - 1,
        size,
        n - size - 1,
        n // size * size - 1,
        n // size * size,
        n // 2,
        31,
        32,
        63,
        64,
        127,
        128,
        255,
        256,
    ]
    return [j for j in dict.fromkeys(spots) if 0 <= j < n]


def laid_out(
    case: Case, pages: dict[str, torch.Tensor], plan: PagePlan, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The page tensors in the layout of the case, written element by element by its index formula."""
    size, heads = case.page_size, case.kv_heads
    units = {part: units_of(case.formats[part], dim) for part, dim in case.dims.items()}
    out: list[tuple[torch.Tensor, int, int]] = []
    for n, (part, dim) in enumerate(units.items()):
        if part not in pages:
            continue
        x, dtype = x_of(case, part), TYPES[case.formats[part]]
        whole = dim if case.layout != "vllm_joint" else sum(units.values())
        shape = _shape(case.layout, part, plan.pages, size, heads, whole, x)
        if case.layout == "vllm_joint" and n:
            storage, skip = out[0][0], units["k"]
        else:
            storage, skip = _memory(shape, dtype, plan.before, case.storage == "padded", device), 0
        p = plan.touched.view(-1, 1, 1, 1)
        s, h, d = torch.arange(size).view(1, -1, 1, 1), torch.arange(heads).view(1, 1, -1, 1), torch.arange(dim).view(1, 1, 1, -1)
        index, strides = LAYOUT_INDEX[case.layout][n](p, s, h, d + skip, x), tuple(storage.stride())
        if case.formats[part] in GROUP:
            index = p, grouped_at(case.layout, case.formats[part], size, heads, case.dims[part], s, h, d)
            strides = strides[0], 1
        address = torch.zeros((), dtype=torch.int64)
        for i, stride in zip(index, strides):
            address = address + i * stride
        flat = flat_of(storage)
        flat[(address + int(storage.storage_offset())).expand(pages[part].shape).reshape(-1).to(device)] = (
            indexable(pages[part]).reshape(-1).to(device)
        )
        out.append((storage, skip, dim))
    parts = [s[..., skip : skip + dim] if case.layout == "vllm_joint" else s for s, skip, dim in out]
    if case.storage == "bytes":
        parts = [indexable(part) for part in parts]
    return parts[0], parts[0][..., : units["v"]] if case.v_in_k else parts[1]


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole memory of a tensor as a vector of elements."""
    moved = indexable(tensor)
    size = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return moved.as_strided((size,), (1,), 0)


def _shape(layout: str, part: str, pages: int, size: int, heads: int, dim: int, x: int) -> tuple[int, ...]:
    if layout == "nhd":
        return pages, size, heads, dim
    if layout in ("hnd", "vllm_joint"):
        return pages, heads, size, dim
    if part == "k":
        return pages, heads, dim // x, size, x
    return (pages, heads, dim, size) if layout == "vllm_x" else (pages, heads, size // x, dim, x)


def _memory(shape: tuple[int, ...], dtype: torch.dtype, before: int, padded: bool, device: torch.device | str) -> torch.Tensor:
    """A tensor of this shape, `before` elements into its allocation. If padded, there is a gap of a slot after every page."""
    count = math.prod(shape)
    page = count // shape[0]
    gap = page // shape[1] if padded else 0
    size = before + shape[0] * (page + gap)
    # The memory is not initialised: a cache of 2^32 elements takes only the memory of the pages that are written.
    storage = torch.UntypedStorage(size * dtype.itemsize, device=torch.device(device))
    memory = torch.zeros(0, dtype=dtype, device=device).set_(storage, 0, (size,), (1,))
    if padded:
        indexable(memory).fill_(
            torch.tensor(math.nan).to(dtype).view(indexable(memory).dtype).item() if dtype.is_floating_point else 101
        )
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    strides[0] += gap
    return memory.as_strided(shape, strides, before)
