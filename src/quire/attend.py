"""The operator: describe the call, check it, choose a kernel, launch it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.contract.call import Call
from quire.contract.check import Level, enforce, is_watched, recording
from quire.dispatch.choose import choose, chosen_by
from quire.dispatch.platform import Platform
from quire.errors import ArgumentError, describe
from quire.kind import MOST, fact, facts, of_batch, of_cache, of_options, read_by
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
        out   [tokens, q_heads, v_head_dim]     where to write; by default a new tensor of q's type (bf16 for fp8 queries), zero in
                                                padding rows. Under Options(out_scale=...) it is fp8: fp8 queries keep their own
                                                type, all others give e4m3fn

    Returns `out`, or `(out, lse)` with the natural-log LSE, fp32 `[tokens, q_heads]`, if `lse` is True. `kernel` forces a kernel by
    name or raises. `check="full"` reads values on any device, not only in host memory."""
    if is_traced(q):
        from quire import ops

        return ops.attend(q, cache, batch, options, new, out, lse, kernel, check)
    options = PLAIN if options is None else options
    key = None
    quick = is_quick(q, cache, batch) and check == "auto" and not reads_elsewhere(options, q)
    if quick and (out is None or are_apart(out, q, *(new or ()), *read_by(cache, batch, options))):
        key = (of_cache(cache), of_batch(batch), of_options(options), fact(q), facts(new), fact(out), lse, kernel)
        bound = _bound.get(key)
        if bound is not None:
            return run(bound[0], q, cache, batch, options, new, out, lse)
    if not isinstance(lse, bool):
        raise ArgumentError("lse", describe(lse), "True or False")
    enforce("attend", Call(cache, batch, q, options, new, out), check)
    launch = choose_kernel(q, cache, batch, options, new, out, lse, kernel, zero_padding=out is None)
    result = run(launch, q, cache, batch, options, new, out, lse)
    remember(_bound, key, launch)
    return result


def choose_kernel(
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options,
    new: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor | None,
    lse: bool,
    kernel: str | None,
    **how: Any,
) -> Launch:
    """A launcher for calls like this one, which keeps the contract; raises if there is none. `how` is what a launcher takes
    besides: context_from, only, zero_padding."""
    problem = Problem.of(q, cache, batch, options, new=new, out=out, lse=lse)
    platform = Platform.detect(q.device)
    decision = choose(problem, platform, kernel=kernel, capturing=capturing(q))
    chosen = chosen_by(decision)
    if out is None:
        out = q.new_empty(0, dtype=default_out_dtype(q.dtype, options)).expand(*q.shape[:2], 0)
    launch = chosen.bind(q, cache, batch, options, new, out, **how)
    recorder = recording()
    if recorder is not None:
        launch = recorder.attending(launch, decision, how)
    if cache.ledger is None:
        return launch
    audit = choose(problem, platform, operation="audit").chosen
    return launch if audit is None else Audited(audit.bind(q, cache, batch, options, new, **how), launch)


class Audited:
    """A launcher behind the check of the ledger, which neither waits for."""

    def __init__(self, audit: Launch, launch: Launch):
        self.audit, self.launch = audit, launch
        self.capturable = getattr(launch, "capturable", False)

    def __call__(self, *call: Any) -> None:
        self.audit(*call[:5])
        self.launch(*call)


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
    """Launches, into new tensors where none were given. The launcher fills their padding with zeros."""
    if out is None:
        out = torch.empty(*q.shape[:2], cache.v_head_dim, dtype=default_out_dtype(q.dtype, options), device=q.device)
    part = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if lse else None
    launch(q, cache, batch, options, new, out, part)
    return out if part is None else (out, part)


_bound: dict[Any, tuple[Launch, ...]] = {}


def is_quick(rows: torch.Tensor, cache: KVCache, batch: Batch) -> bool:
    """Whether a call may go straight to the launcher of its kind: values are not looked at, and nothing else depends on them."""
    return (
        isinstance(rows, torch.Tensor)
        and rows.is_cuda
        and isinstance(cache, KVCache)
        and isinstance(batch, Batch)
        and not batch.copies
        and not rows.requires_grad
        and not is_watched()
    )


def reads_elsewhere(options: Options, q: torch.Tensor) -> bool:
    """Whether a scale lies on another device than the queries: it is read there, and becomes a number of this call alone."""
    for scale in (options.q_scale, options.out_scale):
        if isinstance(scale, torch.Tensor) and scale.device != q.device:
            return True
    return False


def are_apart(out: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether no other tensor lies in the same allocation as `out`. Others may still be apart, but that takes a closer look."""
    if not isinstance(out, torch.Tensor):
        return False
    mine = out.untyped_storage()
    first, last = mine.data_ptr(), mine.data_ptr() + mine.nbytes()
    for other in others:
        if other is None:
            continue
        theirs = other.untyped_storage()
        if theirs.data_ptr() < last and first < theirs.data_ptr() + theirs.nbytes():
            return False
    return True


def remember(bound: dict[Any, tuple[Launch, ...]], key: Any, *launches: Launch) -> None:
    """Keeps the launchers of a kind of call. What reads lengths on the host must be asked again: a graph may be recording then."""
    if key is not None and all(getattr(launch, "capturable", False) for launch in launches):
        if len(bound) >= MOST:
            bound.clear()
        bound[key] = launches


def capturing(tensor: torch.Tensor) -> bool:
    """Whether the current stream of a GPU is being captured into a graph."""
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_traced(rows: torch.Tensor) -> bool:
    """Whether a graph is made of this very call, or its tensors only stand for others: the call then becomes an operator of the
    graph. An operator that is run while torch compiles, here or in another thread, has real tensors."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return type(rows) is not torch.Tensor and (torch.compiler.is_compiling() or hasattr(rows, "fake_mode"))
