"""Paged attention for mixed batches: one operator, a checked contract, a dispatcher that explains itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.attend import attend
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.cache.pool import PagePool
from quire.checked import checked
from quire.contract.check import check
from quire.contract.rule import Violation
from quire.dispatch.decision import Decision
from quire.errors import ArgumentError, ContractError, KernelError, OutOfPages, QuireError, StaleBatch
from quire.explain import explain
from quire.merge import merge
from quire.options import Options
from quire.platform import Platform
from quire.prepare import Prepared, prepare
from quire.problem import Extent, Problem
from quire.step import step
from quire.write import write

__version__ = "0.1.0"

__all__ = [
    "PagePool",
    "KVCache",
    "Batch",
    "Options",
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


if TYPE_CHECKING:
    from quire import reference as reference
    from quire.conformance.record import record as record
else:

    def __getattr__(name: str) -> object:
        # What nothing fast imports is loaded when somebody asks for it.
        if name == "reference":
            import quire.reference

            return quire.reference
        if name == "record":
            from quire.conformance.record import record

            return record
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
