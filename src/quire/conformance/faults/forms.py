"""Faults of forms: new tokens that come beside the cache, and tensors that are parts of wider ones."""

from __future__ import annotations

import dataclasses

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import finished
from quire.conformance.oracle import exact as x
from quire.conformance.oracle.exact import PLAIN, BatchSequence, Indices, Outcome, Stages, Values, Work


def _new_ignored() -> Stages:
    """Only what the cache holds is seen."""

    def see(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor:
        visible = x.see(w, sequence, keys)
        visible[:, max(sequence.context, 0) :] = False
        return visible

    return PLAIN.replace(see=see)


def _new_from_cache() -> Stages:
    def gather(w: Work, s: Stages, at: Indices, sequence: BatchSequence) -> Values:
        fresh, w.new = w.new, {"k": None, "v": None}
        parts = []
        for part in ("k", "v"):
            page, slot = s.locate(w, at, sequence, torch.arange(sequence.kv_len))
            parts.append(s.decode(w, part, x.load(w, part, s.address(w, part, page, slot)), page, slot))
        w.new = fresh
        return Values(*parts)

    return PLAIN.replace(gather=gather)


def _new_rows(by: int) -> Stages:
    """The new tokens' keys and values are taken from rows further on."""

    def gather(w: Work, s: Stages, at: Indices, sequence: BatchSequence) -> Values:
        k, v = x.gather(w, s, at, sequence)
        n = max(sequence.context, 0)
        tail = {}
        for part in ("k", "v"):
            rows = (torch.arange(sequence.first, sequence.first + sequence.q_len) + by).clamp(0, max(w.call.live - 1, 0))
            tail[part] = w.new[part][rows.to(w.call.device)].cpu().to(w.number)  # type: ignore[index]
        return Values(torch.cat((k[:n], tail["k"])), torch.cat((v[:n], tail["v"])))

    return PLAIN.replace(gather=gather)


def _new_quantised() -> Stages:
    """New tokens go through the cache's format on their way, as if they had been read back from it."""

    def gather(w: Work, s: Stages, at: Indices, sequence: BatchSequence) -> Values:
        from quire.conformance.cases.build import encode

        parts = list(x.gather(w, s, at, sequence))
        n = max(sequence.context, 0)
        for i, part in enumerate(("k", "v")):
            scale = w.scales[part].cpu().float().reshape(1, -1, 1)  # type: ignore[union-attr]
            fresh = parts[i][n:]
            parts[i] = torch.cat((parts[i][:n], encode(fresh, w.call.format, scale).to(w.number) * scale.to(w.number)))
        return Values(*parts)

    return PLAIN.replace(gather=gather)


def _as_if_dense(tensor: torch.Tensor) -> torch.Tensor:
    """What a kernel reads that takes a tensor's elements to lie one after the other."""
    strides = [1]
    for n in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * n)
    return tensor.as_strided(tensor.shape, strides)


def _dense_queries(w: Work, into: Outcome) -> Outcome:
    return x.exact(dataclasses.replace(w.call, q=_as_if_dense(w.call.q)), number=w.number, factors=w.factors)


def _dense_table() -> Stages:
    def read(w: Work) -> Indices:
        return x.read(w)._replace(table=_as_if_dense(w.call.page_table).long().cpu())

    return PLAIN.replace(read=read)


def _dense_new_tokens() -> Stages:
    def gather(w: Work, s: Stages, at: Indices, sequence: BatchSequence) -> Values:
        given = w.new
        w.new = {part: None if rows is None else _as_if_dense(rows) for part, rows in given.items()}
        found = x.gather(w, s, at, sequence)
        w.new = given
        return found

    return PLAIN.replace(gather=gather)


def _context(call: KernelCall) -> bool:
    return call.new is not None


FORMS = (
    Fault(
        "new-tokens-ignored",
        "forms",
        "nothing of k and v is seen; a first prefill gives zeros",
        "a kernel that reads everything from the cache is called before the cache is written",
        _new_ignored,
        _context,
        issues=("vLLM #28490 and its five explanations",),
    ),
    Fault(
        "new-tokens-read-from-cache",
        "forms",
        "slots of the new tokens, not written yet, are read instead of k and v",
        "one call with two contracts: prefill sequences take k and v, decode sequences take the cache",
        _new_from_cache,
        _context,
        issues=("vLLM chunked_prefill_paged_decode",),
    ),
    Fault(
        "new-tokens-off-by-one",
        "forms",
        "each new token has the key and value of the next",
        "an index into k and v that counts from 1",
        lambda by: _new_rows(by),
        _context,
        ({"by": 1}, {"by": -1}),
    ),
    Fault(
        "new-tokens-quantised",
        "forms",
        "small errors, of the size of the cache's format, in what the new tokens give",
        "k and v are passed through the cache's format although they come beside it",
        _new_quantised,
        lambda call: call.new is not None and call.k_scale is not None and call.k_scale.dim() < 2,
    ),
    Fault(
        "q-strides-ignored",
        "forms",
        "right where queries lie one after the other, wrong from the second on where they are part of a wider tensor",
        "addresses from shapes: q is taken to be contiguous, and is a slice of what one projection made of q, k and v",
        lambda: finished(_dense_queries),
        lambda call: not call.q.is_contiguous() and call.live > 1,
    ),
    Fault(
        "table-strides-ignored",
        "forms",
        "right where the page table is a tensor of its own, another sequence's pages where it is part of a wider one",
        "rows of the table are found by its width: it is taken to be contiguous, and is a slice of what an engine keeps",
        _dense_table,
        lambda call: not call.page_table.is_contiguous() and call.seqs > 1,
    ),
    Fault(
        "new-tokens-strides-ignored",
        "forms",
        "right where k and v are tensors of their own, wrong where they are parts of a wider one",
        "addresses from shapes, as with q",
        _dense_new_tokens,
        lambda call: call.new_k is not None and not call.new_k.is_contiguous() and call.live > 1,
    ),
)
