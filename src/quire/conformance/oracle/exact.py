"""The exact computation: a pipeline of named stages. A fault replaces one or more of them.

    read        the index tensors page_table, kv_lens and q_starts
    sequences   the rows of q of each sequence, and its number of keys
    locate      the page of each key, and its offset in the page
    address     the memory address of each element, counted in elements
    decode      stored elements to numbers, times their scale
    transform   queries and new keys of a call with Hadamard-transformed keys
    gather      keys and values of a sequence: from the cache, and new ones that are passed as arguments
    kv_head     the kv head of each query head
    score       logits: q·k, scale, softcap
    visibility  visibility mask, bool [queries, keys]: causality, tree mask or spans, window, and the shard
    selection   the selected keys, bool [kv_heads, queries, keys], or None
    bias        added to the logits: ALiBi
    softmax     weights with the sink, times the values; the LSE
    store       the results of a sequence to the rows of the output
    finish      the whole outcome of the call

Without a fault, the pipeline is Quire's definition of paged attention (`quire.reference`), preceded by reading the cache. It runs
in float64 for the correct result, and in the precision of a kernel for the rounding error that a kernel may have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from quire.conformance.cases.build import LAYOUT_INDEX, flat_of
from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.formats import (
    DS_MLA,
    GROUP,
    PACK,
    TYPES,
    ZERO_POINTS,
    grouped_at,
    hadamard,
    latent_byte,
    numbers_of_codes,
    numbers_of_scales,
    without_zero_point,
    zero_point,
)
from quire.conformance.oracle.rounding import ReducedPrecision

LOG2E = 1.4426950408889634


class Indices(NamedTuple):
    """The index tensors of a call, as int64."""

    starts: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor


class BatchSequence(NamedTuple):
    """A sequence of the batch: its index, its first row of q, and its lengths."""

    seq: int
    first: int
    q_len: int
    kv_len: int

    @property
    def context(self) -> int:
        return self.kv_len - self.q_len


class Work:
    """A call to compute, the dtype of the computation, and the type to which factors of products are rounded."""

    def __init__(
        self, call: KernelCall, number: torch.dtype = torch.float64, factors: torch.dtype | ReducedPrecision | None = None
    ):
        self.call, self.number, self.factors = call, number, factors
        self.flat = {"k": flat_of(call.k_pages), "v": flat_of(call.v_pages)}
        self.pages = {"k": call.k_pages, "v": call.v_pages}
        self.scales = {"k": call.k_scale, "v": call.v_scale}
        self.new = {"k": call.new_k, "v": call.new_v}
        self.x = call.k_pages.shape[-1] if call.layout in ("vllm_x", "aiter") else 1
        self.v_x = call.v_pages.shape[-1] if call.layout == "aiter" else 1
        self.dims = {"k": call.q.shape[2], "v": call.out.shape[2]}
        self.top = 0.0
        """The largest magnitude of a logit so far: rounding errors of logits are relative to it."""

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.factors, ReducedPrecision):
            return self.factors(x)
        return x if self.factors is None else x.to(self.factors).to(self.number)

    def rounded_for_logits(self, x: torch.Tensor) -> torch.Tensor:
        """A factor of q·k. Kernels multiply queries of 8 bits as they are stored, or converted to 16 bits: never rounded to 8."""
        return x.to(torch.bfloat16).to(self.number) if self.factors and self.call.q.dtype.itemsize == 1 else self.rounded(x)


class Values(NamedTuple):
    """Keys and values of a sequence, [keys, kv_heads, dim]."""

    k: torch.Tensor
    v: torch.Tensor


class SequenceResult(NamedTuple):
    """The result of one sequence."""

    out: torch.Tensor
    lse: torch.Tensor
    weighted: torch.Tensor
    """The weighted magnitudes of the values: as `out`, computed with abs(v)."""


@dataclass
class Outcome:
    """The result of a call. Elements of the output that are not `written` keep their previous content."""

    out: torch.Tensor
    lse: torch.Tensor
    weighted: torch.Tensor
    written: torch.Tensor
    top: float = 0.0


# Stages.


def read(w: Work) -> Indices:
    """The index tensors of a call, on the CPU."""
    return Indices(*(t.long().cpu() for t in (w.call.q_starts, w.call.kv_lens, w.call.page_table)))


def sequences(w: Work, indices: Indices) -> list[BatchSequence]:
    """The sequences of the batch."""
    starts, lens = indices.starts.tolist(), indices.lens.tolist()
    return [BatchSequence(i, starts[i], starts[i + 1] - starts[i], lens[i]) for i in range(w.call.seqs)]


def is_kept(call: KernelCall, keys: int) -> torch.Tensor:
    """Which of the first positions of a sequence are in the cache, bool [keys]: all of them without a shard."""
    rank, ranks, interleave = call.shard or (0, 1, 1)
    return torch.arange(keys) // interleave % ranks == rank


def key_numbers(call: KernelCall, positions: torch.Tensor) -> torch.Tensor:
    """The number of each key in the pages of its sequence: its position, or how many keys of the shard lie before it."""
    if call.shard is None or not positions.numel():
        return positions
    kept = is_kept(call, int(positions.max()) + 1).long()
    return (kept.cumsum(0) - kept)[positions]


def locate(w: Work, indices: Indices, sequence: BatchSequence, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The page of each key position, and its offset in the page."""
    size, key = w.call.page_size, key_numbers(w.call, positions)
    if not indices.table.shape[1]:
        # A table without columns is legal if no key of the cache is visible.
        return torch.full_like(positions, -1), key % size
    column = (key // size).clamp(max=indices.table.shape[1] - 1)
    return indices.table[sequence.seq, column], key % size


def address(w: Work, part: str, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Addresses of elements relative to page 0, counted in elements, [keys, kv_heads, dim]."""
    d = torch.arange(w.dims[part]).view(1, 1, -1) // PACK.get(w.call.formats[part], 1)
    if w.call.formats[part] in GROUP:
        return grouped_address(w, part, page, offset, d)
    return unit_address(w, part, page, offset, latent_byte(d) if w.call.formats[part] == DS_MLA else d)


def unit_address(w: Work, part: str, page: torch.Tensor, offset: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """The same for elements `d` of storage of a head, `[1, 1, dim]`."""
    tensor = w.pages[part]
    h = torch.arange(w.call.kv_heads).view(1, -1, 1)
    index = LAYOUT_INDEX[w.call.layout][part == "v"](
        page.view(-1, 1, 1), offset.view(-1, 1, 1), h, d, w.x if part == "k" else w.v_x
    )
    total = torch.zeros((), dtype=torch.int64)
    for i, stride in zip(index, tensor.stride()):
        total = total + i * stride
    return total.expand(page.numel(), w.call.kv_heads, d.numel())


def grouped_address(
    w: Work, part: str, page: torch.Tensor, offset: torch.Tensor, unit: torch.Tensor, format: str = ""
) -> torch.Tensor:
    """The same for bytes `unit` of a format with scales of groups: codes, and after them the scales."""
    call, h = w.call, torch.arange(w.call.kv_heads).view(1, -1, 1)
    size, heads, dim = call.page_size, call.kv_heads, w.dims[part]
    place = grouped_at(call.layout, format or call.formats[part], size, heads, dim, offset.view(-1, 1, 1), h, unit)
    return page.view(-1, 1, 1) * w.pages[part].stride(0) + place


def load(w: Work, part: str, addresses: torch.Tensor) -> torch.Tensor:
    """The elements at these addresses, in the dtype of the storage; addresses are clamped to the allocation."""
    flat = w.flat[part]
    at = (addresses + int(w.pages[part].storage_offset())).clamp(0, flat.numel() - 1)
    return flat[at.to(flat.device)].cpu()


def decode(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Stored elements as numbers, times their scale."""
    return numbers_at(w, part, raw, page, offset) * scale_at(w, part, page, offset)


def numbers_at(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Stored elements as numbers, before the scale of the cache, with the scales of their groups."""
    if w.call.formats[part] == DS_MLA:
        return (latent_numbers(w, part, raw, page, offset) * latent_scales(w, part, page, offset)).to(w.number)
    if w.call.formats[part] == ZERO_POINTS:
        return nibbles(raw).to(w.number) - zero_at(w, part, page, offset)
    if w.call.formats[part] not in GROUP:
        return as_numbers(raw, w.call.formats[part], w.number)
    return (numbers_of_codes(nibbles(raw)) * numbers_of_scales(group_scales(w, part, page, offset))).to(w.number)


def latent_numbers(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Elements of `fp8_ds_mla` without their scales. `raw` has the first byte of each."""
    codes = numbers_of_scales(raw[..., :512])  # of the same type as the scales of groups
    second = 1 + latent_byte(torch.arange(512, w.dims[part]).view(1, 1, -1))
    pair = raw[..., 512:].int() + 256 * load(w, part, unit_address(w, part, page, offset, second)).int()
    return torch.cat((codes, (pair << 16).view(torch.float32).double()), -1)


def latent_scales(
    w: Work, part: str, page: torch.Tensor, offset: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """The scale of each element of `fp8_ds_mla`, 1 of those that have none. Only faults use that of another group."""
    group = torch.arange(4)
    group = group if change is None else change(group)
    bytes_of = (512 + 4 * group[:, None] + torch.arange(4)).view(1, 1, -1)
    scales = load(w, part, unit_address(w, part, page, offset, bytes_of)).contiguous().view(torch.float32).double()
    one = scales.new_ones(*scales.shape[:2], w.dims[part] - 512)
    return torch.cat((scales.repeat_interleave(128, -1), one), -1)


def group_scales(
    w: Work,
    part: str,
    page: torch.Tensor,
    offset: torch.Tensor,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    format: str = "",
) -> torch.Tensor:
    """The scale of the group of each element, as bytes [keys, kv_heads, dim]. Only faults use another group, `change(group)`, or
    another format."""
    group = torch.arange(w.dims[part]).view(1, 1, -1) // GROUP[w.call.formats[part]]
    group = group if change is None else change(group)
    return load(w, part, grouped_address(w, part, page, offset, w.dims[part] // 2 + group, format))


def as_numbers(raw: torch.Tensor, format: str, number: torch.dtype) -> torch.Tensor:
    """Stored elements of a format, converted to the dtype `number`. Where a byte has two, `raw` has it once for each of them."""
    if format in PACK:
        return signed(nibbles(raw)).to(number)
    dtype = TYPES[format]
    typed = raw.view(dtype) if raw.dtype.itemsize == dtype.itemsize else raw
    return typed.to(number)


def nibbles(raw: torch.Tensor, first: int = 0) -> torch.Tensor:
    """The four bits of each element, 0 to 15. The byte of an even element has it in its low bits, that of an odd one in its high
    bits; `first=1` exchanges them."""
    high = (torch.arange(raw.shape[-1]) + first) % 2
    return raw.view(torch.uint8).short() // (1 + 15 * high) % 16


def signed(codes: torch.Tensor) -> torch.Tensor:
    return torch.where(codes < 8, codes, codes - 16)


def scale_at(w: Work, part: str, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor | float:
    """The scale of the elements at these places, in a shape that broadcasts to [keys, kv_heads, dim]."""
    scale = w.scales[part]
    if scale is None:
        return 1.0
    scale = without_zero_point(scale.cpu()) if w.call.formats[part] == ZERO_POINTS else scale.cpu()
    scale = scale.to(w.number)
    if scale.dim() == 3:
        return scale[page.clamp(0, scale.shape[0] - 1), offset].unsqueeze(-1)
    return scale.reshape(1, -1, 1)


def zero_at(w: Work, part: str, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """The zero points of the elements at these places, `[keys, kv_heads, 1]`."""
    scale = w.scales[part]
    assert scale is not None
    return zero_point(scale.cpu())[page.clamp(0, scale.shape[0] - 1), offset].unsqueeze(-1).to(w.number)


def gather(w: Work, s: Stages, indices: Indices, sequence: BatchSequence) -> Values:
    """Keys and values of a sequence, [keys, kv_heads, dim]."""
    from_cache = sequence.kv_len if w.call.new is None else max(sequence.context, 0)
    positions = torch.arange(from_cache)
    parts = []
    for part in ("k", "v"):
        page, offset = s.locate(w, indices, sequence, positions)
        page = page.clamp(min=-(w.pages[part].storage_offset() // max(w.pages[part].stride(0), 1)), max=w.call.pages - 1)
        value = s.decode(w, part, load(w, part, s.address(w, part, page, offset)), page, offset)
        fresh = w.new[part]
        if fresh is not None:
            rows = fresh[sequence.first : sequence.first + sequence.q_len].cpu().to(w.number)
            value = torch.cat((value, s.transform(w, rows) if part == "k" else rows))
        parts.append(value)
    return Values(*parts)


def transform(w: Work, x: torch.Tensor) -> torch.Tensor:
    """Queries or new keys, [tokens, heads, head_dim], times the Hadamard matrix if stored keys are. Kernels round the product to
    the type of the queries."""
    return w.rounded_for_logits(hadamard(x)) if w.call.hadamard else x


def kv_head(w: Work) -> torch.Tensor:
    """The kv head of each query head, [q_heads]."""
    return torch.arange(w.call.q_heads) // (w.call.q_heads // w.call.kv_heads)


def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Logits [q_heads, queries, keys]."""
    return capped(w, products(scaled_queries(w, q, w.call.scale), w.rounded_for_logits(k), heads))


def scaled_queries(w: Work, q: torch.Tensor, scale: float) -> torch.Tensor:
    """Queries times the scale. Kernels that round them multiply by log2(e) before, for exp2, which affects the rounding."""
    return q * scale if w.factors is None else w.rounded_for_logits(q * (scale * LOG2E)) / LOG2E


def products(q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """q·k, [q_heads, queries, keys]."""
    logits = q.new_empty(q.shape[1], q.shape[0], k.shape[0])
    for g in sorted(set(heads.tolist())):
        mine = (heads == g).nonzero().flatten()
        logits[mine] = (q[:, mine].transpose(0, 1).reshape(-1, q.shape[2]) @ k[:, g].T).view(mine.numel(), *logits.shape[1:])
    return logits


def capped(w: Work, logits: torch.Tensor) -> torch.Tensor:
    """Logits with the softcap."""
    cap = w.call.softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def token_positions(w: Work, sequence: BatchSequence, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the queries and of the keys."""
    q_pos, k_pos = torch.arange(sequence.context, sequence.context + sequence.q_len), torch.arange(keys)
    if w.call.positions is not None:
        q_pos = w.call.positions[sequence.first : sequence.first + sequence.q_len].cpu().long()
        k_pos = torch.cat((k_pos[: max(sequence.context, 0)], q_pos))[:keys]
    return q_pos, k_pos


def is_causal(w: Work, sequence: BatchSequence) -> bool:
    causal = w.call.causal
    return bool(causal[sequence.seq]) if isinstance(causal, torch.Tensor) else causal


def visibility(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor:
    """Visibility mask, bool [queries, keys]."""
    q_pos, k_pos = token_positions(w, sequence, keys)
    return visible_at(w, sequence, q_pos[:, None] - k_pos[None, :], w.call.window)


def visible_at(
    w: Work, sequence: BatchSequence, distances: torch.Tensor, window: tuple[int | None, int | None], ahead: int = 0
) -> torch.Tensor:
    """Visibility from causality (or the tree mask, or spans) and the window, given the distances q_pos - k_pos. Only faults use
    `ahead`: a causal query then sees that many later keys."""
    left, right = window
    visible = torch.ones(distances.shape, dtype=torch.bool)
    if w.call.mask is not None:
        visible[:, sequence.context :] = w.call.mask[
            sequence.first : sequence.first + sequence.q_len, : distances.shape[1] - sequence.context
        ].cpu()
    elif w.call.spans is not None:
        begin, end = w.call.spans[sequence.first : sequence.first + sequence.q_len].cpu().long().T[:, :, None]
        keys = torch.arange(distances.shape[1])
        visible = (begin <= keys) & (keys < end)
    elif is_causal(w, sequence):
        visible &= distances >= -ahead
    if left is not None:
        visible &= distances <= left
    if right is not None:
        visible &= distances >= -right - ahead
    return visible if w.call.shard is None else visible & is_kept(w.call, distances.shape[1])


def selection(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | None:
    """Which keys are selected for each query, bool [kv_heads, queries, keys]; None without a selection."""
    if w.call.select_positions is None and w.call.select_columns is None:
        return None
    return picked(w, sequence, keys, selected_entries(w, sequence))


def selected_entries(w: Work, sequence: BatchSequence) -> torch.Tensor:
    """The entries of the queries of a sequence, [queries, kv_heads, n]."""
    if w.call.select_positions is not None:
        entries = w.call.select_positions[sequence.first : sequence.first + sequence.q_len]
    else:
        assert w.call.select_columns is not None
        entries = w.call.select_columns[sequence.seq].expand(sequence.q_len, -1, -1)
    return entries.cpu().long().expand(-1, w.call.kv_heads, -1)


def picked(w: Work, sequence: BatchSequence, keys: int, entries: torch.Tensor) -> torch.Tensor:
    """Which keys some entries select, bool [kv_heads, queries, keys]."""
    each = 1 if w.call.select_positions is not None else w.call.page_size
    size = -(-keys // each)
    chosen = torch.zeros(*entries.shape[:2], size + 1, dtype=torch.bool)
    chosen.scatter_(2, torch.where((entries < 0) | (entries >= size), size, entries), True)
    return chosen[..., :size].repeat_interleave(each, -1)[..., :keys].transpose(0, 1)


def bias(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
    """Added to the logits: ALiBi, [q_heads, queries, keys]."""
    if w.call.alibi is None:
        return 0.0
    q_pos, k_pos = token_positions(w, sequence, keys)
    return -slopes(w) * (q_pos[:, None] - k_pos[None, :]).abs()


def slopes(w: Work) -> torch.Tensor:
    """The ALiBi slope of each head, [q_heads, 1, 1]."""
    assert w.call.alibi is not None
    return w.call.alibi.cpu().to(w.number)[:, None, None]


def sink(w: Work) -> torch.Tensor | None:
    """The sink of each head, [q_heads, 1, 1], or None."""
    return None if w.call.sinks is None else w.call.sinks.cpu().to(w.number)[:, None, None]


def softmax(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
    """Softmax over the keys and the sink, times the values; and the LSE."""
    extra = sink(w)
    top = logits.amax(-1, keepdim=True) if logits.shape[-1] else logits.new_full((*logits.shape[:2], 1), -torch.inf)
    if extra is not None:
        top = torch.maximum(top, extra)
    top = top.masked_fill(top == -torch.inf, 0.0)
    e = torch.exp(logits - top)
    total = e.sum(-1, keepdim=True)
    if extra is not None:
        total = total + torch.exp(extra - top)
    share = torch.where(total > 0, 1.0 / total, 0.0)
    mixed, weighted = weighted_sums(w.rounded(e), w.rounded(v), heads)
    return SequenceResult(mixed * share.transpose(0, 1), (top + total.log()).squeeze(-1).T, weighted * share.transpose(0, 1))


def weighted_sums(e: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [q_heads, queries, keys] times the values, and times their magnitudes: two tensors [queries, q_heads, dim]."""
    both = torch.cat((v, v.abs()), -1)
    out = e.new_empty(e.shape[1], e.shape[0], both.shape[-1])
    for g in sorted(set(heads.tolist())):
        mine = (heads == g).nonzero().flatten()
        out[:, mine] = (
            (e[mine].reshape(mine.numel() * e.shape[1], e.shape[2]) @ both[:, g]).view(mine.numel(), e.shape[1], -1).transpose(0, 1)
        )
    return out[..., : v.shape[-1]], out[..., v.shape[-1] :]


def store(w: Work, sequence: BatchSequence, part: SequenceResult, into: Outcome) -> None:
    """Writes the result of a sequence to its rows of the outcome."""
    rows = slice(sequence.first, sequence.first + sequence.q_len)
    into.out[rows], into.lse[rows], into.weighted[rows], into.written[rows] = part.out, part.lse, part.weighted, True


def finish(w: Work, into: Outcome) -> Outcome:
    """The last stage: only faults change the outcome here."""
    return into


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline; the defaults give the correct result."""

    read: Callable[..., Indices] = read
    sequences: Callable[..., list[BatchSequence]] = sequences
    locate: Callable[..., tuple[torch.Tensor, torch.Tensor]] = locate
    address: Callable[..., torch.Tensor] = address
    decode: Callable[..., torch.Tensor] = decode
    transform: Callable[..., torch.Tensor] = transform
    gather: Callable[..., Values] = gather
    kv_head: Callable[..., torch.Tensor] = kv_head
    score: Callable[..., torch.Tensor] = score
    visibility: Callable[..., torch.Tensor] = visibility
    selection: Callable[..., torch.Tensor | None] = selection
    bias: Callable[..., torch.Tensor | float] = bias
    softmax: Callable[..., SequenceResult] = softmax
    store: Callable[..., None] = store
    finish: Callable[..., Outcome] = finish
    keep_unseen: bool = False
    """Whether keys that no query sees are kept. By default they are zeroed: with weight 0, a NaN would still give NaN."""

    def replace(self, **changes: Any) -> Stages:
        return dataclasses.replace(self, **changes)


PLAIN = Stages()
READING = ("read", "sequences", "locate", "address", "decode", "transform", "gather")
"""The stages that keys and values depend on."""


def _values(w: Work, s: Stages, indices: Indices, sequence: BatchSequence) -> Values:
    """Keys and values of a sequence. If no stage of the reading is replaced, they are read once and reused for all faults."""
    if any(getattr(s, name) is not getattr(PLAIN, name) for name in READING):
        return s.gather(w, s, indices, sequence)
    key = (sequence.seq, w.number)
    if key not in w.call.memo:
        w.call.memo[key] = s.gather(w, s, indices, sequence)
    return w.call.memo[key]


def exact(
    call: KernelCall,
    stages: Stages = PLAIN,
    number: torch.dtype = torch.float64,
    factors: torch.dtype | ReducedPrecision | None = None,
    only: int | None = None,
) -> Outcome:
    """Runs the pipeline for all sequences, or for one. Always on the CPU, so that all devices are compared with the same result."""
    w, s = Work(call, number, factors), stages
    shape = tuple(call.out.shape)
    into = Outcome(
        torch.zeros(shape, dtype=number),
        torch.zeros(shape[:2], dtype=number),
        torch.zeros(shape, dtype=number),
        torch.zeros(shape, dtype=torch.bool),
    )
    indices = s.read(w)
    q = s.transform(w, call.q.cpu().to(number) * (1.0 if call.q_scale is None else call.q_scale))
    heads = s.kv_head(w)
    for sequence in s.sequences(w, indices):
        if sequence.q_len < 1 or sequence.first < 0 or sequence.first + sequence.q_len > shape[0]:
            continue
        if only is not None and sequence.seq != only:
            continue
        sequence = sequence._replace(kv_len=max(sequence.kv_len, 0))
        k, v = _values(w, s, indices, sequence)
        keys = k.shape[0]
        visible = s.visibility(w, sequence, keys)
        chosen = s.selection(w, sequence, keys)
        if chosen is not None:
            visible = visible & chosen[heads]
        seen_by_some = visible.flatten(0, -2).any(0)
        if not s.keep_unseen and not bool(seen_by_some.all()):
            seen = seen_by_some[:, None, None]
            k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
        logits = s.score(w, q[sequence.first : sequence.first + sequence.q_len], k, heads) + s.bias(w, sequence, keys)
        logits = logits.masked_fill(~visible, -torch.inf)
        if keys:
            w.top = max(w.top, float(logits.masked_fill(~visible, 0.0).nan_to_num(0.0, 0.0, 0.0).abs().max()))
        s.store(w, sequence, s.softmax(w, logits, v, heads), into)
    into.top = w.top
    return s.finish(w, into)
