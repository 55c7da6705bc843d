"""One real model runner of SGLang for this process, on the CPU, with a small generated model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.sglang.models import save_llama
from clients.sglang.scene import start_runner


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A `ModelRunner` whose attention backend is Quire, chosen by name through the entry point."""
    folder: Path = tmp_path_factory.mktemp("llama")
    save_llama(folder)
    yield start_runner(folder)
