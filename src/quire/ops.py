"""The operators `attend`, `write`, `step`, `rope_write` and `rope_step` of `torch.ops.quire`, for torch.compile and torch.export.

In a compiled function `quire.attend`, `quire.write` and `quire.step` call them, so that a model's step is one graph
(`fullgraph=True`). An operator takes the tensors and numbers that a cache, a batch and options consist of, rebuilds these objects,
and calls the ordinary function: checks, choice of kernel and results are the same. A program that only loads an exported graph must
import this module.

An `out` that is given is declared as mutated, as is the cache of a write. An operator returns `(out, lse)`, with an empty tensor in
place of an `out` that was given and of an LSE that was not requested.

State outside of tensors is not part of a graph: a batch with copies (apply them before) and a cache with a ledger are rejected, and
the pool's reference counts and stale batches are not checked. Inference only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from quire.attend import attend as plain_attend
from quire.batch import Batch
from quire.cache.format import FORMATS
from quire.cache.kv_cache import KVCache
from quire.cache.latent import as_given
from quire.cache.layout import LAYOUTS
from quire.cache.select import Select
from quire.contract.check import Level
from quire.errors import ArgumentError, describe
from quire.options import PLAIN, Options
from quire.problem import default_out_dtype
from quire.rope import Rope
from quire.step import step as plain_step
from quire.write import write as plain_write

_READ = "Tensor k_pages, Tensor? v_pages, Tensor? k_scale, Tensor? v_scale, str layout, str format, str v_format, int? v_in_k"
_WRITTEN = (
    "Tensor(k!) k_pages, Tensor(v!)? v_pages, Tensor(i!)? k_scale, Tensor(j!)? v_scale, str layout, str format, str v_format, "
    "int? v_in_k"
)
_BATCH = (
    "Tensor page_table, Tensor kv_lens, Tensor q_starts, Tensor? slots, SymInt? max_q_len, SymInt? max_kv_len, int[]? shard, "
    "Tensor? spans, Tensor? select_positions, Tensor? select_columns"
)


class OptionCodec(NamedTuple):
    """How a field of `Options` becomes arguments of an operator, and back."""

    schema: str
    flatten: Callable[[Options, str], tuple[Any, ...]]
    """(options, name of the field) -> arguments."""
    restore: Callable[..., Any]
    """Arguments -> value of the field."""


def _one_argument(options: Options, name: str) -> tuple[Any, ...]:
    return (getattr(options, name),)


def _number_or_tensor(options: Options, name: str) -> tuple[Any, ...]:
    value = getattr(options, name)
    return (None, value) if isinstance(value, torch.Tensor) else (value, None)


def _window_sides(options: Options, name: str) -> tuple[Any, ...]:
    return options.sides


_CODECS = {
    "bool": OptionCodec("bool {0}", _one_argument, lambda value: value),
    "float | None": OptionCodec("float? {0}", _one_argument, lambda value: value),
    "torch.Tensor | None": OptionCodec("Tensor? {0}", _one_argument, lambda value: value),
    "bool | torch.Tensor": OptionCodec("bool? {0}, Tensor? {0}_tensor", _number_or_tensor, lambda n, t: n if t is None else t),
    "Scalar": OptionCodec("float? {0}, Tensor? {0}_tensor", _number_or_tensor, lambda n, t: n if t is None else t),
    "Window": OptionCodec(
        "int? {0}_left, int? {0}_right", _window_sides, lambda left, right: None if left is right is None else (left, right)
    ),
}
"""By the annotation of the field."""
_OPTION_FIELDS = tuple((field.name, _CODECS[str(field.type)]) for field in fields(Options))
_OPTIONS = ", ".join(codec.schema.format(name) for name, codec in _OPTION_FIELDS)
_ROPE = (
    "Tensor cos, Tensor sin, bool interleaved, int[]? sections, bool sections_interleaved, Tensor? q_norm, Tensor? k_norm, "
    "float eps, bool unit_offset, Tensor? rope_positions"
)
_ROPE_FIELDS = tuple(field.name for field in fields(Rope))
_HOW = "str? kernel, str check, str? refused"
_INTO = "Tensor(o!)? out, bool lse"
_SCHEMAS = (
    f"attend(Tensor q, {_READ}, {_BATCH}, {_OPTIONS}, Tensor? new_k, Tensor? new_v, {_INTO}, {_HOW}) -> (Tensor, Tensor)",
    f"write(Tensor k, Tensor v, {_WRITTEN}, {_BATCH}, {_HOW}) -> ()",
    f"step(Tensor q, Tensor k, Tensor v, {_WRITTEN}, {_BATCH}, {_OPTIONS}, {_INTO}, {_HOW}) -> (Tensor, Tensor)",
    f"rope_write(Tensor? q, Tensor k, Tensor v, {_WRITTEN}, {_BATCH}, {_ROPE}, Tensor(o!)? q_out, {_HOW}) -> Tensor",
    f"rope_step(Tensor q, Tensor k, Tensor v, {_WRITTEN}, {_BATCH}, {_OPTIONS}, {_ROPE}, {_INTO}, {_HOW}) -> (Tensor, Tensor)",
)
_IN_ROPE = len(_ROPE_FIELDS)
_IN_CACHE, _IN_BATCH, _IN_OPTIONS = (text.count(",") + 1 for text in (_READ, _BATCH, _OPTIONS))

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


# Called in a compiled function: objects are flattened to arguments of an operator. Dynamo traces this code, so it only reads
# attributes.


def attend(
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options | None,
    new: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor | None,
    lse: bool | torch.Tensor,
    kernel: str | None,
    check: Level,
) -> Result:
    """`quire.attend` as an operator of a graph."""
    new_k, new_v = (None, None) if new is None else new
    parts = (*_of_cache(cache), *_of_batch(batch, batch.given_slots), *_of_options(options or PLAIN))
    logs, refused = lse is not False, _refused(cache, batch, q)
    return _returned(torch.ops.quire.attend(q, *parts, new_k, new_v, out, logs, kernel, check, refused), out, lse)


def write(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    slots: torch.Tensor | None,
    rotation: tuple[Any, ...] | None,
    kernel: str | None,
    check: Level,
) -> torch.Tensor | None:
    """`quire.write` as an operator of a graph. `rotation` has rope, q, q_out and positions."""
    if rotation is not None:
        return _rope_write(k, v, cache, batch, slots, *rotation, kernel, check)
    slots = batch.given_slots if slots is None else slots
    torch.ops.quire.write(k, v, *_of_cache(cache), *_of_batch(batch, slots), kernel, check, _refused(cache, batch))
    return None


def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options | None,
    out: torch.Tensor | None,
    lse: bool | torch.Tensor,
    kernel: str | None,
    check: Level,
) -> Result:
    """`quire.step` as an operator of a graph."""
    parts = (*_of_cache(cache), *_of_batch(batch, batch.given_slots), *_of_options(options or PLAIN))
    logs, refused = lse is not False, _refused(cache, batch, q)
    return _returned(torch.ops.quire.step(q, k, v, *parts, out, logs, kernel, check, refused), out, lse)


def _rope_write(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    slots: torch.Tensor | None,
    rope: Rope | None,
    q: torch.Tensor | None,
    q_out: torch.Tensor | None,
    positions: torch.Tensor | None,
    *how: Any,
) -> torch.Tensor | None:
    slots = batch.given_slots if slots is None else slots
    parts = (*_of_cache(cache), *_of_batch(batch, slots), *_of_rope(rope), positions)
    refused = _refused(cache, batch, k if q is None else q)
    if q_out is not None and q_out is q:
        # An operator may not take one tensor twice if it changes it. The clone keeps the padding rows.
        q_out = q.clone()
        torch.ops.quire.rope_write(q, k, v, *parts, q_out, *how, refused)
        return q.copy_(q_out)
    turned = torch.ops.quire.rope_write(q, k, v, *parts, q_out, *how, refused)
    return None if q is None else turned if q_out is None else q_out


def rope_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options | None,
    out: torch.Tensor | None,
    lse: bool | torch.Tensor,
    rope: Rope | None,
    *how: Any,
) -> Result:
    """`quire.step` with a rotation as an operator of a graph."""
    positions, *rest = how
    parts = (*_of_cache(cache), *_of_batch(batch, batch.given_slots), *_of_options(options or PLAIN), *_of_rope(rope), positions)
    made = torch.ops.quire.rope_step(q, k, v, *parts, out, lse is not False, *rest, _refused(cache, batch, q))
    return _returned(made, out, lse)


def _of_rope(rope: Rope | None) -> tuple[Any, ...]:
    if not isinstance(rope, Rope):
        raise ArgumentError("rope", describe(rope), "a quire.Rope: q, q_out and positions of a write belong to it")
    sections = None if rope.sections is None else list(rope.sections)
    norms = (rope.q_norm, rope.k_norm)
    return rope.cos, rope.sin, rope.interleaved, sections, rope.sections_interleaved, *norms, rope.eps, rope.unit_offset


def _refused(cache: KVCache, batch: Batch, q: torch.Tensor | None = None) -> str | None:
    """Why the operator must raise, or None. An error raised here would be hidden behind one of Dynamo's."""
    if cache.ledger is not None:
        return "ledger"
    if batch.copies:
        return "copies"
    if batch.prefixes is not None:
        return "prefixes"
    return "grad" if q is not None and q.requires_grad and torch.is_grad_enabled() else None


def _of_cache(cache: KVCache) -> tuple[Any, ...]:
    names = cache.layout.name, cache.k_format.name, cache.v_format.name
    if cache.v_in_k is not None:
        # An operator may not take memory twice if it changes it.
        return cache.k, None, cache.k_scale, None, *names, cache.v_in_k
    return cache.k, cache.v, cache.k_scale, cache.v_scale, *names, None


def _of_batch(batch: Batch, slots: torch.Tensor | None) -> tuple[Any, ...]:
    shard = None if batch.shard is None else list(batch.shard)
    select: tuple[Any, Any] = (None, None)
    if batch.select is not None:
        select = (batch.select.entries, None) if batch.select.kind == "positions" else (None, batch.select.entries)
    tensors = batch.page_table, batch.kv_lens, batch.q_starts, slots
    return *tensors, batch.max_q_len, batch.max_kv_len, shard, batch.spans, *select


def _of_options(options: Options) -> tuple[Any, ...]:
    parts: tuple[Any, ...] = ()
    for name, codec in _OPTION_FIELDS:
        parts += codec.flatten(options, name)
    return parts


def _returned(made: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor | None, lse: bool | torch.Tensor) -> Result:
    """The result of the function. An LSE buffer is filled by a copy that is part of the graph."""
    result = made[0] if out is None else out
    if lse is False:
        return result
    return (result, made[1]) if lse is True else (result, lse.copy_(made[1]))


# Called by an operator: the objects are rebuilt from its arguments.


_REFUSALS = {
    "ledger": (
        "cache",
        "a cache with a ledger, in a compiled function",
        "a cache without a ledger, or a call that is not compiled",
    ),
    "copies": (
        "copies",
        "a batch with copies, in a compiled function",
        "a batch without copies: call cache.copy_pages(batch.copies) before the compiled function",
    ),
    "prefixes": (
        "prefixes",
        "a batch with prefixes, in a compiled function",
        "batch.with_prefixes(None), or a call that is not compiled",
    ),
    "grad": ("q", "a tensor that requires grad", "inference only: call under torch.no_grad() or detach it"),
}


def _refuse(refused: str | None) -> None:
    if refused is not None:
        raise ArgumentError(*_REFUSALS[refused])


def _cache(
    k: torch.Tensor, v: Any, k_scale: Any, v_scale: Any, layout: str, k_format: str, v_format: str, v_in_k: int | None
) -> KVCache:
    formats = (FORMATS[k_format], FORMATS[v_format])
    if v_in_k is not None:
        v = k[..., : formats[0].units_of(v_in_k)]
    cache = KVCache(k, v, LAYOUTS[layout], formats, k_scale, v_scale, None, False, v_in_k is not None)
    cache.check_memory()
    return cache


def _batch(*arguments: Any) -> Batch:
    page_table, kv_lens, q_starts, slots, max_q_len, max_kv_len, shard, spans, positions, columns = arguments
    select = None if positions is None and columns is None else Select(positions=positions, columns=columns)
    hints = {"max_q_len": max_q_len, "max_kv_len": max_kv_len}
    return Batch(page_table, kv_lens, q_starts, slots=slots, **hints, shard=shard, spans=spans, select=select)


def _options(*arguments: Any) -> Options:
    return Options(**dict(_restored(arguments)))


def _restored(arguments: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    at = 0
    for name, codec in _OPTION_FIELDS:
        end = at + codec.schema.count(",") + 1
        yield name, codec.restore(*arguments[at:end])
        at = end


def _split(
    parts: tuple[Any, ...], in_options: int = _IN_OPTIONS
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Splits arguments into those of the cache, of the batch, of the options, and the rest."""
    batch, options = _IN_CACHE, _IN_CACHE + _IN_BATCH
    end = options + in_options
    return parts[:batch], parts[batch:options], parts[options:end], parts[end:]


def _attend(q: torch.Tensor, *parts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cache, batch, options, (new_k, new_v, out, lse, kernel, check, refused) = _split(parts)
    _refuse(refused)
    made = _cache(*cache)
    new = None if new_k is None else (new_k, new_v if made.v_in_k is None else None)
    result = plain_attend(q, made, _batch(*batch), _options(*options), new=new, out=out, lse=lse, kernel=kernel, check=check)
    return _made(q, out, result)


def _write(k: torch.Tensor, v: torch.Tensor, *parts: Any) -> None:
    cache, batch, (kernel, check, refused), _ = _split(parts)
    _refuse(refused)
    made = _cache(*cache)
    plain_write(*as_given(k, v, made), made, _batch(*batch), kernel=kernel, check=check)


def _step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *parts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cache, batch, options, (out, lse, kernel, check, refused) = _split(parts)
    _refuse(refused)
    made = _cache(*cache)
    how: dict[str, Any] = {"out": out, "lse": lse, "kernel": kernel, "check": check}
    return _made(q, out, plain_step(q, *as_given(k, v, made), made, _batch(*batch), _options(*options), **how))


def _rope(arguments: tuple[Any, ...]) -> Rope:
    return Rope(**dict(zip(_ROPE_FIELDS, arguments)))


def _run_rope_write(q: Any, k: torch.Tensor, v: torch.Tensor, *parts: Any) -> torch.Tensor:
    cache, batch, _, rest = _split(parts, 0)
    (positions, q_out, kernel, check, refused), rope = rest[_IN_ROPE:], _rope(rest[:_IN_ROPE])
    _refuse(refused)
    how = {"rope": rope, "q": q, "q_out": q_out, "positions": positions}
    made = _cache(*cache)
    turned = plain_write(*as_given(k, v, made), made, _batch(*batch), **how, kernel=kernel, check=check)
    return k.new_empty(0) if turned is None or q_out is not None else turned


def _run_rope_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *parts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cache, batch, options, rest = _split(parts)
    (positions, out, lse, kernel, check, refused), rope = rest[_IN_ROPE:], _rope(rest[:_IN_ROPE])
    _refuse(refused)
    how: dict[str, Any] = {"out": out, "lse": lse, "rope": rope, "positions": positions, "kernel": kernel, "check": check}
    made = _cache(*cache)
    return _made(q, out, plain_step(q, *as_given(k, v, made), made, _batch(*batch), _options(*options), **how))


def _made(q: torch.Tensor, out: torch.Tensor | None, result: Result) -> tuple[torch.Tensor, torch.Tensor]:
    result, lse = result if isinstance(result, tuple) else (result, q.new_empty(0, dtype=torch.float32))
    return (result if out is None else q.new_empty(0)), lse


# Shape and type of the results, for tracing.


def _fake_attend(q: torch.Tensor, *parts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cache, _, options, (_, _, out, lse, *_) = _split(parts)
    return _fake(q, _cache(*cache), _options(*options), out, lse)


def _fake_write(k: torch.Tensor, v: torch.Tensor, *parts: Any) -> None:
    return None


def _fake_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *parts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cache, _, options, (out, lse, *_) = _split(parts)
    return _fake(q, _cache(*cache), _options(*options), out, lse)


def _fake(
    q: torch.Tensor, cache: KVCache, options: Options, out: torch.Tensor | None, lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    made = q.new_empty(0)
    if out is None:
        made = q.new_empty((*q.shape[:2], cache.v_head_dim), dtype=default_out_dtype(q.dtype, options.out_scale is not None))
    return made, q.new_empty(q.shape[:2] if lse else 0, dtype=torch.float32)


def _fake_rope_write(q: Any, k: torch.Tensor, v: torch.Tensor, *parts: Any) -> torch.Tensor:
    q_out = _split(parts, 0)[3][_IN_ROPE + 1]
    return k.new_empty(0) if q is None or q_out is not None else q.new_empty(q.shape)


def _fake_rope_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *parts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cache, _, options, rest = _split(parts)
    _, out, lse, *_ = rest[_IN_ROPE:]
    return _fake(q, _cache(*cache), _options(*options), out, lse)


# Not the decorator `torch.library.custom_op`, which adds tens of microseconds to every call.
_RUN: tuple[Callable[..., Any], ...] = (_attend, _write, _step, _run_rope_write, _run_rope_step)
_TRACE: tuple[Callable[..., Any], ...] = (_fake_attend, _fake_write, _fake_step, _fake_rope_write, _fake_rope_step)
_library = torch.library.Library("quire", "DEF")
for _schema, _run, _trace in zip(_SCHEMAS, _RUN, _TRACE):
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # not differentiable: results never require grad
    torch.library.register_fake(f"quire::{_name}", _trace, lib=_library)
