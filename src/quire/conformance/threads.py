"""The kit computes in one thread: its tensors are small, and threads would wait longer than they work. Targets get all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_given: list[int] = []


@contextmanager
def one_thread() -> Iterator[None]:
    """For the kit's own arithmetic."""
    _given.append(torch.get_num_threads())
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_given.pop())


@contextmanager
def all_threads() -> Iterator[None]:
    """For a target: as many as there were before."""
    torch.set_num_threads(_given[0] if _given else torch.get_num_threads())
    try:
        yield
    finally:
        if _given:
            torch.set_num_threads(1)
