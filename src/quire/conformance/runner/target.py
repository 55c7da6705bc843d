"""What is put to the test: a function that writes the output of a call, and what it says about its own limits.

The signature of an adapter, whose one function may live in any file (`quire conform my_kernel.py:attention`):

    def attention(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, ...):

takes its arguments by name, and either writes `out` or returns the output, or the pair of output and LSE. It may ask for more, by
naming it: `window, alibi, sinks, causal, mask, positions, k_scale, v_scale, q_scale, new_k, new_v, lse, layout, format, max_q_len,
max_kv_len` and the other names in `OPTIONAL`, all as in `KernelCall`. A feature that the function has no
argument for is one it does not support: those cases are left out. So are those beyond the limits in the module's `SUPPORTS`, a
dict from a field of `quire.Problem` or `quire.Extent` to the values allowed, or to a function that says whether a value is:

    SUPPORTS = {"q_dtype": ("fp16", "bf16"), "page_size": (16, 32), "head_dim": lambda n: n % 8 == 0, "max_q_len": range(0, 2)}

`"contiguous": (True,)` among them says that queries, page table and new tokens must not be parts of wider tensors.

Where such a limit is declared, the function is still called beyond it, and must raise or be right. `REFUSES = False` says that it
must not be called there.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import quire
from quire.conformance.cases.call import OPTIONAL_ARGUMENTS, KernelCall
from quire.contract.call import Call
from quire.dispatch.catalogue import CATALOGUE
from quire.errors import ArgumentError
from quire.launch import described
from quire.problem import FIELDS, Extent, Problem

NEEDED = ("q", "k_pages", "v_pages", "page_table", "kv_lens", "q_starts", "out", "scale")
INDISPENSABLE = NEEDED[:6]
"""Without these nobody can find the keys of a sequence; a function may return its output, and know its scale."""
OPTIONAL = (*OPTIONAL_ARGUMENTS, "lse", "layout", "format", "max_q_len", "max_kv_len")
EXTENT = Extent._fields
LIMITED = (*FIELDS, *EXTENT, "contiguous")
"""What `SUPPORTS` may be about."""

Limit = tuple[Any, ...] | range | Callable[[Any], bool]


@dataclass(frozen=True)
class Target:
    """One function under test."""

    name: str
    run: Callable[[KernelCall], None]
    """Writes `call.out`, and `call.lse` where it is not None; raises what it likes for input that it refuses."""
    device: str = "cpu"
    limits: Callable[[KernelCall], str | None] = lambda call: None
    """Why a call is beyond what the target declares to support; None if it is not."""
    missing: Callable[[KernelCall], str | None] = lambda call: None
    """Which part of a call the target has no argument for: such a call cannot be made at all."""
    refuses: bool = True
    """Whether it may be called beyond its limits: it must then raise or be right."""
    version: str = ""
    runs_on: str = ""
    """Its own device, where it has a process of its own (`quire.conformance.runner.subprocess_target`)."""


class Failure(Exception):
    """What a target did instead of answering: `raises`, `crashes` or `hangs`, and the place in its source."""

    def __init__(self, said: str, fault: str = "raises", at: str = ""):
        self.fault, self.at = fault, at
        super().__init__(said)

    @classmethod
    def of(cls, error: Exception) -> Failure:
        if isinstance(error, cls):
            return error
        frames = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))]
        return cls(f"{type(error).__name__}: {error}".split("\n")[0][:300], at=frame_at(frames))


def frame_at(frames: Sequence[tuple[str, int]]) -> str:
    """The innermost of these frames, innermost first, that is neither Python's, torch's nor Quire's: `file.py:12`."""
    home = str(Path(quire.__file__).parent)
    foreign = [(file, line) for file, line in frames if not file.startswith((home, *_LIBRARIES, "<"))]
    return f"{Path(foreign[0][0]).name}:{foreign[0][1]}" if foreign else ""


_LIBRARIES = tuple(dict.fromkeys(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")))


def is_lost(error: str) -> bool:
    """Whether a device is lost: after an illegal access every further call on it fails."""
    return any(words in error for words in ("CUDA error", "HIP error", "device-side assert"))


def find(text: str, device: str | None = None) -> Target:
    """A target by its name: one of our kernels, a peer, or `file.py:function` or `package.module:function`."""
    if is_ours(text):
        return ours(text, device)
    from quire.conformance import targets

    if text in targets.TARGETS:
        return targets.load(text, device)
    if ":" in text:
        return adapter(text, device)
    known = ", ".join((*OURS, *targets.TARGETS))
    raise ArgumentError("target", text, f"{known}, or file.py:function")


OURS = ("cpu", *(kernel.name for kernel in CATALOGUE if kernel.operation == "attend"))


def is_ours(text: str) -> bool:
    """Whether a target is a kernel of Quire's."""
    return text in OURS


def ours(name: str, device: str | None = None) -> Target:
    """One of our kernels, through the operator; `cpu` is what a CPU runs by itself."""
    device = device or ("cpu" if name in ("cpu", "torch", "native") else "cuda")
    kernel = None if name == "cpu" else name

    def run(call: KernelCall) -> None:
        arguments = call.q, call.cache(), call.batch(), call.options()
        if call.lse is None:
            quire.attend(*arguments, new=call.new, out=call.out, kernel=kernel)
        else:
            _, lse = quire.attend(*arguments, new=call.new, out=call.out, lse=True, kernel=kernel)
            call.lse[: call.live] = lse[: call.live]

    def limits(call: KernelCall) -> str | None:
        if kernel is None:
            return None
        decision = quire.explain(
            call.q, call.cache(), call.batch(), call.options(), new=call.new, out=call.out, lse=call.lse is not None
        )
        refusals = [
            str(finding)
            for found, findings in decision.candidates
            if found.name == kernel
            for finding in findings
            if not finding.holds
        ]
        return "; ".join(refusals) or None

    return Target(name, run, device, limits, version=quire.__version__)


def adapter(text: str, device: str | None = None) -> Target:
    """A function of anybody's, by file and name."""
    where, _, name = text.rpartition(":")
    module = _module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise ArgumentError("target", text, f"a function that {where} has: {', '.join(_functions(module)) or 'it has none'}")
    wish = getattr(module, "DEVICE", "cpu")
    return wrap(
        function, text, device or wish, getattr(module, "SUPPORTS", None), getattr(module, "REFUSES", True), _version(module)
    )


def wrap(
    function: Callable[..., Any],
    name: str,
    device: str = "cpu",
    supports: dict[str, Limit] | None = None,
    refuses: bool = True,
    version: str = "",
) -> Target:
    """A plain function of the documented signature as a target."""
    made = _Adapter(function, name, supports or {})
    return Target(name, made.run, device, made.limits, made.missing, refuses, version)


class _Adapter:
    """A function that takes a call's tensors by name."""

    def __init__(self, function: Callable[..., Any], name: str, supports: dict[str, Limit]):
        parameters = inspect.signature(function).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.function, self.supports = function, supports
        self.takes = {n for n in (*NEEDED, *OPTIONAL) if n in parameters or anything}
        required = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        strange = [n for n in required if n not in (*NEEDED, *OPTIONAL) or parameters[n].kind is inspect.Parameter.POSITIONAL_ONLY]
        if strange:
            raise ArgumentError(name, f"arguments {', '.join(strange)}", f"by name: {', '.join((*NEEDED, *OPTIONAL))}")
        absent = [n for n in INDISPENSABLE if n not in self.takes]
        if absent:
            given = ", ".join(parameters) or "none"
            raise ArgumentError(name, f"a function of the arguments {given}", f"one that also takes {', '.join(absent)}, by name")
        for key in supports:
            if key not in LIMITED:
                raise ArgumentError("SUPPORTS", key, ", ".join(LIMITED))

    def run(self, call: KernelCall) -> None:
        """Calls the function, and puts what it returns, if anything, into the buffers of the call."""
        result = self.function(**{n: getattr(call, n) for n in self.takes})
        parts = result if isinstance(result, (tuple, list)) else (result,)
        if call.lse is not None and "lse" not in self.takes and len(parts) < 2:
            call.lse = None  # it gives none: the output alone is judged
        for buffer, part in zip((call.out, call.lse), parts):
            if buffer is not None and part is not None:
                _copy_result(part, buffer, call.live)

    def missing(self, call: KernelCall) -> str | None:
        """Which part of a call the function has no argument for."""
        lacks = [n for n, present in call.features.items() if present and n not in self.takes]
        if call.layout != "nhd" and "layout" not in self.takes and "layout" not in self.supports:
            lacks.append(f"layout {call.layout}")
        if call.k_pages.dtype is torch.uint8 and "format" not in self.takes:
            lacks.append("format")
        return f"no argument for {', '.join(lacks)}" if lacks else None

    def limits(self, call: KernelCall) -> str | None:
        """The first limit in `SUPPORTS` that a call is beyond."""
        problem, extent = facts(call), extent_of(call)
        for key, limit in self.supports.items():
            value = is_contiguous(call) if key == "contiguous" else getattr(extent if key in EXTENT else problem, key)
            if not (limit(value) if callable(limit) else value in limit):
                return f"{key} = {value}"
        return None


def _copy_result(part: torch.Tensor, buffer: torch.Tensor, live: int) -> None:
    if part.shape[1:] != buffer.shape[1:] or not part.shape or part.shape[0] < live:
        raise ArgumentError("result", f"a tensor of shape {list(part.shape)}", f"one of shape {list(buffer.shape)}")
    if part.data_ptr() != buffer.data_ptr():
        buffer[:live] = part[:live].to(buffer.dtype)


def facts(call: KernelCall) -> Problem:
    """What a kernel could be compiled for."""
    lse = call.lse is not None
    return described("attend", Call(call.cache(), call.batch(), call.q, call.options(), call.new, call.out, with_lse=lse))[0]


def extent_of(call: KernelCall) -> Extent:
    """How large a call's batch is, by its true lengths."""
    q_len, kv_len = (int(t.max()) if t.numel() else 0 for t in (call.q_starts.diff(), call.kv_lens))
    return Extent(call.seqs, call.q.shape[0], q_len, kv_len)


def is_contiguous(call: KernelCall) -> bool:
    """Whether queries, table and new tokens each lie in one piece: in an engine they may be parts of wider tensors."""
    return all(t.is_contiguous() for t in (call.q, call.page_table, call.new_k, call.new_v) if t is not None)


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name and where.startswith(error.name):
                raise ArgumentError("target", where, "a file that ends in .py, or a module that can be imported") from None
            raise
    path = Path(where)
    if not path.is_file():
        raise ArgumentError("target", where, "a file that exists")
    spec = importlib.util.spec_from_file_location(f"quire_target_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and triton look a function's module up by name
    spec.loader.exec_module(module)
    return module


def _functions(module: Any) -> list[str]:
    return [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]


def _version(module: Any) -> str:
    return str(getattr(module, "__version__", ""))
