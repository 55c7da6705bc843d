"""The tests of a client run in the client's environment alone: `pytest tests/clients --client vllm`, started by `make clients`."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores the folders of other clients."""
    parts = collection_path.relative_to(HERE).parts
    return True if parts and parts[0] != config.getoption("--client") else None
