"""A plugin for pytest: of all tests that are collected, this process runs its share. GPU_TEST_SHARE=2/12 is the third of twelve."""

from __future__ import annotations

import os
from typing import Any


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    share = os.environ.get("GPU_TEST_SHARE")
    if share is None:
        return
    mine, of = map(int, share.split("/"))
    # Neighbours often take equally long: dealing them out like cards keeps the shares even.
    config.hook.pytest_deselected(items=[item for at, item in enumerate(items) if at % of != mine])
    items[:] = items[mine::of]
