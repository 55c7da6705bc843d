"""Thread count and default device. The kit computes on the host, in one thread, because its tensors are small. A target runs with
the thread count and the default device that were set before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_given: list[int] = []
_devices: list[torch.device] = []


@contextmanager
def one_thread() -> Iterator[None]:
    """A context for the kit's own arithmetic: one thread, on the host."""
    _given.append(torch.get_num_threads())
    torch.set_num_threads(1)
    try:
        with on_host():
            yield
    finally:
        torch.set_num_threads(_given.pop())


@contextmanager
def all_threads() -> Iterator[None]:
    """A context for calls of a target: the thread count and the default device from before `one_thread`."""
    torch.set_num_threads(_given[0] if _given else torch.get_num_threads())
    try:
        with as_given():
            yield
    finally:
        if _given:
            torch.set_num_threads(1)


@contextmanager
def on_host() -> Iterator[None]:
    """A context for the kit's own tensors: they are in host memory, whatever `torch.set_default_device` was called with."""
    _devices.append(torch.get_default_device())
    try:
        with _default(torch.device("cpu")):
            yield
    finally:
        _devices.pop()


def as_given() -> AbstractContextManager[object]:
    """A context for calls of a target: the default device from before `on_host`."""
    return _default(_devices[0]) if _devices else nullcontext()


def _default(device: torch.device) -> AbstractContextManager[object]:
    # A mode of torch costs time in every call, so it is entered only where it changes something.
    return nullcontext() if torch.get_default_device() == device else device
