"""Cache writes in plain torch: quantise, then store each token in its slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.platform import Platform
from quire.problem import Problem


@torch.no_grad()
def rotate(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the queries of a call into `q_out`, and returns what is stored, rotated in fp32. Nothing is read on the host."""
    rope, batch, tokens, first = call.rope, call.batch, call.k.shape[0], call.cache.v_in_k
    at = call.rope_positions
    if at is None:
        at = batch.positions_of_tokens(tokens)
    if call.q_in is not None:
        q = rope.rotate(call.q_in, at, rope.q_norm, first).to(call.q_out.dtype)
        live = (torch.arange(tokens, device=at.device) < batch.q_starts[-1])[:, None, None]
        call.q_out.copy_(torch.where(live, q, 0 if call.zero_padding else call.q_out))
    rows: tuple[torch.Tensor, torch.Tensor] = rope.rotate_rows(call.k, call.v, at, first)
    return rows


@torch.no_grad()
def launch(k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, slots: torch.Tensor | None) -> None:
    """Stores k and v `[tokens, kv_heads, dim]` at `slots` (by default the batch's, negative to skip), every head of them.
    A slot outside of the cache is skipped too. If V is a part of K, k and v are its two parts, which share their scales."""
    slots = batch.slots_of_tokens(k.shape[0], cache.page_size, slots)
    live = ((slots >= 0) & (slots < cache.pages * cache.page_size)).nonzero().squeeze(1)
    slots = slots[live]
    page, offset = slots // cache.page_size, slots % cache.page_size
    parts = [
        (k[live], cache.k_view, cache.k_groups, cache.k_scale, cache.k_format),
        (v[live], cache.v_view, cache.v_groups, cache.v_scale, cache.v_format),
    ]
    if cache.v_in_k is not None:
        parts = [(torch.cat((k[live], v[live]), -1), cache.k_view, None, cache.k_scale, cache.k_format)]
    for x, view, groups, scale, format in parts:
        if scale is not None and scale.dim() == 3:
            of_token = format.token_scale(x)
            scale[page, offset] = of_token
            scale = of_token
        stored = format.quantise(x, None if scale is None else scale.unsqueeze(-1))
        if groups is not None:
            stored, scales = stored.split(view.shape[5], -1)  # split as `cache.groups.split` does
            scales = scales.unflatten(-1, groups.shape[4:])
            groups[page, :, offset // groups.shape[3], offset % groups.shape[3]] = scales
        stored = stored.reshape(-1, view.shape[1], *view.shape[4:])
        if format.itemsize == 1:
            stored, view = stored.view(torch.uint8), view.view(torch.uint8)
        view[page, :, offset // view.shape[3], offset % view.shape[3]] = stored


def launcher(problem: Problem, platform: Platform) -> Callable[[Any], None]:
    """The function that launches calls of a problem."""

    def launch_call(call: Any) -> None:
        k, v = (call.k, call.v) if call.rope is None else rotate(call)
        launch(k, v, call.cache, call.batch, call.slots)

    return launch_call
