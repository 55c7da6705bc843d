"""The library of native kernels: loaded at the first launch, with the best instruction set that this CPU can really execute."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from quire.errors import KernelError
from quire.kernels.native.call import Attend, Write

FILE = Path(__file__).with_name("libquire.so")
"""Where the package's build puts it, if there is a compiler."""


class Library:
    """The C interface, and which of its instruction sets runs."""

    def __init__(self, path: Path):
        try:
            self.calls = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelError(f"the native kernels do not load: {error}") from error
        self.calls.quire_level_name.restype = ctypes.c_char_p
        for name, made in (("attend", Attend), ("write", Write)):
            size = getattr(self.calls, f"quire_size_of_{name}")
            size.restype = ctypes.c_size_t
            if size() != ctypes.sizeof(made):
                raise KernelError(f"the native kernels in {path} were built from other sources: build them anew")
        here: int = self.calls.quire_levels()
        numbers = [n for n in range(here.bit_length()) if here >> n & 1]
        self.levels = {self.calls.quire_level_name(n).decode(): n for n in numbers}
        """The instruction sets that this CPU can execute, the best last, and the library's numbers for them."""
        self.level = numbers[-1]

    def attend(self, call: Attend) -> None:
        if self.calls.quire_attend(ctypes.byref(call)):
            raise MemoryError("attend: no memory for the workspace of the native kernel")

    def write(self, call: Write) -> None:
        if self.calls.quire_write(ctypes.byref(call)):
            raise MemoryError("write: no memory for the workspace of the native kernel")


@cache
def library() -> Library:
    return Library(FILE)


@contextmanager
def forced(level: str) -> Iterator[None]:
    """Runs another instruction set than the best, by name, for its duration: for tests and measurements."""
    held = library()
    before, held.level = held.level, held.levels[level]
    try:
        yield
    finally:
        held.level = before
