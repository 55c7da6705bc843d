"""Every kernel that this CPU can run, one by one: torch's, and the native one with each instruction set that there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

import quire.launch
from quire.dispatch.choose import able_kernels
from quire.kernels.native import library

NO_LIBRARY = "the native kernels are not built here: python setup.py build_ext --inplace"


@cache
def levels() -> tuple[str, ...]:
    """The instruction sets of the native kernels that this CPU can execute; none where they are not built."""
    return tuple(library.library().levels) if library.FILE.exists() else ()


def names() -> list[str]:
    return ["torch", *(f"native-{level}" for level in levels())]


@contextmanager
def kernel(name: str) -> Iterator[None]:
    """Within it every attend and write that asks for no kernel by name gets this one."""
    wanted, _, level = name.partition("-")

    def wanted_for(problem: Any, platform: Any, operation: str, kernel: str | None, capturing: bool) -> Any:
        if operation != "audit" and kernel is None:
            kernel = wanted
        return able_kernels(problem, platform, operation, kernel, capturing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quire.launch, "able_kernels", wanted_for)
        patch.setattr(quire.launch, "_known", {})
        if level:
            with library.forced(level):
                yield
        else:
            yield


def on_every_kernel(run: Callable[[], None]) -> None:
    """Runs something on each kernel; a failure says on which."""
    for name in names():
        with kernel(name):
            try:
                run()
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


@pytest.fixture(params=names())
def each_kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same test on each kernel. A module that wants it for all of its tests says so with `usefixtures`."""
    with kernel(request.param):
        yield request.param
