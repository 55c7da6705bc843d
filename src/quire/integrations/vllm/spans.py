"""What the tokens of a step see where that is not causality and a window alone: images whose tokens see each other (`mm_prefix`),
and windows of aligned chunks (`chunk_lookback`). Each token sees an interval of keys in both, which is a span of Quire."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from quire.batch import Batch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


class LayerView(NamedTuple):
    """What a layer's queries see."""

    window: int | None
    """The visible keys up to the query's own, or None."""
    lookback: int = -1
    """The chunks before the query's own that it sees, of `window // (lookback + 1)` keys each; -1 without chunks."""
    clamps: bool = False
    """Whether the window also hides early keys of an image from its later tokens."""


def image_ranges(common: CommonAttentionMetadata) -> torch.Tensor | None:
    """The images of each sequence as positions [begin, end), int32 `[seqs, images, 2]` on the device, (0, 0) where there is none;
    None if no sequence has an image. vLLM gives the first and the last position, and skips ranges of one."""
    given = common.mm_req_doc_ranges or {}
    found = [[(a, b + 1) for a, b in given.get(seq, ()) if a < b] for seq in range(common.num_reqs)]
    most = max(map(len, found), default=0)
    if most == 0:
        return None
    padded = [ranges + [(0, 0)] * (most - len(ranges)) for ranges in found]
    return torch.tensor(padded, dtype=torch.int32, device="cpu").to(common.seq_lens.device, non_blocking=True)


def spans_of(batch: Batch, tokens: int, images: torch.Tensor | None, view: LayerView) -> torch.Tensor:
    """The keys that each token sees, `[tokens, 2]`: (causality and window) or its image. Both contain the token, so that together
    they are one interval. Nothing is read on the host."""
    seq = batch.sequences_of_tokens(tokens).clamp(max=max(batch.seqs - 1, 0))
    kv_len = batch.kv_lens[seq].long()
    at = torch.arange(tokens, device=batch.device) - batch.q_starts.long()[seq + 1] + kv_len
    earliest = torch.zeros_like(at) if view.window is None else at - view.window + 1
    begin, end = earliest, at + 1
    if view.window is not None and view.lookback >= 0:
        chunk = view.window // (view.lookback + 1)
        begin = (torch.div(at, chunk, rounding_mode="floor") - view.lookback) * chunk
    if images is not None:
        first, stop = images.long()[seq].unbind(2)
        inside = (first <= at[:, None]) & (at[:, None] < stop)
        image_begin = torch.where(inside, first, at[:, None]).amin(1)
        begin = torch.minimum(begin, torch.maximum(image_begin, earliest) if view.clamps else image_begin)
        end = torch.maximum(end, torch.where(inside, stop, 0).amax(1))
    return torch.stack((begin.clamp(min=0), torch.minimum(end, kv_len)), 1).to(batch.kv_lens.dtype)
