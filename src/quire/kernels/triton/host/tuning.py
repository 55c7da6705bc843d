"""Tile sizes and programs, by GPU and head size: a table, read top down. `quire tune` searches the entries of Triton's kernels for
heads of 64, 128 and 256; the entries of gluon were measured by hand (docs/performance.md)."""

from __future__ import annotations

from typing import NamedTuple


class Tuning(NamedTuple):
    """One entry of the table, for some GPUs, formats and head sizes."""

    kernel: str
    """decode, mixed, or gluon."""
    arches: tuple[str, ...]
    """Prefixes of architectures; empty for all."""
    width: int
    """The widest tile of K or V: head_dim rounded up to a power of two. 1024 has parts of K that are together wider than 576."""
    element: int
    """The most bytes of an element of the products."""
    stored: int
    """The most bytes of an element of the cache."""
    rows: int
    """The fewest query rows of a short tile: a larger group takes more."""
    keys: int
    stages: int
    long_rows: int
    long_keys: int
    long_stages: int
    warps: int
    per_multiprocessor: float
    """Programs that the short sequences are split over."""
    unit_overhead: int = 2
    """The cost of starting a unit, in key tiles."""
    least: int = 4
    """The least work of a program, in key tiles."""
    registers: int | None = None
    """The most registers of a thread; None leaves it to the compiler. For gluon, those of a consumer's thread."""
    many: int | None = None
    """From so many units per program on, the tail is scheduled dynamically; None: never."""
    heads_per_tile: int = 1
    """The most key heads in a tile of short sequences, if their queries fit."""
    scan: int = 256
    """Sequences of the batch, or columns of its table, that are read at a time."""
    most_rows: int = 64
    """The most query rows of a short tile."""
    v_in_k: bool = False
    """Whether the entry is only for caches of which V is a part of K."""
    group: int | None = None
    """The most query heads of a key head that the entry is for; None: any number."""


SMALL = Tuning("", (), 512, 4, 4, 16, 16, 1, 16, 16, 1, 1, 1.0)
"""One warp and the smallest tiles: for emulators, and for reading the compiled code."""
SMALL_GLUON = Tuning("gluon", ("sm90",), 128, 2, 2, 16, 16, 1, 128, 64, 2, 1, 1.0, registers=216)
"""The same for gluon. Its long sequences always take three warp groups: Hopper's matrix instructions are issued by four warps."""


class WorkPerProgram(NamedTuple):
    """How much a program of a kernel without products computes, on every GPU."""

    size: int
    """Rows that are written, or positions that are checked."""
    warps: int


WRITE = WorkPerProgram(32, 4)
AUDIT = WorkPerProgram(1024, 4)
SMALLEST = WorkPerProgram(16, 1)
"""The smallest, as SMALL is for attention."""

TABLE: tuple[Tuning, ...] = (
    Tuning("decode", ("interpreter",), 1024, 4, 4, 16, 32, 1, 0, 0, 0, 1, 1.0, many=6, heads_per_tile=4),
    Tuning("mixed", ("interpreter",), 1024, 4, 4, 16, 32, 1, 32, 32, 1, 1, 1.0),
    Tuning("decode", ("sm90",), 128, 2, 1, 16, 32, 3, 0, 0, 0, 1, 8.0),
    Tuning("decode", ("sm90",), 128, 2, 2, 16, 64, 3, 0, 0, 0, 4, 2.0, many=6, heads_per_tile=2),
    # It spills about 200 bytes per thread, and is still the fastest by 10 % and more: docs/performance.md.
    Tuning("mixed", ("sm90",), 128, 2, 2, 16, 64, 3, 128, 64, 3, 4, 1.0),
    Tuning("gluon", ("sm90",), 128, 2, 1, 16, 32, 3, 128, 128, 2, 1, 4.0, registers=216),
    Tuning("gluon", ("sm90",), 128, 2, 2, 16, 64, 3, 128, 128, 2, 4, 1.0, registers=232),
    Tuning("gluon", ("sm90",), 256, 2, 1, 16, 32, 2, 128, 64, 2, 4, 1.0, registers=216),
    Tuning("gluon", ("sm90",), 256, 2, 2, 16, 32, 2, 128, 64, 2, 4, 1.0, registers=232),
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
    # Latent caches of 512 and 64: tiles that fit into shared memory and spill least, as compiled. No others were measured.
    # With three stages the next tile is loaded during the products, with two between them: only 64 rows of 16 bits have no memory
    # for the third.
    Tuning("decode", ("sm90",), 512, 2, 1, 16, 64, 3, 0, 0, 0, 8, 1.0, v_in_k=True),
    Tuning("decode", ("sm90",), 512, 2, 2, 16, 32, 3, 0, 0, 0, 4, 2.0, most_rows=32, v_in_k=True, group=32),
    Tuning("decode", ("sm90",), 512, 2, 2, 16, 64, 2, 0, 0, 0, 8, 1.0, v_in_k=True),
    Tuning("mixed", ("sm90",), 512, 2, 2, 16, 64, 2, 64, 64, 2, 8, 1.0, v_in_k=True),
    Tuning("decode", ("sm80", "sm87"), 512, 2, 2, 16, 32, 2, 0, 0, 0, 8, 1.0, v_in_k=True),
    Tuning("mixed", ("sm80", "sm87"), 512, 2, 2, 16, 32, 2, 64, 32, 2, 8, 1.0, v_in_k=True),
    Tuning("decode", ("sm",), 512, 2, 2, 16, 32, 2, 0, 0, 0, 8, 1.0, most_rows=32, v_in_k=True),
    Tuning("mixed", ("sm",), 512, 2, 2, 16, 32, 2, 32, 32, 2, 8, 1.0, most_rows=32, v_in_k=True),
    Tuning("decode", ("gfx9",), 512, 2, 2, 16, 16, 1, 0, 0, 0, 4, 1.0, v_in_k=True),
    Tuning("mixed", ("gfx9",), 512, 2, 2, 16, 16, 1, 64, 16, 1, 4, 1.0, v_in_k=True),
    Tuning("decode", ("gfx",), 512, 2, 2, 16, 16, 1, 0, 0, 0, 16, 1.0, most_rows=32, v_in_k=True),
    Tuning("mixed", ("gfx",), 512, 2, 2, 16, 16, 1, 32, 16, 1, 16, 1.0, most_rows=32, v_in_k=True),
    Tuning("decode", (), 512, 4, 4, 16, 16, 1, 0, 0, 0, 4, 1.0, most_rows=16, v_in_k=True),
    Tuning("mixed", (), 512, 4, 4, 16, 16, 1, 16, 16, 1, 8, 1.0, most_rows=16, v_in_k=True),
    # Other latent caches: a part of more than 512 elements, or two parts that take more than those.
    Tuning("decode", ("gfx9",), 1024, 4, 4, 16, 16, 1, 0, 0, 0, 4, 1.0, most_rows=16, v_in_k=True),
    Tuning("mixed", ("gfx9",), 1024, 4, 4, 16, 16, 1, 16, 16, 1, 4, 1.0, most_rows=16, v_in_k=True),
    Tuning("decode", (), 1024, 4, 4, 16, 16, 1, 0, 0, 0, 8, 1.0, most_rows=16, v_in_k=True),
    Tuning("mixed", (), 1024, 4, 4, 16, 16, 1, 16, 16, 1, 8, 1.0, most_rows=16, v_in_k=True),
    Tuning("decode", (), 512, 4, 4, 16, 16, 1, 0, 0, 0, 4, 2.0),
    Tuning("mixed", (), 512, 4, 4, 16, 16, 1, 32, 16, 1, 8, 1.0),
)


def tuning_for(
    kernel: str, arch: str, width: int, element: int, stored: int, v_in_k: bool = False, group: int | None = None
) -> Tuning:
    """The first entry that fits. Without a `group`, one for any."""
    for row in TABLE:
        fits = (not row.arches or arch.startswith(row.arches)) and (v_in_k or not row.v_in_k)
        fits &= row.group is None or (group is not None and group <= row.group)
        if row.kernel == kernel and fits and width <= row.width and element <= row.element and stored <= row.stored:
            return row
    raise LookupError(f"no row of tuning for {kernel}, {arch}, width {width}, {element} bytes")
