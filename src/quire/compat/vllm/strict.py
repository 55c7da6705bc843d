"""Checks that the cache holds the new token of each decode sequence, as vLLM's decode kernels assume."""

from __future__ import annotations

import math

import torch

from quire.cache.format import Format
from quire.contract.call import Call
from quire.contract.rule import Violation


def missing_tokens(call: Call) -> list[Violation]:
    """The decode sequences whose new token, given in key and value, is not in the cache, within the rounding of its format."""
    assert call.new is not None
    cache = call.cache
    seq = (call.q_lens == 1).nonzero().flatten()
    token, at = call.q_starts[seq], call.kv_lens[seq] - 1
    page, offset = call.page_table[seq, at // cache.page_size], at % cache.page_size
    parts = (
        ("k_pages", "key", call.new[0], cache.k_bytes, cache.layout.k, cache.k_scale),
        ("v_pages", "value", call.new[1], cache.v_bytes, cache.layout.v, cache.v_scale),
    )
    found = []
    for name, word, dense, storage, order, scale in parts:
        view = order.view(storage)
        held = view[page, :, offset // view.shape[3], offset % view.shape[3]].flatten(2).cpu()
        held = held.view(cache.format.dtype).double() if cache.format.itemsize == 1 else held.double()
        per = torch.ones(1, 1, 1, dtype=torch.float64, device="cpu")
        if scale is not None:
            per = scale.cpu().double().reshape(1, -1, 1)
        off = _differs(held * per, dense[token].cpu().double(), per, cache.format)
        for i in off.flatten(1).any(1).nonzero().flatten().tolist():
            index, position, of_page, slot = int(seq[i]), int(at[i]), int(page[i]), int(page[i] * cache.page_size + offset[i])
            given = (
                f"slot {slot} (page {of_page}, offset {int(offset[i])}) differs from {word}[{int(token[i])}] "
                f"in {int(off[i].sum())} of {off[i].numel()} elements"
            )
            allowed = f"the token at position {position} of sequence {index}, within the rounding of {cache.format}: write it first"
            found.append(Violation("residency", name, given, allowed, seq=index, token=position, page=of_page, slot=slot))
    return found


def _differs(held: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor, format: Format) -> torch.Tensor:
    """Which elements differ from the expected ones by more than one rounding step of the format. NaN equals NaN."""
    info = torch.finfo(format.dtype)
    most = (math.inf if format.largest is None else format.largest) * scale
    wanted = wanted.clamp(-most, most)
    close = (held - wanted).abs() <= info.eps * (wanted.abs() + info.smallest_normal * scale)
    return ~(close | (held == wanted) | (held.isnan() & wanted.isnan()))
