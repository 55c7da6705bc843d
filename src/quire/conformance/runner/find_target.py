"""Finds a target by its name: one of Quire's kernels, an installed peer, or a function of a file or module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import quire
from quire.conformance import targets
from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.write_call import WriteCall
from quire.conformance.runner.target import Target, wrap
from quire.dispatch.catalogue import CATALOGUE
from quire.errors import ArgumentError


def find(text: str, device: str | None = None) -> Target:
    """The target of this name: a kernel of Quire, a peer, `file.py:function` or `package.module:function`."""
    if text in OUR_WRITES:
        return our_write(text, device)
    if is_ours(text):
        return ours(text, device)
    if text in targets.TARGETS:
        return targets.load(text, device)
    if ":" in text:
        return adapter(text, device)
    known = ", ".join((*OURS, *targets.TARGETS))
    raise ArgumentError("target", text, f"{known}, or file.py:function")


def _kernels(operation: str) -> tuple[str, ...]:
    return "cpu", *(kernel.name for kernel in CATALOGUE if kernel.operation == operation)


OUR_WRITES = tuple(f"write.{name}" for name in _kernels("write"))
OURS = (*_kernels("attend"), *OUR_WRITES)


def is_ours(text: str) -> bool:
    """Whether a target is a kernel of Quire."""
    return text in OURS


def _device_of(operation: str, name: str) -> str:
    vendors = next((one.vendors for one in CATALOGUE if (one.operation, one.name) == (operation, name)), None)
    return "cpu" if vendors is None or "cpu" in vendors else "cuda"


def our_write(text: str, device: str | None = None) -> Target:
    """A kernel of Quire, called through `quire.write`; `write.cpu` is the kernel that `quire.write` chooses on this CPU."""
    name = text.removeprefix("write.")
    kernel = None if name == "cpu" else name

    def run(call: WriteCall) -> None:
        batch, rope = call.batch(), call.rope()
        by_batch = batch is not None and call.case.slots == "batch"
        how: dict[str, Any] = {"slots": None if by_batch else call.slots, "kernel": kernel}
        if rope is not None:
            own = batch is not None and call.case.positions == "own"
            how |= {"rope": rope, "q": call.q, "q_out": call.q_out, "positions": None if own else call.positions}
        quire.write(call.k, call.v, call.cache(), batch, **how)

    return Target(text, run, device or _device_of("write", name), version=quire.__version__, operation="write")


def ours(name: str, device: str | None = None) -> Target:
    """A kernel of Quire, called through `quire.attend`; `cpu` is the kernel that `quire.attend` chooses on this CPU."""
    kernel = None if name == "cpu" else name
    device = device or _device_of("attend", name)

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
        mine = [findings for found, findings in decision.candidates if found.name == kernel]
        if not mine:
            return "prefixes: given none, allowed some"
        return "; ".join(str(finding) for finding in mine[0] if not finding.holds) or None

    return Target(name, run, device, limits, version=quire.__version__)


def adapter(text: str, device: str | None = None) -> Target:
    """A function of the user, by file or module and name."""
    where, _, name = text.rpartition(":")
    module = _module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise ArgumentError("target", text, f"a function that {where} has: {', '.join(_functions(module)) or 'none'}")
    default = getattr(module, "DEVICE", "cpu")
    return wrap(
        function, text, device or default, getattr(module, "SUPPORTS", None), getattr(module, "REFUSES", True), _version(module)
    )


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
    if str(path.parent.resolve()) not in sys.path:
        sys.path.append(str(path.parent.resolve()))  # the file may import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        given = f"{where}, which raises {type(error).__name__}: {error}"
        raise ArgumentError("target", given, "a file that can be imported") from error
    return module


def _functions(module: Any) -> list[str]:
    return [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]


def _version(module: Any) -> str:
    return str(getattr(module, "__version__", ""))
