"""The kit computes on the host, in one thread: its tensors are small, and threads would wait longer than they work. A target gets
all threads, and torch's default device, as they were given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_given: list[int] = []
_devices: list[torch.device] = []


@contextmanager
def one_thread() -> Iterator[None]:
    """For the kit's own arithmetic."""
    _given.append(torch.get_num_threads())
    torch.set_num_threads(1)
    try:
        with on_host():
            yield
    finally:
        torch.set_num_threads(_given.pop())


@contextmanager
def all_threads() -> Iterator[None]:
    """For a target: as many as there were before."""
    torch.set_num_threads(_given[0] if _given else torch.get_num_threads())
    try:
        with as_given():
            yield
    finally:
        if _given:
            torch.set_num_threads(1)


@contextmanager
def on_host() -> Iterator[None]:
    """For the kit's own tensors: whatever `torch.set_default_device` says, they lie in host memory."""
    _devices.append(torch.get_default_device())
    try:
        with _default(torch.device("cpu")):
            yield
    finally:
        _devices.pop()


def as_given() -> AbstractContextManager[object]:
    """For a target: the default device that there was before."""
    return _default(_devices[0]) if _devices else nullcontext()


def _default(device: torch.device) -> AbstractContextManager[object]:
    # A mode of torch costs time in every call, so it is entered only where it changes something.
    return nullcontext() if torch.get_default_device() == device else device
