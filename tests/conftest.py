"""What every test starts from: repeatable examples, a fixed number of threads, and memory that shows when it was not written."""

from __future__ import annotations

import os
import random
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from support import without_hypothesis

try:
    import hypothesis
except ModuleNotFoundError:
    without_hypothesis.install()
    collect_ignore = ["cache/test_pool_machine.py"]  # nothing but a state machine of hypothesis
else:
    # The verdict of `make test` must not depend on luck or on the speed of the machine. To look for new failures:
    # pytest --hypothesis-profile=explore
    _COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("repeatable", derandomize=True, **_COMMON)
    hypothesis.settings.register_profile("explore", max_examples=1000, **_COMMON)
    hypothesis.settings.load_profile("repeatable")


def _seed(name: str) -> None:
    # Random numbers that depended on the tests before would depend on the load too: pytest-xdist distributes tests by speed. Seeds
    # differ, so that a fixture and a test never draw the same numbers.
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any) -> None:
    _seed(fixturedef.argname)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    _seed(item.nodeid)


# A shell starts background jobs with interrupts ignored, and processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread in each worker and in the processes that it starts: threads that have no core of their own spend their time waiting.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "compile the Triton kernels for every card in every format and width, not in a choice of them: many minutes"
    parser.addoption("--full-compile", action="store_true", help=help)
    parser.addoption("--client", help="the client whose tests in tests/clients run; it is installed in this environment")
    parser.addoption("--random-seed", type=int, help="the first seed of the random calls on a GPU; by default another in each run")
    parser.addoption("--random-seconds", type=float, default=120.0, help="how long random calls are made on a GPU, in each process")


LONG = ("test_interpreter.py", "test_compile.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first, so that no worker is left with them at the end."""
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints what tests measured with `record_property`: figures to read, never to assert."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")


_EMPTY = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"))


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills uninitialised memory with what no result contains: NaN, or the lowest integer."""
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        nan = 0x80 if "fnuz" in str(tensor.dtype) else 0x7F
        tensor.view(torch.uint8).fill_(nan)
    elif tensor.dtype.is_floating_point:
        tensor.fill_(torch.nan)
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return poison(tensor) if caller.split(".")[0] == "quire" else tensor

    return empty


@pytest.fixture(autouse=True, scope="session")
def uninitialised_memory_is_poisoned() -> Iterator[None]:
    """Every `torch.empty` made inside quire holds poison: an output row that a kernel leaves out cannot look right by luck."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in _EMPTY:
            patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield
