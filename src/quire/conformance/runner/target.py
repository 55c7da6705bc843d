"""A target: the function under test, which writes the output of a call or the cache, and its declared limits.

The signature of an adapter, a function in any file (`quire conform my_kernel.py:attention`):

    def attention(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, ...):

takes its arguments by name, and either writes `out` or returns the output, or the pair of output and LSE. It may declare more
arguments: `window, alibi, sinks, causal, mask, positions, k_scale, v_scale, q_scale, new_k, new_v, shard, spans, select_positions,
select_columns, lse, layout, format, max_q_len, max_kv_len` and the other names in `OPTIONAL`, all as in `KernelCall`. A feature
that the function has no argument for is one it does not support: cases with it are skipped. The module's `SUPPORTS` declares
further limits. It is a dict from a field of `quire.Problem` or `quire.Extent` to the allowed values, or to a function that returns
whether a value is allowed:

    SUPPORTS = {"q_dtype": ("fp16", "bf16"), "page_size": (16, 32), "head_dim": lambda n: n % 8 == 0, "max_q_len": range(0, 2)}

`"contiguous": (True,)` declares that queries, page table and new tokens must not be views of wider tensors.

A function with an argument `k` is a write. It takes `k, v, k_pages, v_pages`, and `slots` or `page_table, kv_lens, q_starts`, all
as in `WriteCall`, and may declare more: the names in `OPTIONAL_OF_WRITES`.

    def write(*, k, v, k_pages, v_pages, slots, ...):

It stores k and v in the pages, and writes `q_out` or returns the rotated queries, if it takes `q`.

Beyond such a limit the function is still called, and must raise or be correct. With `REFUSES = False` it is not called there: those
cases are skipped.
"""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import quire
from quire.cache.latent import rows_to_write
from quire.conformance.cases.call import OPTIONAL_ARGUMENTS, KernelCall
from quire.conformance.cases.write_call import WriteCall
from quire.contract.call import Call
from quire.errors import ArgumentError
from quire.launch import described
from quire.problem import FIELDS, Extent, Problem
from quire.slot_batch import slots_batch

NEEDED = ("q", "k_pages", "v_pages", "page_table", "kv_lens", "q_starts", "out", "scale")
INDISPENSABLE = NEEDED[:6]
"""Without these the keys of a sequence cannot be found. A function may do without `out` and `scale`: it may return its output."""
OPTIONAL = (*OPTIONAL_ARGUMENTS, "prefixes", "lse", "layout", "format", "max_q_len", "max_kv_len")
NEEDED_OF_WRITES = ("k", "v", "k_pages", "v_pages")
PLACES = ("page_table", "kv_lens", "q_starts")
"""What tells where tokens go, besides `slots`."""
OPTIONAL_OF_WRITES = (
    *("slots", *PLACES, "k_scale", "v_scale", "layout", "format", "v_format", "v_in_k", "hadamard"),
    *("cos", "sin", "positions", "interleaved", "q", "q_out", "k_norm", "q_norm", "eps", "unit_offset"),
)
EXTENT = Extent._fields
LIMITED = (*FIELDS, *EXTENT, "contiguous")
"""The keys that `SUPPORTS` may have."""

Limit = tuple[Any, ...] | range | Callable[[Any], bool]


@dataclass(frozen=True)
class Target:
    """One function under test."""

    name: str
    run: Callable[[Any], None]
    """Writes `call.out`, and `call.lse` where it is not None, or what a `WriteCall` stores; raises any exception for a call that it
    refuses."""
    device: str = "cpu"
    limits: Callable[[Any], str | None] = lambda call: None
    """Why a call is beyond what the target declares to support; None if it is not."""
    missing: Callable[[Any], str | None] = lambda call: None
    """Which part of a call the target has no argument for: such a call cannot be made at all."""
    refuses: bool = True
    """Whether it may be called beyond its limits: it must then raise or be correct."""
    version: str = ""
    runs_on: str = ""
    """The device of a target that runs in a subprocess (`quire.conformance.runner.subprocess_target`)."""
    operation: str = "attend"
    """attend or write: which cases it is run on."""


class Failure(Exception):
    """What a target did instead of returning: `raises`, `crashes` or `hangs`, and the line of its source."""

    def __init__(self, message: str, fault: str = "raises", at: str = ""):
        self.fault, self.at = fault, at
        super().__init__(message)

    @classmethod
    def of(cls, error: Exception) -> Failure:
        if isinstance(error, cls):
            return error
        frames = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))]
        return cls(f"{type(error).__name__}: {error}".split("\n")[0][:300], at=frame_at(frames))


def frame_at(frames: Sequence[tuple[str, int]]) -> str:
    """The innermost of these frames, innermost first, that is not of Python, an installed package or Quire: `file.py:12`."""
    home = str(Path(quire.__file__).parent)
    foreign = [(file, line) for file, line in frames if not file.startswith((home, *_LIBRARIES, "<"))]
    return f"{Path(foreign[0][0]).name}:{foreign[0][1]}" if foreign else ""


_LIBRARIES = tuple(dict.fromkeys(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")))


def is_lost(error: str) -> bool:
    """Whether an error message means that the device is lost: after an illegal access every further call on it fails."""
    return any(words in error for words in ("CUDA error", "HIP error", "device-side assert"))


def wrap(
    function: Callable[..., Any],
    name: str,
    device: str = "cpu",
    supports: dict[str, Limit] | None = None,
    refuses: bool = True,
    version: str = "",
) -> Target:
    """A plain function of the documented signature as a target."""
    is_write = "k" in inspect.signature(function).parameters
    made = (WriteAdapter if is_write else AttentionAdapter)(function, name, supports or {})
    return Target(name, made.run, device, made.limits, made.missing, refuses, version, operation="write" if is_write else "attend")


class _Adapter:
    """A function that takes a call's tensors by name."""

    needed: tuple[str, ...]
    optional: tuple[str, ...]
    indispensable: tuple[str, ...]

    def __init__(self, function: Callable[..., Any], name: str, supports: dict[str, Limit]):
        parameters = inspect.signature(function).parameters
        anything, known = any(p.kind is p.VAR_KEYWORD for p in parameters.values()), (*self.needed, *self.optional)
        self.function, self.supports = function, supports
        self.takes = {n for n in known if n in parameters or anything}
        required = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        strange = [n for n in required if n not in known or parameters[n].kind is inspect.Parameter.POSITIONAL_ONLY]
        if strange:
            raise ArgumentError(name, f"arguments {', '.join(strange)}", f"by name: {', '.join(known)}")
        absent = [n for n in self.indispensable if n not in self.takes]
        if absent:
            given = ", ".join(parameters) or "none"
            raise ArgumentError(name, f"a function of the arguments {given}", f"one that also takes {', '.join(absent)}, by name")
        for key in supports:
            if key not in LIMITED:
                raise ArgumentError("SUPPORTS", key, ", ".join(LIMITED))

    def called(self, call: Any) -> tuple[Any, ...]:
        """Calls the function, and returns its results."""
        result = self.function(**{n: getattr(call, n) for n in self.takes})
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def missing(self, call: Any) -> str | None:
        """Which part of a call the function has no argument for."""
        lacks = [n for n, present in call.features.items() if present and n not in self.takes]
        if call.layout != "nhd" and "layout" not in self.takes and "layout" not in self.supports:
            lacks.append(f"layout {call.layout}")
        if call.k_pages.dtype is torch.uint8 and "format" not in self.takes:
            lacks.append("format")
        return f"no argument for {', '.join(lacks)}" if lacks else None

    def limits(self, call: Any) -> str | None:
        """The first limit in `SUPPORTS` that a call is beyond."""
        problem, extent = facts(call), extent_of(call)
        for key, limit in self.supports.items():
            value = is_contiguous(call) if key == "contiguous" else getattr(extent if key in EXTENT else problem, key)
            if not (limit(value) if callable(limit) else value in limit):
                return f"{key} = {value}"
        return None


class AttentionAdapter(_Adapter):
    """A function that attends."""

    needed, optional, indispensable = NEEDED, OPTIONAL, INDISPENSABLE

    def run(self, call: KernelCall) -> None:
        """Calls the function, and copies what it returns, if anything, into the buffers of the call."""
        parts = self.called(call)
        if call.lse is not None and "lse" not in self.takes and len(parts) < 2:
            call.lse = None  # it returns no LSE: only the output is compared
        for buffer, part in zip((call.out, call.lse), parts):
            if buffer is not None and part is not None:
                _copy_result(part, buffer, call.live)


class WriteAdapter(_Adapter):
    """A function that writes."""

    needed, optional, indispensable = NEEDED_OF_WRITES, OPTIONAL_OF_WRITES, NEEDED_OF_WRITES

    def __init__(self, function: Callable[..., Any], name: str, supports: dict[str, Limit]):
        super().__init__(function, name, supports)
        if "slots" not in self.takes and not self.takes.issuperset(PLACES):
            given = f"a write of the arguments {', '.join(inspect.signature(function).parameters)}"
            raise ArgumentError(name, given, f"one that also takes slots, or {', '.join(PLACES)}")

    def run(self, call: WriteCall) -> None:
        """Calls the function, and copies the queries that it returns, if any, into the buffer of the call."""
        rotated = self.called(call)[0]
        if call.q_out is not None and rotated is not None:
            _copy_result(rotated, call.q_out, call.live)


def _copy_result(part: torch.Tensor, buffer: torch.Tensor, live: int) -> None:
    if part.shape[1:] != buffer.shape[1:] or not part.shape or part.shape[0] < live:
        raise ArgumentError("result", f"a tensor of shape {list(part.shape)}", f"one of shape {list(buffer.shape)}")
    if part.data_ptr() != buffer.data_ptr():
        buffer[:live] = part[:live].to(buffer.dtype)


def facts(call: KernelCall | WriteCall) -> Problem:
    """The problem of a call: everything that a kernel is compiled for."""
    if isinstance(call, WriteCall):
        return described("write", _contract_call(call))[0]
    lse = call.lse is not None
    new = None if call.new_k is None or call.new_v is None else (call.new_k, call.new_v)
    return described("attend", Call(call.cache(), call.batch(), call.q, call.options(), new, call.out, with_lse=lse))[0]


def _contract_call(call: WriteCall) -> Call:
    cache, batch = call.cache(), call.batch()
    keys, values = rows_to_write(call.k, call.v, cache)
    made = Call(cache, slots_batch(call.tokens, call.slots) if batch is None else batch, k=keys, v=values, slots=call.slots)
    made.rope, made.q_in, made.q_out = call.rope(), call.q, call.q_out
    return made


def extent_of(call: KernelCall | WriteCall) -> Extent:
    """The size of a call's batch, from its lengths on the device."""
    if isinstance(call, WriteCall):
        return Extent(call.case.seqs, call.tokens, max(call.case.q_lens, default=0), max(call.case.kv_lens, default=0))
    q_len, kv_len = (int(t.max()) if t.numel() else 0 for t in (call.q_starts.diff(), call.kv_lens))
    return Extent(call.seqs, call.q.shape[0], q_len, kv_len)


def is_contiguous(call: KernelCall | WriteCall) -> bool:
    """Whether queries, page table and new tokens are contiguous: in an engine they may be views of wider tensors."""
    new = (call.k, call.v) if isinstance(call, WriteCall) else (call.new_k, call.new_v)
    return all(t.is_contiguous() for t in (call.q, call.page_table, *new) if t is not None)
