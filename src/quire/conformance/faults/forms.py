"""Faults of call forms: new tokens that are passed as arguments, and tensors that are views of wider ones."""

from __future__ import annotations

import dataclasses

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import finished
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, BatchSequence, Indices, Outcome, Stages, Values, Work


def _new_ignored() -> Stages:
    """Only tokens in the cache are visible."""

    def visibility(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor:
        visible = oracle.visibility(w, sequence, keys)
        visible[:, max(sequence.context, 0) :] = False
        return visible

    return PLAIN.replace(visibility=visibility)


def _new_from_cache() -> Stages:
    def gather(w: Work, s: Stages, indices: Indices, sequence: BatchSequence) -> Values:
        fresh, w.new = w.new, {"k": None, "v": None}
        parts = []
        for part in ("k", "v"):
            page, offset = s.locate(w, indices, sequence, torch.arange(sequence.kv_len))
            parts.append(s.decode(w, part, oracle.load(w, part, s.address(w, part, page, offset)), page, offset))
        w.new = fresh
        return Values(*parts)

    return PLAIN.replace(gather=gather)


def _new_rows(by: int) -> Stages:
    """Keys and values of the new tokens are read `by` rows further on."""

    def gather(w: Work, s: Stages, indices: Indices, sequence: BatchSequence) -> Values:
        k, v = oracle.gather(w, s, indices, sequence)
        n = max(sequence.context, 0)
        tail = {}
        for part in ("k", "v"):
            rows = (torch.arange(sequence.first, sequence.first + sequence.q_len) + by).clamp(0, max(w.call.live - 1, 0))
            tail[part] = w.new[part][rows.to(w.call.device)].cpu().to(w.number)  # type: ignore[index]
        return Values(torch.cat((k[:n], tail["k"])), torch.cat((v[:n], tail["v"])))

    return PLAIN.replace(gather=gather)


def _new_quantised() -> Stages:
    """New tokens are rounded to the cache's format, as if they had been written to the cache and read back."""

    def gather(w: Work, s: Stages, indices: Indices, sequence: BatchSequence) -> Values:
        from quire.conformance.cases.build import encode

        parts = list(oracle.gather(w, s, indices, sequence))
        n = max(sequence.context, 0)
        for i, part in enumerate(("k", "v")):
            scale = w.scales[part].cpu().float().reshape(1, -1, 1)  # type: ignore[union-attr]
            fresh = parts[i][n:]
            parts[i] = torch.cat((parts[i][:n], encode(fresh, w.call.formats[part], scale).to(w.number) * scale.to(w.number)))
        return Values(*parts)

    return PLAIN.replace(gather=gather)


def _as_if_dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a kernel reads it that ignores strides and assumes contiguous memory."""
    strides = [1]
    for n in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * n)
    return tensor.as_strided(tensor.shape, strides)


def _dense_queries(w: Work, into: Outcome) -> Outcome:
    return oracle.exact(dataclasses.replace(w.call, q=_as_if_dense(w.call.q)), number=w.number, factors=w.factors)


def _dense_table() -> Stages:
    def read(w: Work) -> Indices:
        return oracle.read(w)._replace(table=_as_if_dense(w.call.page_table).long().cpu())

    return PLAIN.replace(read=read)


def _dense_new_tokens() -> Stages:
    def gather(w: Work, s: Stages, indices: Indices, sequence: BatchSequence) -> Values:
        given = w.new
        w.new = {part: None if rows is None else _as_if_dense(rows) for part, rows in given.items()}
        found = oracle.gather(w, s, indices, sequence)
        w.new = given
        return found

    return PLAIN.replace(gather=gather)


def _context(call: KernelCall) -> bool:
    return call.new is not None


FORMS = (
    Fault(
        "new-tokens-ignored",
        "forms",
        "the new tokens k and v are not visible; a first prefill gives zeros",
        "a kernel that reads everything from the cache is called before the new tokens are written",
        _new_ignored,
        _context,
        issues=("vLLM #28490",),
    ),
    Fault(
        "new-tokens-read-from-cache",
        "forms",
        "slots of the new tokens, which are not written yet, are read instead of k and v",
        "one operator with two contracts: prefill sequences use k and v, decode sequences use the cache",
        _new_from_cache,
        _context,
        issues=("vLLM chunked_prefill_paged_decode",),
    ),
    Fault(
        "new-tokens-off-by-one",
        "forms",
        "each new token has the key and value of the next or the previous one",
        "an index into k and v that starts at 1",
        lambda by: _new_rows(by),
        _context,
        ({"by": 1}, {"by": -1}),
    ),
    Fault(
        "new-tokens-quantised",
        "forms",
        "keys and values of new tokens have the rounding error of the cache's format",
        "k and v are quantised to the cache's format although they are passed as arguments",
        _new_quantised,
        lambda call: call.new is not None and call.k_scale is not None and call.v_scale is not None and call.k_scale.dim() < 2,
    ),
    Fault(
        "q-strides-ignored",
        "forms",
        "correct for a contiguous q; wrong from the second row on for a view of a wider tensor",
        "addresses are derived from the shape, but q is a slice of a fused qkv projection",
        lambda: finished(_dense_queries),
        lambda call: not call.q.is_contiguous() and call.live > 1,
    ),
    Fault(
        "table-strides-ignored",
        "forms",
        "correct for a contiguous page table; for a view of a wider one, pages of other sequences are read",
        "rows of the table are addressed by its width, but the table is a slice of a larger one",
        _dense_table,
        lambda call: not call.page_table.is_contiguous() and call.seqs > 1,
    ),
    Fault(
        "new-tokens-strides-ignored",
        "forms",
        "correct for contiguous k and v; wrong for views of a wider tensor",
        "addresses are derived from the shape, but k and v are slices of a fused qkv projection",
        _dense_new_tokens,
        lambda call: call.new_k is not None and not call.new_k.is_contiguous() and call.live > 1,
    ),
)
