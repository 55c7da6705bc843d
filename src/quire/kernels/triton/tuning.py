"""How much a program computes at a time, by card and by the size of a head: a table, read top down. `quire tune` searches the rows
of Triton's kernels for heads of 64, 128 and 256; the rows of gluon were tried by hand, as docs/performance.md says."""

from __future__ import annotations

from typing import NamedTuple


class Tuning(NamedTuple):
    """One row: for these cards, formats and heads up to this width, that much."""

    kernel: str
    """decode, mixed, or gluon."""
    arches: tuple[str, ...]
    """Prefixes of architectures; empty for all."""
    width: int
    """head_dim, K's or V's, whichever is larger, padded to a power of two: at most this."""
    element: int
    """Bytes of an element in the products, at most."""
    stored: int
    """Bytes of an element in the cache, at most."""
    rows: int
    """Query rows of a short tile, at least: a larger group takes more."""
    keys: int
    stages: int
    long_rows: int
    long_keys: int
    long_stages: int
    warps: int
    per_multiprocessor: float
    """Programs that share out the short rows."""
    opening: int = 2
    """What opening a unit costs, in key tiles."""
    least: int = 4
    """The least work that is worth a program, in key tiles."""
    registers: int | None = None
    """At most so many a thread, where the compiler can be told; None leaves it to the compiler. Of gluon: a computing thread's."""
    many: int | None = None
    """With so many units a program, the last of them are scheduled dynamically; None: never."""
    together: int = 1
    """Key heads in a tile of short rows, at most, if their queries fit."""
    scan: int = 256
    """Rows of the batch, and columns of its table, that are looked at at once."""


SMALL = Tuning("", (), 512, 4, 4, 16, 16, 1, 16, 16, 1, 1, 1.0)
"""One warp and the smallest tiles: for emulators, and for whoever wants to read what a kernel does."""
SMALL_GLUON = Tuning("gluon", ("sm90",), 128, 2, 2, 16, 16, 1, 128, 64, 2, 1, 1.0, registers=216)
"""The same of gluon. Its long rows take three groups of four warps all the same: Hopper's matrix unit is asked by four."""


class Portion(NamedTuple):
    """How much a program of a kernel without products does, on every card."""

    size: int
    """Rows that are written, or positions that are looked at."""
    warps: int


WRITE = Portion(32, 4)
AUDIT = Portion(1024, 4)
LEAST = Portion(16, 1)
"""For whoever asks for SMALL."""

TABLE: tuple[Tuning, ...] = (
    Tuning("decode", ("interpreter",), 512, 4, 4, 16, 32, 1, 0, 0, 0, 1, 1.0, many=6, together=4),
    Tuning("mixed", ("interpreter",), 512, 4, 4, 16, 32, 1, 32, 32, 1, 1, 1.0),
    Tuning("decode", ("sm90",), 128, 2, 1, 16, 32, 3, 0, 0, 0, 1, 8.0),
    Tuning("decode", ("sm90",), 128, 2, 2, 16, 64, 3, 0, 0, 0, 4, 2.0, many=6, together=2),
    # It spills some 200 bytes a thread, and is still the fastest by 10 % and more: docs/performance.md.
    Tuning("mixed", ("sm90",), 128, 2, 2, 16, 64, 3, 128, 64, 3, 4, 1.0),
    Tuning("gluon", ("sm90",), 128, 2, 1, 16, 32, 3, 128, 128, 2, 1, 4.0, registers=208),
    Tuning("gluon", ("sm90",), 128, 2, 2, 16, 64, 3, 128, 128, 2, 4, 1.0, registers=216),
    Tuning("decode", ("sm100",), 128, 2, 1, 16, 32, 3, 0, 0, 0, 2, 4.0),
    Tuning("decode", ("sm100",), 128, 2, 2, 16, 64, 3, 0, 0, 0, 4, 2.0),
    Tuning("mixed", ("sm100",), 128, 2, 2, 16, 64, 3, 128, 64, 3, 8, 1.0),
    Tuning("decode", ("sm",), 128, 2, 2, 16, 64, 2, 0, 0, 0, 4, 2.0),
    Tuning("mixed", ("sm",), 128, 2, 2, 16, 32, 2, 64, 32, 2, 8, 1.0),
    Tuning("decode", ("gfx9",), 128, 2, 2, 16, 64, 2, 0, 0, 0, 4, 2.0),
    Tuning("mixed", ("gfx9",), 128, 2, 2, 16, 32, 2, 64, 32, 2, 4, 1.0),
    Tuning("decode", ("gfx",), 128, 2, 2, 16, 32, 2, 0, 0, 0, 8, 2.0),
    Tuning("mixed", ("gfx11",), 128, 2, 1, 16, 16, 1, 32, 16, 1, 8, 1.0),
    Tuning("mixed", ("gfx11",), 128, 2, 2, 16, 32, 1, 32, 32, 1, 8, 1.0),
    Tuning("mixed", ("gfx",), 128, 2, 2, 16, 32, 2, 64, 32, 2, 8, 1.0),
    Tuning("decode", (), 256, 2, 2, 16, 32, 2, 0, 0, 0, 4, 2.0),
    Tuning("mixed", (), 256, 2, 2, 16, 32, 2, 64, 32, 2, 8, 1.0),
    Tuning("decode", (), 512, 4, 4, 16, 16, 1, 0, 0, 0, 4, 2.0),
    Tuning("mixed", (), 512, 4, 4, 16, 16, 1, 32, 16, 1, 8, 1.0),
)


def tuning_for(kernel: str, arch: str, width: int, element: int, stored: int) -> Tuning:
    """The first row that fits."""
    for row in TABLE:
        fits = not row.arches or arch.startswith(row.arches)
        if row.kernel == kernel and fits and width <= row.width and element <= row.element and stored <= row.stored:
            return row
    raise LookupError(f"no row of tuning for {kernel}, {arch}, width {width}, {element} bytes")
