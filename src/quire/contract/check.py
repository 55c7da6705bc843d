"""Checks a call against the rules of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.cache.latent import Keys, rows_to_write, with_values
from quire.contract import fast, validated
from quire.contract.call import Call
from quire.contract.rule import Check, Violation
from quire.contract.rules import CONTRACT
from quire.errors import ArgumentError, ContractError, describe
from quire.keywords import with_pointers
from quire.options import PLAIN, Options
from quire.rope import Rope

Level = Literal["auto", "full"]
"""auto: static rules always; values in host memory, once per unchanged batch. full: values on any device, in every call."""

_STATIC: tuple[Check, ...] = tuple(find for rule in CONTRACT for find in rule.static)
_UNCOVERED = tuple(find for find in _STATIC if find not in fast.COVERED)
_UNCOVERED_VALUES = tuple(find for rule in CONTRACT for find in rule.values if find not in validated.COVERED)
"""Checks that neither the fast static check nor the native validation covers: they run in every call."""

_READ = (
    *("page_table", "kv_lens", "q_starts", "slots", "spans", "positions", "mask", "causal", "k", "v"),
    *("new[0]", "new[1]", "copies", "select.positions", "select.columns"),
)
"""The arguments whose values the value checks read."""


class Watch(NamedTuple):
    """How the operations of a thread or task are observed: strict checks, and a recorder."""

    strict: bool
    """Whether the full check runs before every call."""
    recorder: Any = None
    """An object with the methods `around` and `refused` that records calls, or None."""
    quantisation: bool = False
    """Whether writes warn of elements that saturate or underflow."""


watching: ContextVar[Watch | None] = ContextVar("quire_watching", default=None)


@with_pointers
def check(
    q: torch.Tensor | None,
    cache: KVCache,
    batch: Batch,
    options: Options | None = None,
    *,
    new: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    out: torch.Tensor | None = None,
    k: Keys | None = None,
    v: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    rope: Rope | None = None,
    positions: torch.Tensor | None = None,
) -> list[Violation]:
    """Checks a call against all rules of the contract, including values on any device. Nothing is computed or written.

    Args:
        q, cache, batch, options, new, out: The arguments of `quire.attend`. `q` may be None to check a write only.
        k, v, slots, rope, positions: The arguments of `quire.write`. Together with `q` they are the arguments of `quire.step`.

    Returns:
        All violations, in the order of the contract; an empty list if there are none. Those with `harmless=True` do not stop a
        call.

    Raises:
        ArgumentError: An argument has the wrong class, for example a list instead of a tensor.
        StaleBatch: The batch's pool has changed since.

    Example:
        >>> import torch, quire
        >>> pool = quire.PagePool(pages=4, page_size=4)
        >>> cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8)
        >>> batch = pool.step({pool.sequence(): 6})
        >>> q = torch.zeros(6, 1, 8, dtype=torch.bfloat16)
        >>> quire.check(q, cache, batch)
        []
        >>> batch.kv_lens[0] = 5
        >>> print(quire.check(q, cache, batch)[0].allowed)
        6 or more: the sequence has 6 new tokens, and they are among its keys
    """
    keys, values = (None, None) if k is None and v is None else rows_to_write(k, v, cache)
    given = with_values(new, cache)
    call = Call(cache, batch, q, PLAIN if options is None else options, given, out, keys, values, slots)
    call.rope, call.q_in, call.rope_positions = rope, None if rope is None else q, positions
    return violations(call, "full")


@contextmanager
def recorded_by(recorder: Any) -> Iterator[None]:
    """A context in which the recorder receives every call of this thread or task."""
    watch = watching.get()
    with watched_by(Watch(False, recorder) if watch is None else watch._replace(recorder=recorder)):
        yield


@contextmanager
def watched_by(watch: Watch) -> Iterator[None]:
    """A context in which the operations of this thread or task are observed."""
    token = watching.set(watch)
    try:
        yield
    finally:
        watching.reset(token)


def warns_of_quantisation() -> bool:
    """Whether writes of this thread or task warn of what they lose."""
    watch = watching.get()
    return watch is not None and watch.quantisation


def is_watched() -> bool:
    """Whether the caller is within `checked()` or a recording."""
    return watching.get() is not None


def recording() -> Any:
    """The recorder of the current context, or None."""
    watch = watching.get()
    return None if watch is None else watch.recorder


def enforce_static(operation: str, call: Call) -> None:
    """Raises if shapes, types, devices or options violate the contract, independent of what the cache contains. Reads no value."""
    call.check_arguments()
    _enforce_given(operation, call)
    broken = [v for rule in CONTRACT if rule.id != "residency" for find in rule.static for v in find(call)]
    if broken:
        raise ContractError(operation, broken)


def _enforce_given(operation: str, call: Call) -> None:
    """Raises if a required tensor of the operation is None."""
    if call.q is None and operation != "write":
        raise ArgumentError("q", None, "a tensor [tokens, q_heads, head_dim]")
    if not call.writes and operation in ("write", "step"):
        raise ArgumentError("k", None, "a tensor [tokens, kv_heads, head_dim]")


def violations(call: Call, level: Level) -> list[Violation]:
    """All violations of a call. Raises ArgumentError if an argument has the wrong class."""
    call.check_arguments()
    found = {rule.id: [v for find in rule.static for v in find(call)] for rule in CONTRACT}
    # If an index tensor has a wrong type, device or shape, values cannot be read. Other violations do not hide those of values.
    unreadable = any(v.rule in ("index-types", "devices") or v.argument in _READ for of_rule in found.values() for v in of_rule)
    if not unreadable and (level == "full" or call.cache.device.type == "cpu"):
        for rule in CONTRACT:
            found[rule.id] += [v for find in rule.values for v in find(call)]
    return [v for of_rule in found.values() for v in of_rule]


def enforce(operation: str, call: Call, level: Level) -> None:
    """Raises if the call violates the contract. Hints that are too low are accepted, except under `checked()`.

    The fast checks accept a legal call. The rules run only if the fast checks cannot decide, and produce the messages."""
    watch = watching.get()
    values_were_read = False
    if watch is None and type(level) is str and level == "auto" and not _UNCOVERED and fast.is_certainly_legal(call):
        if (call.q is not None or operation == "write") and (call.k is not None or operation == "attend"):
            if not call.cache.k_view.is_cpu or _values_are_certainly_legal(call, level):
                return
            values_were_read = True
    _enforce_rules(operation, call, level, watch, values_were_read)


def _enforce_rules(operation: str, call: Call, level: Level, watch: Watch | None, values_were_read: bool) -> None:
    """The slow path of `enforce`, for calls that the fast checks did not accept."""
    if not isinstance(level, str) or (level != "auto" and level != "full"):
        raise ArgumentError("check", describe(level), "'auto' or 'full'")
    call.check_arguments()
    _enforce_given(operation, call)
    strict = watch is not None and watch.strict
    if not strict and not values_were_read and _is_certainly_legal(call, level):
        return
    broken = [v for v in violations(call, "full" if strict else level) if strict or not v.harmless]
    if broken:
        if watch is not None and watch.recorder is not None:
            watch.recorder.refused(operation, call, broken)
        raise ContractError(operation, broken)


def _is_certainly_legal(call: Call, level: Level) -> bool:
    """Whether the fast checks find the call legal; False if only the rules can decide."""
    for find in _UNCOVERED if fast.is_certainly_legal(call) else _STATIC:
        for _ in find(call):
            return False
    if not call.cache.k_view.is_cpu:
        return level == "auto"
    return _values_are_certainly_legal(call, level)


def _values_are_certainly_legal(call: Call, level: Level) -> bool:
    if not validated.are_certainly_legal(call, trust=level == "auto"):
        return False
    for find in _UNCOVERED_VALUES:
        for violation in find(call):
            if not violation.harmless:
                return False
    return True
