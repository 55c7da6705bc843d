"""Attention in C++: straight from the pages, every layout, format and feature.

The library cuts a call into pieces of work that torch's threads take one by one. Sequences with few new tokens are read where
they lie, all heads of a page at once (`few.h`); those with many pack a tile of keys at a time for all of their rows (`many.h`).
Both are one source that is compiled for several instruction sets, `kernels.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.kernels.native.call import UNBOUNDED, Array, Attend, Index, array, batch_of, cache_of, index
from quire.kernels.native.library import library
from quire.options import Options, Scalar
from quire.platform import Platform
from quire.problem import ANY, Problem


def launch(
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options,
    new: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    context_from: int = 1,
    only: tuple[int, int] = (0, ANY),
    zero_padding: bool = False,
) -> None:
    """Writes `out` and, if given, `lse` for every live row. Sequences with at least `context_from` new tokens take those from
    `new`; the others find all of theirs in the cache. Under `only=(low, high)`, those with fewer than `low` or more than `high` new
    tokens are left alone: nothing of them is read, and their output stays as it was. Rows of the LSE that belong to no sequence
    become zero, and those of the output under `zero_padding`."""
    native = library()
    # Held until the call returns: the library is given pointers alone.
    alibi, sinks = (None if x is None else x.detach().float().contiguous() for x in (options.alibi, options.sinks))
    causal = options.causal if isinstance(options.causal, torch.Tensor) else None
    mask, positions = options.mask, options.positions
    left, right = (UNBOUNDED if side is None else side for side in options.sides)
    scale = q.shape[2] ** -0.5 if options.scale is None else options.scale
    native.attend(
        Attend(
            q=array(q),
            out=array(out),
            new_k=Array() if new is None else array(new[0]),
            new_v=Array() if new is None else array(new[1]),
            lse=None if lse is None else lse.data_ptr(),
            lse_token=0 if lse is None else lse.stride(0),
            lse_head=0 if lse is None else lse.stride(1),
            tokens=q.shape[0],
            group=q.shape[1] // cache.kv_heads,
            cache=cache_of(cache),
            batch=batch_of(batch),
            scale=scale * (_number(options.q_scale) or 1.0),
            softcap=options.softcap or 0.0,
            out_scale=_number(options.out_scale),
            left=left,
            right=right,
            alibi=None if alibi is None else alibi.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            causal_of=None if causal is None else causal.data_ptr(),
            causal_stride=0 if causal is None else causal.stride(0),
            causal=causal is None and bool(options.causal),
            mask=None if mask is None else mask.data_ptr(),
            mask_token=0 if mask is None else mask.stride(0),
            mask_column=0 if mask is None else mask.stride(1),
            positions=Index() if positions is None else index(positions),
            context_from=context_from,
            only_low=only[0],
            only_high=only[1],
            zero_padding=zero_padding,
            invariant=options.batch_invariant,
            threads=torch.get_num_threads(),
            level=native.level,
        )
    )


def launcher(problem: Problem, platform: Platform) -> Callable[[Any], None]:
    """What launches calls: nothing is prepared for a problem here."""

    def launch_call(call: Any) -> None:
        launch(
            call.q, call.cache, call.batch, call.options, call.new, call.out, call.lse,
            context_from=call.context_from, only=call.only, zero_padding=call.zero_padding,
        )  # fmt: skip

    return launch_call


def _number(value: Scalar) -> float:
    """A scale; 0 if there is none."""
    return 0.0 if value is None else float(value)
