"""The operator: describe the call, check it, choose a kernel, launch it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.contract.call import Call
from quire.contract.check import Level, enforce
from quire.dispatch.choose import choose, launcher_of
from quire.dispatch.platform import Platform
from quire.options import PLAIN, Options
from quire.problem import Problem, default_out_dtype

Launch = Callable[..., Any]
"""What every attention kernel's launcher takes: q, cache, batch, options, new, out, lse."""


@overload
def attend(
    q: torch.Tensor, cache: KVCache, batch: Batch, options: Options | None = ..., *,
    new: tuple[torch.Tensor, torch.Tensor] | None = ..., out: torch.Tensor | None = ..., lse: Literal[False] = ...,
    kernel: str | None = ..., check: Level = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def attend(
    q: torch.Tensor, cache: KVCache, batch: Batch, options: Options | None = ..., *,
    new: tuple[torch.Tensor, torch.Tensor] | None = ..., out: torch.Tensor | None = ..., lse: Literal[True],
    kernel: str | None = ..., check: Level = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def attend(
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options | None = None,
    *,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
    lse: bool = False,
    kernel: str | None = None,
    check: Level = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the new tokens of every sequence of a mixed batch over its pages.

        q     [tokens, q_heads, head_dim]       fp32, fp16, bf16, or fp8 with Options(q_scale=...)
        new   (k, v), [tokens, kv_heads, dim]   context form: the cache holds only what came before the new tokens; without it,
                                                full form, the cache holds every token
        out   [tokens, q_heads, v_head_dim]     where to write; by default a new tensor of q's type (bf16 for fp8 queries, e4m3fn
                                                under Options(out_scale=...)), zero in padding rows

    Returns `out`, or `(out, lse)` with the natural-log LSE, fp32 `[tokens, q_heads]`, if `lse` is True. `kernel` forces a kernel by
    name or raises. `check="full"` reads values on any device, not only in host memory."""
    options = options or PLAIN
    enforce("attend", Call(cache, batch, q, options, new, out), check)
    return run(choose_kernel(q, cache, batch, options, new, out, lse, kernel), q, cache, batch, options, new, out, lse)


def choose_kernel(
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options,
    new: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor | None,
    lse: bool,
    kernel: str | None,
) -> Launch:
    """The launcher for a call that keeps the contract; raises if there is none."""
    problem = Problem.of(q, cache, batch, options, new=new, out=out, lse=lse)
    return launcher_of(choose(problem, Platform.detect(q.device), kernel=kernel, capturing=capturing(q)))


def run(
    launch: Launch,
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options,
    new: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor | None,
    lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Launches, into new tensors where none were given."""
    if out is None:
        dtype = default_out_dtype(q.dtype, options)
        out = _with_zero_padding((*q.shape[:2], cache.v_head_dim), dtype, batch)
    part = _with_zero_padding(q.shape[:2], torch.float32, batch) if lse else None
    launch(q, cache, batch, options, new, out, part)
    return out if part is None else (out, part)


def _with_zero_padding(shape: Sequence[int], dtype: torch.dtype, batch: Batch) -> torch.Tensor:
    """Memory whose live rows a kernel will write and whose padding rows are zero. On the host the padding alone is filled."""
    if batch.device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=batch.device)
    rows = torch.empty(*shape, dtype=dtype)
    rows[int(batch.q_starts[-1]) :] = 0
    return rows


def capturing(tensor: torch.Tensor) -> bool:
    """Whether the current stream of a GPU is being captured into a graph."""
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
