"""One run of the engine, shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from quire.cli.demo import one_thread
from quire.demo import requests
from quire.demo.engine import DemoEngine
from quire.demo.model import DemoModel


@pytest.fixture(autouse=True)
def small_products() -> Iterator[None]:
    with one_thread():
        yield


Run = Callable[..., DemoEngine]


@pytest.fixture(scope="package")
def run() -> Run:
    """`run(count, pages, seed)` is a finished run."""

    def run(count: int, pages: int, seed: int = 3) -> DemoEngine:
        engine = DemoEngine(DemoModel.make(seed), *requests.make(count, seed), pages)
        with one_thread():
            for _ in engine.run():
                pass
        return engine

    return run


@pytest.fixture(scope="package")
def finished(run: Run) -> DemoEngine:
    """A run in which somebody had to wait. It is shared: whoever changes it changes it back."""
    return run(4, pages=22)
