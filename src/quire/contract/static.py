"""Checks of shapes, types and devices. They read no values and run in every call."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.batch import INDEX_TYPES
from quire.cache.memory import overlaps_itself, share_memory
from quire.contract.call import Call
from quire.contract.rule import Violation
from quire.errors import describe
from quire.options import PER_HEAD
from quire.problem import dtype_name, is_fp8

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def index_types(call: Call) -> Iterator[Violation]:
    for name, tensor in call.index_tensors.items():
        if tensor.dtype not in INDEX_TYPES:
            hint = " (torch.cumsum of int32 gives int64, which is allowed too)" if name == "q_starts" else ""
            yield Violation("index-types", name, describe(tensor), f"int32 or int64, read in its own type{hint}")


def batch_shapes(call: Call) -> Iterator[Violation]:
    batch = call.batch
    if batch.kv_lens.dim() != 1:
        yield Violation("shapes", "kv_lens", describe(batch.kv_lens), "[seqs]")
        return
    seqs = batch.seqs
    if batch.q_starts.dim() != 1 or batch.q_starts.shape[0] != seqs + 1:
        allowed = f"[{seqs + 1}]: one more entry than kv_lens [{seqs}]; the last one is where the new tokens end"
        yield Violation("shapes", "q_starts", describe(batch.q_starts), allowed)
    if batch.page_table.dim() != 2 or batch.page_table.shape[0] != seqs:
        yield Violation(
            "shapes", "page_table", describe(batch.page_table), f"[{seqs}, pages_per_seq]: one row for each entry of kv_lens"
        )


def query_shapes(call: Call) -> Iterator[Violation]:
    q, cache = call.q, call.cache
    if q is None:
        return
    if not isinstance(q, torch.Tensor) or q.dim() != 3:
        yield Violation("shapes", "q", describe(q), "[tokens, q_heads, head_dim]")
        return
    if q.dtype not in FLOATS and not is_fp8(q.dtype):
        yield Violation("shapes", "q", describe(q), "float32, float16, bfloat16, or fp8 with q_scale")
    if q.shape[2] != cache.head_dim:
        yield Violation("shapes", "q", f"head_dim {q.shape[2]}", f"{cache.head_dim}, as the cache has")
    if q.shape[1] == 0 or q.shape[1] % cache.kv_heads:
        yield Violation("shapes", "q", f"{q.shape[1]} q_heads", f"a multiple of kv_heads = {cache.kv_heads}")
    if q.requires_grad and torch.is_grad_enabled():
        yield Violation("shapes", "q", "a tensor that requires grad", "inference only: call under torch.no_grad() or detach it")
    for name in PER_HEAD:
        value = getattr(call.options, name)
        if value is not None and value.shape[0] != q.shape[1]:
            yield Violation("shapes", name, f"{value.shape[0]} entries", f"[q_heads] = {q.shape[1]}: one for each query head")
    causal, mask, positions = call.options.causal, call.options.mask, call.options.positions
    if isinstance(causal, torch.Tensor) and causal.shape[0] != call.batch.kv_lens.shape[0]:
        yield Violation("shapes", "causal", describe(causal), f"[seqs] = {call.batch.kv_lens.shape[0]}")
    if mask is not None and mask.shape[0] != q.shape[0]:
        yield Violation("shapes", "mask", describe(mask), f"[tokens, M] with tokens = {q.shape[0]}, as q has")
    if positions is not None and positions.shape[0] != q.shape[0]:
        yield Violation("shapes", "positions", describe(positions), f"[tokens] = {q.shape[0]}, as q has")


def spans(call: Call) -> Iterator[Violation]:
    """Spans have a row for each row of q, and no other option decides what a query sees."""
    spans, options = call.batch.spans, call.options
    if spans is None or call.q is None:
        return
    if call.q.dim() == 3 and spans.shape != (call.q.shape[0], 2):
        yield Violation("spans", "spans", describe(spans), f"[tokens, 2] with tokens = {call.q.shape[0]}, as q has")
    for name, default in (("causal", True), ("window", None), ("mask", None)):
        value = getattr(options, name)
        if value is not default:
            yield Violation("spans", name, f"{describe(value)}, together with spans", f"{default}: spans say what each token sees")


def key_value_shapes(call: Call) -> Iterator[Violation]:
    q_tokens = call.q.shape[0] if isinstance(call.q, torch.Tensor) and call.q.dim() == 3 else None
    if call.new is not None:
        if q_tokens is None:
            return
        if not isinstance(call.new, (tuple, list)) or len(call.new) != 2:
            yield Violation("shapes", "new", describe(call.new), "a pair (k, v)")
            return
        dims = {"head_dim": call.cache.head_dim, "v_head_dim": call.cache.v_head_dim}
        yield from _key_value_pair(call, {"new[0]": call.new[0], "new[1]": call.new[1]}, dims, q_tokens)
    if call.writes:
        k_tokens = call.k.shape[0] if isinstance(call.k, torch.Tensor) and call.k.dim() else None
        words = ("head_dim", "v_head_dim") if call.cache.v_in_k is None else ("v_in_k", "head_dim - v_in_k")
        dims = dict(zip(words, call.cache.written_dims))
        yield from _key_value_pair(call, call.rows, dims, k_tokens if q_tokens is None else q_tokens)
    slots = call.given_slots
    if call.writes and slots is not None and (slots.dim() != 1 or slots.shape[0] != call.tokens):
        yield Violation("shapes", "slots", describe(slots), f"[tokens] = {call.tokens}, one for each token of k")


def _key_value_pair(
    call: Call, pair: dict[str, torch.Tensor | None], dims: dict[str, int], tokens: int | None
) -> Iterator[Violation]:
    """Shapes and types of new keys and values, of the sizes `dims`; any number of tokens if `tokens` is None."""
    cache = call.cache
    for (name, x), (word, dim) in zip(pair.items(), dims.items()):
        want = f"[tokens, kv_heads, {word}] = [{'tokens' if tokens is None else tokens}, {cache.kv_heads}, {dim}]"
        if not isinstance(x, torch.Tensor) or x.dim() != 3 or tuple(x.shape[1:]) != (cache.kv_heads, dim):
            yield Violation("shapes", name, describe(x), want)
        elif tokens is not None and x.shape[0] != tokens:
            yield Violation("shapes", name, describe(x), want)
        elif x.dtype not in FLOATS:
            yield Violation("shapes", name, describe(x), "float32, float16 or bfloat16")
    (k_name, k), (v_name, v) = pair.items()
    if isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor) and k.dtype != v.dtype:
        yield Violation("shapes", v_name, describe(v), f"the type of {k_name}, {dtype_name(k.dtype)}")


def one_device(call: Call) -> Iterator[Violation]:
    for name, tensor in call.tensors.items():
        # A scale is a single number, which torch combines with tensors of any device.
        if tensor.device != call.cache.device and name not in ("q_scale", "out_scale"):
            yield Violation("devices", name, describe(tensor), f"on {call.cache.device}, where the cache is")


def copies_applied(call: Call) -> Iterator[Violation]:
    """`write` applies a batch's copies. An attend before it would read pages that are not copied yet."""
    copies, pages = call.batch.copies, call.cache.pages
    for pair in copies:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(p, int) and 0 <= p < pages for p in pair)):
            yield Violation("ownership", "copies", repr(pair), f"(source, target) page ids in [0, {pages})")
    # Copies of a pool are compared by id, others by identity: the same pages may be copied again in another step.
    applied = call.cache.has_applied(copies) or any(known is copies for known in call.cache.copied)
    if call.q is not None and not call.writes and copies and not applied:
        given = f"{len(call.batch.copies)} page copies (copy-on-write) that were not applied to this cache"
        allowed = "call write first, or cache.copy_pages(batch.copies): until then the target pages do not hold the shared tokens"
        yield Violation("residency", "copies", given, allowed)


def output(call: Call) -> Iterator[Violation]:
    q, out, options = call.q, call.out, call.options
    if q is None or q.dim() != 3:
        return
    yield from _lse(call, q)
    if out is None:
        return
    shape = (q.shape[0], q.shape[1], call.cache.v_head_dim)
    if not isinstance(out, torch.Tensor) or tuple(out.shape) != shape:
        yield Violation("output", "out", describe(out), f"[tokens, q_heads, v_head_dim] = {list(shape)}")
        return
    if options.out_scale is not None and not is_fp8(out.dtype):
        yield Violation("output", "out", describe(out), "an fp8 type: out_scale divides an fp8 output")
    elif options.out_scale is None and is_fp8(out.dtype):
        yield Violation("output", "out", describe(out), "an fp8 output needs Options(out_scale=...)")
    elif options.out_scale is None and out.dtype not in FLOATS:
        yield Violation("output", "out", describe(out), "float32, float16 or bfloat16; fp8 with out_scale")
    if overlaps_itself(out):
        given = f"strides {out.stride()} over {list(out.shape)}, which overlap"
        yield Violation("output", "out", given, "memory in which no two elements overlap")
    yield from _shared(call, "out", out)


def _lse(call: Call, q: torch.Tensor) -> Iterator[Violation]:
    """The buffer for the LSE: its type, shape and memory."""
    lse = call.lse
    if lse is None:
        return
    if lse.dtype is not torch.float32 or lse.shape != q.shape[:2]:
        yield Violation("output", "lse", describe(lse), f"float32 [tokens, q_heads] = {list(q.shape[:2])}")
        return
    if overlaps_itself(lse):
        given = f"strides {lse.stride()} over {list(lse.shape)}, which overlap"
        yield Violation("output", "lse", given, "memory in which no two elements overlap")
    yield from _shared(call, "lse", lse)


def _shared(call: Call, name: str, written: torch.Tensor) -> Iterator[Violation]:
    """A result buffer that shares memory with another tensor of the call."""
    others = {other: tensor for other, tensor in call.tensors.items() if other != name}
    others |= {"the cache's K": call.cache.k, "the cache's V": call.cache.v}
    others |= {other: t for other, t in (("k_scale", call.cache.k_scale), ("v_scale", call.cache.v_scale)) if t is not None}
    for other, tensor in others.items():
        if share_memory(written, tensor):
            yield Violation("output", name, f"memory shared with {other}", "memory that no other tensor of the call uses")


def selection(call: Call) -> Iterator[Violation]:
    """The shape of a selection, and what it cannot be combined with."""
    select, q, batch = call.batch.select, call.q, call.batch
    if select is None or q is None or not isinstance(q, torch.Tensor) or q.dim() != 3:
        return
    heads, entries = call.cache.kv_heads, select.entries
    rows, count = ("tokens", q.shape[0]) if select.kind == "positions" else ("seqs", batch.seqs)
    if entries.dim() != 3 or entries.shape[0] != count or entries.shape[1] not in (1, heads):
        allowed = f"[{rows}, kv_heads or 1, n] = [{count}, {heads} or 1, n]"
        yield Violation("selection", f"select.{select.kind}", describe(entries), allowed)
    elif entries.shape[2] * select.keys_per_entry(call.cache.page_size) >= 2**31:
        yield Violation("selection", f"select.{select.kind}", describe(entries), "entries for fewer than 2^31 keys")
    if call.new is not None:
        yield Violation("selection", "new", "new keys and values, with a selection", "None: write them first (full form)")
    if call.options.mask is not None:
        yield Violation("selection", "mask", "a tree mask, with a selection", "None: leave hidden keys out of the selection")
    if batch.spans is not None:
        yield Violation("selection", "spans", "spans, with a selection", "None: leave hidden keys out of the selection")
    if batch.shard is not None:
        yield Violation("selection", "shard", f"{tuple(batch.shard)}, with a selection", "None: a cache that holds every key")


def prefixes(call: Call) -> Iterator[Violation]:
    """The tensors of prefixes are those of the batch."""
    shared = call.batch.prefixes
    if shared is None or call.q is None or call.batch.kv_lens.dim() != 1:
        return
    seqs = call.batch.seqs
    shapes = {"groups": (len(shared.groups), 5), "members": (len(shared.members),), "chains": (seqs, 1 + shared.levels)}
    for name, shape in shapes.items():
        tensor = getattr(shared, name)
        if tensor.dtype is not torch.int32 or tensor.shape != shape or not tensor.is_contiguous():
            given = describe(tensor) if tensor.is_contiguous() else "a tensor that is not contiguous"
            allowed = f"int32 {list(shape)}, contiguous: quire.Prefixes of the batch's {seqs} sequences"
            yield Violation("prefixes", f"prefixes.{name}", given, allowed)


def quantisation(call: Call) -> Iterator[Violation]:
    q, options, cache = call.q, call.options, call.cache
    if q is None or q.dim() != 3:
        return
    if is_fp8(q.dtype) and options.q_scale is None:
        yield Violation("quantisation", "q_scale", "missing (None), with fp8 queries", "a number above 0, or an fp32 tensor []")
    if not is_fp8(q.dtype) and options.q_scale is not None:
        yield Violation(
            "quantisation", "q_scale", f"a scale, with {dtype_name(q.dtype)} queries", "None: only fp8 queries have a scale"
        )
    if options.batch_invariant and call.new is not None and cache.quantised:
        given = f"context form over {cache.formats}: new tokens are exact now, quantised in the next call"
        yield Violation("quantisation", "batch_invariant", given, "full form (write first, then attend without new)")


def rotation(call: Call) -> Iterator[Violation]:
    """What `rope` rotates, and by what."""
    rope, cache, k = call.rope, call.cache, call.k
    if rope is None or not isinstance(k, torch.Tensor) or k.dim() != 3:
        return
    latent = cache.v_in_k is not None
    most, whose = cache.head_dim - (cache.v_in_k or 0), "elements of a key behind its value" if latent else "head_dim of the cache"
    if rope.rotary_dim > most:
        yield Violation("shapes", "rope", f"a rotary_dim of {rope.rotary_dim}", f"at most the {whose}, {most}")
    word, size = ("v_in_k", cache.v_in_k) if latent else ("head_dim", cache.head_dim)
    for name in ("q_norm", "k_norm"):
        weight = getattr(rope, name)
        if weight is not None and weight.shape[0] != size:
            yield Violation("shapes", f"rope.{name}", describe(weight), f"[{word}] = {size}")
    yield from _rope_positions(call, k.shape[0])
    yield from _rotated_queries(call, k)


def _rope_positions(call: Call, tokens: int) -> Iterator[Violation]:
    """The positions of a rotation."""
    assert call.rope is not None
    positions, by_axis = call.rope_positions, call.rope.sections is not None
    if positions is None and by_axis:
        yield Violation(
            "shapes", "positions", "nothing, with sections", f"[3, tokens] = [3, {tokens}]: a batch has one position per token"
        )
    elif positions is None and call.options.mask is not None:
        yield Violation(
            "shapes", "positions", "nothing, with mask and rope", "integers [tokens]: the branches of a tree share positions"
        )
    elif positions is not None and tuple(positions.shape) != ((3, tokens) if by_axis else (tokens,)):
        allowed = f"[3, tokens] = [3, {tokens}] with sections" if by_axis else f"[tokens] = [{tokens}] without sections"
        yield Violation("shapes", "positions", describe(positions), allowed)


def _rotated_queries(call: Call, k: torch.Tensor) -> Iterator[Violation]:
    """The queries that a write rotates, and where they go."""
    q, out, cache = call.q_in, call.q_out, call.cache
    if q is None:
        return
    want = f"[tokens, q_heads, head_dim] = [{k.shape[0]}, a multiple of {cache.kv_heads}, {cache.head_dim}]"
    fits = q.dim() == 3 and (q.shape[0], q.shape[2]) == (k.shape[0], cache.head_dim)
    if call.q is None and (not fits or q.shape[1] == 0 or q.shape[1] % cache.kv_heads):
        yield Violation("shapes", "q", describe(q), want)
    if q.dtype != k.dtype:
        yield Violation(
            "shapes", "q", describe(q), f"the type of k, {dtype_name(k.dtype)}: queries are rotated before they are quantised"
        )
    if call.q is None and q.requires_grad and torch.is_grad_enabled():
        yield Violation("shapes", "q", "a tensor that requires grad", "inference only: call under torch.no_grad() or detach it")
    if out is None:
        return
    if (out.shape, out.dtype) != (q.shape, q.dtype):
        yield Violation("output", "q_out", describe(out), f"as q: {describe(q)}")
    elif overlaps_itself(out):
        given = f"strides {out.stride()} over {list(out.shape)}, which overlap"
        yield Violation("output", "q_out", given, "memory in which no two elements overlap")
    elif (out.data_ptr(), out.stride()) != (q.data_ptr(), q.stride()):
        yield from _shared(call, "q_out", out)
    else:
        yield from (violation for violation in _shared(call, "q_out", out) if violation.given != "memory shared with q")


def latent(call: Call) -> Iterator[Violation]:
    """What a write of a cache cannot do if V is a part of K."""
    if call.cache.v_in_k is not None and call.rope is not None and call.rope.q_norm is not None:
        allowed = "None: absorbed queries were normalised before they were projected"
        yield Violation("latent", "rope.q_norm", describe(call.rope.q_norm), allowed)


def own_memory(call: Call) -> Iterator[Violation]:
    """New keys or values that share memory with the cache: the result would depend on the order of the tokens."""
    if not call.writes:
        return
    cache = call.cache
    written = {"the cache's K": cache.k, "the cache's V": cache.v, "k_scale": cache.k_scale, "v_scale": cache.v_scale}
    for name, given in call.rows.items():
        for other, tensor in written.items():
            if isinstance(given, torch.Tensor) and tensor is not None and share_memory(given, tensor):
                yield Violation(
                    "ownership", name, f"memory shared with {other}", "memory outside of the cache: the write would change it"
                )
