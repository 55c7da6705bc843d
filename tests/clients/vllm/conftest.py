"""Models for the tests of the vLLM plugin. Modules of this folder import each other by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model by its name; the model is written when it is first used."""
    from models import write_model

    folder, written = tmp_path_factory.mktemp("models"), {}

    def path(name: str) -> Path:
        if name not in written:
            written[name] = write_model(name, folder)
        return written[name]

    return path
