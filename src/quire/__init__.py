"""Paged attention for mixed batches: one operator, a checked contract, a dispatcher that explains itself."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "PagePool",
    "KVCache",
    "Batch",
    "Options",
    "Rope",
    "Prefixes",
    "Select",
    "attend",
    "write",
    "step",
    "merge",
    "explain",
    "prepare",
    "check",
    "checked",
    "record",
    "Decision",
    "Violation",
    "Problem",
    "Extent",
    "Prepared",
    "Platform",
    "QuireError",
    "ArgumentError",
    "ContractError",
    "KernelError",
    "OutOfPages",
    "StaleBatch",
    "reference",
    "__version__",
]

_HOMES = {
    "PagePool": "cache.pool",
    "KVCache": "cache.kv_cache",
    "Batch": "batch",
    "Options": "options",
    "Rope": "rope",
    "Prefixes": "cache.prefixes",
    "Select": "cache.select",
    "attend": "attend",
    "write": "write",
    "step": "step",
    "merge": "merge",
    "explain": "explain",
    "prepare": "prepare",
    "check": "contract.check",
    "checked": "checked",
    "record": "conformance.recording.record",
    "Decision": "dispatch.decision",
    "Violation": "contract.rule",
    "Problem": "problem",
    "Extent": "problem",
    "Prepared": "prepare",
    "Platform": "platform",
    **dict.fromkeys(("QuireError", "ArgumentError", "ContractError", "KernelError", "OutOfPages", "StaleBatch"), "errors"),
}
"""The module of every public name. Each is imported when the name is first used, so that `import quire` alone imports neither torch
nor a kernel: command-line help, shell completion and pytest sessions that only load the plugin stay fast."""

if TYPE_CHECKING:
    from quire import reference as reference
    from quire.attend import attend as attend
    from quire.batch import Batch as Batch
    from quire.cache.kv_cache import KVCache as KVCache
    from quire.cache.pool import PagePool as PagePool
    from quire.cache.prefixes import Prefixes as Prefixes
    from quire.cache.select import Select as Select
    from quire.checked import checked as checked
    from quire.conformance.recording.record import record as record
    from quire.contract.check import check as check
    from quire.contract.rule import Violation as Violation
    from quire.dispatch.decision import Decision as Decision
    from quire.errors import ArgumentError as ArgumentError
    from quire.errors import ContractError as ContractError
    from quire.errors import KernelError as KernelError
    from quire.errors import OutOfPages as OutOfPages
    from quire.errors import QuireError as QuireError
    from quire.errors import StaleBatch as StaleBatch
    from quire.explain import explain as explain
    from quire.merge import merge as merge
    from quire.options import Options as Options
    from quire.platform import Platform as Platform
    from quire.prepare import Prepared as Prepared
    from quire.prepare import prepare as prepare
    from quire.problem import Extent as Extent
    from quire.problem import Problem as Problem
    from quire.rope import Rope as Rope
    from quire.step import step as step
    from quire.write import write as write
else:

    def __getattr__(name: str) -> object:
        if name == "reference":
            return import_module("quire.reference")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"quire.{_HOMES[name]}"), name)
        return found


class _Package(ModuleType):
    """The package. `quire.attend` is the function, not the module of that name, whichever of them is imported first."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return __all__
