"""Attention in C++ over pages of every layout and format, with every feature.

The library divides a call into work units that torch's threads take one by one. Sequences with few new tokens are read in place,
all heads of a page at once (`decode.h`); those with many pack a tile of keys at a time for all of their rows (`prefill.h`).
`kernels.cpp` is compiled once for each instruction set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.kernels.native.call import ABSENT, ATTEND, UNBOUNDED, array, batch_of, cache_of, index, prefixes_of, select_of
from quire.kernels.native.library import library
from quire.options import Options
from quire.platform import Platform
from quire.problem import ANY, Problem

_NO_ARRAYS = (0,) * 10


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
    `new`; the others have all of theirs in the cache. With `only=(low, high)`, sequences with fewer than `low` or more than `high`
    new tokens are skipped: they are not read, and their output is unchanged. Rows of the LSE that belong to no sequence become
    zero, and with `zero_padding` those of the output too. The pages of shared prefixes are read once."""
    native = library()
    # Kept alive until the call returns: the library gets only pointers.
    alibi, sinks = _floats(options.alibi), _floats(options.sinks)
    causal, mask, positions = options.causal, options.mask, options.positions
    left, right = options.sides
    native.attend(
        ATTEND.pack(
            *array(q),
            *array(out),
            *(_NO_ARRAYS if new is None else (*array(new[0]), *array(new[1]))),
            *((0, 0, 0) if lse is None else (lse.data_ptr(), *lse.stride())),
            q.shape[0],
            q.shape[1] // cache.kv_heads,
            *batch_of(batch),
            _scale(q, options),
            *(number or 0.0 for number in options.numbers),
            0.0 if options.out_scale is None else float(options.out_scale),
            UNBOUNDED if left is None else left,
            UNBOUNDED if right is None else right,
            0 if alibi is None else alibi.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            *((0, 0, causal) if isinstance(causal, bool) else (causal.data_ptr(), causal.stride(0), 0)),
            *(ABSENT if mask is None else (mask.data_ptr(), *mask.stride(), mask.shape[1])),
            *(ABSENT if positions is None else index(positions)),
            *(ABSENT if batch.spans is None else index(batch.spans)),
            *select_of(batch, q),
            *prefixes_of(batch),
            context_from,
            *only,
            zero_padding,
            options.batch_invariant,
            torch.get_num_threads(),
            native.level,
        )
        + cache_of(cache)
    )


def launcher(problem: Problem, platform: Platform) -> Callable[[Any], None]:
    """The function that launches calls of a problem, each sequence by itself."""
    return _launch_without_prefixes


def shared_launcher(problem: Problem, platform: Platform) -> Callable[[Any], None]:
    """The same for calls whose shared prefixes are read once."""
    return _launch_call


def _launch_without_prefixes(call: Any) -> None:
    if call.batch.prefixes is not None:
        call.batch = call.batch.with_prefixes(None)
    _launch_call(call)


def _launch_call(call: Any) -> None:
    launch(
        call.q, call.cache, call.batch, call.options, call.new, call.out, call.lse,
        context_from=call.context_from, only=call.only, zero_padding=call.zero_padding,
    )  # fmt: skip


def _floats(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor as contiguous fp32."""
    if tensor is None or (tensor.dtype is torch.float32 and tensor.is_contiguous()):
        return tensor
    return tensor.detach().float().contiguous()


def _scale(q: torch.Tensor, options: Options) -> float:
    """The factor of q·k."""
    scale = q.shape[2] ** -0.5 if options.scale is None else options.scale
    return scale if options.q_scale is None else scale * (float(options.q_scale) or 1.0)
