"""Work that several tests need, done once a session: whichever worker asks first does it, others wait for its result."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

import pytest


def once(factory: pytest.TempPathFactory, name: str, work: Callable[[], Any]) -> Any:
    """What `work` returned, as JSON keeps it."""
    # Workers of one session have folders beside each other.
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    result = base / f"{name}.json"
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            result.write_text(json.dumps(work()))
    return json.loads(result.read_text())
