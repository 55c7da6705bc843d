"""Runs the rules over a call: all of them, always, or until the static ones show that values cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.contract import fast, validated
from quire.contract.call import Call
from quire.contract.rule import Check, Violation
from quire.contract.rules import CONTRACT
from quire.errors import ArgumentError, ContractError, describe
from quire.options import PLAIN, Options

Level = Literal["auto", "full"]
"""auto: static rules always; values in host memory, once per unchanged batch. full: values on any device, in every call."""

_STATIC: tuple[Check, ...] = tuple(find for rule in CONTRACT for find in rule.static)
_ASKED = tuple(find for find in _STATIC if find not in fast.COVERED)
_ASKED_VALUES = tuple(find for rule in CONTRACT for find in rule.values if find not in validated.COVERED)
"""Checks that neither the fast static check nor the native validation covers: they run in every call."""

_READ = ("page_table", "kv_lens", "q_starts", "slots", "positions", "mask", "causal", "k", "v", "new[0]", "new[1]", "copies")
"""The arguments whose values the rules read."""


class Watch(NamedTuple):
    """What is wanted of every operation of a thread or task, besides its result."""

    strict: bool
    """Whether the whole call is checked first."""
    recorder: Any = None
    """Who is told about calls: an object with the methods `around` and `refused`, or None."""


watching: ContextVar[Watch | None] = ContextVar("quire_watching", default=None)


def check(
    q: torch.Tensor | None,
    cache: KVCache,
    batch: Batch,
    options: Options | None = None,
    *,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> list[Violation]:
    """Every violation of the contract by this call, values included, in the order of the contract; an empty list if there is none.

    With `k` and `v` the write is checked too (`q` may be None then): together they are what `step` does. Nothing is written."""
    return violations(Call(cache, batch, q, PLAIN if options is None else options, new, out, k, v, slots), "full")


@contextmanager
def recorded_by(recorder: Any) -> Iterator[None]:
    """Within it every operation of this thread or task tells the recorder about its call."""
    watch = watching.get()
    with watched_by(Watch(watch is not None and watch.strict, recorder)):
        yield


@contextmanager
def watched_by(watch: Watch) -> Iterator[None]:
    """Within it this is what is wanted of every operation of this thread or task. Higher layers register their recorder here."""
    token = watching.set(watch)
    try:
        yield
    finally:
        watching.reset(token)


def is_watched() -> bool:
    """Whether the caller is within `checked()` or a recording."""
    return watching.get() is not None


def recording() -> Any:
    """Who is told about calls here; None if nobody is."""
    watch = watching.get()
    return None if watch is None else watch.recorder


def enforce_static(operation: str, call: Call) -> None:
    """Raises if shapes, types, devices or options alone break the contract, whatever the cache holds by now. Reads no value."""
    call.check_arguments()
    _enforce_given(operation, call)
    broken = [v for rule in CONTRACT if rule.id != "residency" for find in rule.static for v in find(call)]
    if broken:
        raise ContractError(operation, broken)


def _enforce_given(operation: str, call: Call) -> None:
    """Raises if what an operation is about is None."""
    if call.q is None and operation != "write":
        raise ArgumentError("q", None, "a tensor [tokens, q_heads, head_dim]")
    if not call.writes and operation in ("write", "step"):
        raise ArgumentError("k", None, "a tensor [tokens, kv_heads, head_dim]")


def violations(call: Call, level: Level) -> list[Violation]:
    """What a call breaks: the rules' answer. Raises if an argument is not even of the class that it should be."""
    call.check_arguments()
    found = {rule.id: [v for find in rule.static for v in find(call)] for rule in CONTRACT}
    # Values cannot be read through index tensors that are themselves not as they should be; anything else does not hide them.
    unreadable = any(v.rule in ("index-types", "devices") or v.argument in _READ for of_rule in found.values() for v in of_rule)
    if not unreadable and (level == "full" or call.cache.device.type == "cpu"):
        for rule in CONTRACT:
            found[rule.id] += [v for find in rule.values for v in find(call)]
    return [v for of_rule in found.values() for v in of_rule]


def enforce(operation: str, call: Call, level: Level) -> None:
    """Raises if the call breaks the contract. Low hints pass, except under `checked()`.

    The fast checks accept a legal call. The rules run only if those are not sure, and produce the messages."""
    watch = watching.get()
    values_were_read = False
    if watch is None and type(level) is str and level == "auto" and not _ASKED and fast.is_certainly_legal(call):
        if (call.q is not None or operation == "write") and (call.k is not None or operation == "attend"):
            if not call.cache.k_view.is_cpu or _values_are_certainly_legal(call, level):
                return
            values_were_read = True
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
    """Whether no rule is broken; False where only the rules can tell."""
    for find in _ASKED if fast.is_certainly_legal(call) else _STATIC:
        for _ in find(call):
            return False
    if not call.cache.k_view.is_cpu:
        return level == "auto"
    return _values_are_certainly_legal(call, level)


def _values_are_certainly_legal(call: Call, level: Level) -> bool:
    if not validated.are_certainly_legal(call, trust=level == "auto"):
        return False
    for find in _ASKED_VALUES:
        for violation in find(call):
            if not violation.harmless:
                return False
    return True
