"""The repository's root, and fresh processes in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture
def python() -> Run:
    """`python(*args)` runs this interpreter in the repository's root and returns what it printed."""

    def run(*args: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True, timeout=timeout)

    return run
