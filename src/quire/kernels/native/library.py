"""The library of native kernels: loaded at the first launch, with the best instruction set that this CPU can execute."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from quire.errors import KernelError
from quire.kernels.native.call import SIZES

FILE = Path(__file__).with_name("libquire.so")
"""Built with the package, if there is a compiler."""


class Library:
    """The C interface, and the instruction set in use."""

    def __init__(self, path: Path):
        try:
            calls = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelError(f"the native kernels do not load: {error}") from error
        for name, size in SIZES.items():
            own_size = getattr(calls, f"quire_size_of_{name}", None)
            if own_size is None or own_size() != size:
                raise KernelError(f"the native kernels in {path} were built from other sources: rebuild them")
            getattr(calls, f"quire_{name}").argtypes = (ctypes.c_char_p,)
        calls.quire_level_name.restype = ctypes.c_char_p
        self.calls = calls
        self._attend, self._write, self._check = calls.quire_attend, calls.quire_write, calls.quire_check
        self._rope_write = calls.quire_rope_write
        here: int = calls.quire_levels()
        numbers = [n for n in range(here.bit_length()) if here >> n & 1]
        self.levels = {calls.quire_level_name(n).decode(): n for n in numbers}
        """The instruction sets that this CPU can execute, the best last, and the library's numbers for them."""
        self.level = numbers[-1]

    def attend(self, call: bytes) -> None:
        if self._attend(call):
            raise MemoryError("attend: no memory for the workspace of the native kernel")

    def write(self, call: bytes) -> None:
        if self._write(call):
            raise MemoryError("write: no memory for the workspace of the native kernel")

    def rope_write(self, call: bytes) -> None:
        if self._rope_write(call):
            raise MemoryError("write: no memory for the workspace of the native kernel")

    def is_legal(self, call: bytes) -> bool:
        """Whether index values and scales are legal. False: the rules of the contract decide."""
        return self._check(call) == 1


@cache
def library() -> Library:
    return Library(FILE)


@contextmanager
def forced(level: str) -> Iterator[None]:
    """Uses the named instruction set inside the context: for tests and measurements."""
    held = library()
    before, held.level = held.level, held.levels[level]
    try:
        yield
    finally:
        held.level = before
