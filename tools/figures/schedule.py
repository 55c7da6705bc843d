"""How short and long sequences share a GPU."""

from __future__ import annotations

import math
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from style import COLORS, LIGHT, cell

LENGTHS = (5120, 640, 256, 2304, 128, 1408)
"""Keys of the decoding sequences in the schedule figure."""
PREFILLS = ((512, 1024), (256, 512))
"""(new tokens, context) of the prefilling sequences."""
TILE, QUERY_TILE, PROGRAMS, LONG_PROGRAMS = 128, 128, 4, 4
TIME_SCALE = 3.3
"""Width of a key tile on the time axis."""


def schedule() -> Any:
    """The documented rule for one key head: key tiles of all short sequences are one line of work, divided evenly; each query tile
    of a long sequence is one unit, the longest first, on the other multiprocessors."""
    tiles = [math.ceil(length / TILE) for length in LENGTHS]
    total = sum(tiles)
    figure, axes = pyplot.subplots(figsize=(8.6, 4.2), layout="constrained")
    axes.set_axis_off()
    axes.text(0, -2.35, "Key tiles of all short sequences, in order (one color per sequence)", weight="bold")
    scale = 80 / total  # of the line of work; programs are drawn on a time axis of their own
    position = 0
    for seq, count in enumerate(tiles):
        for tile in range(count):
            axes.add_patch(cell((position + tile) * scale, -1.9, scale, 0.8, COLORS[seq % len(COLORS)]))
        position += count
    axes.text(0, -0.35, "Each program over time", weight="bold")
    for program in range(PROGRAMS):
        first, last = total * program // PROGRAMS, total * (program + 1) // PROGRAMS
        axes.plot([first * scale] * 2, [-2.0, -1.0], color=LIGHT["ink"], linewidth=1.4)
        draw_program(axes, program, tiles, first, last, TIME_SCALE)
    units = sorted((context + end for new, context in PREFILLS for end in range(QUERY_TILE, new + 1, QUERY_TILE)), reverse=True)
    free = [0.0] * LONG_PROGRAMS
    for keys in units:
        worker = free.index(min(free))
        width = math.ceil(keys / TILE) * TIME_SCALE
        axes.add_patch(cell(free[worker], PROGRAMS + worker + 0.1, width, 0.8, LIGHT["faint"], LIGHT["ink"]))
        free[worker] += width
    labels = [f"short, program {i}" for i in range(PROGRAMS)] + [f"long, program {i}" for i in range(LONG_PROGRAMS)]
    for i, label in enumerate(labels):
        axes.text(-1, i + 0.5, label, ha="right", va="center", fontsize=9)
    note = "A split inside a sequence leaves two partial results, which a second kernel merges."
    note += " Gray: query tiles of prefilling sequences, longest first."
    axes.text(0, PROGRAMS + LONG_PROGRAMS + 0.7, note, fontsize=9)
    axes.set_xlim(-14, 81)
    axes.set_ylim(PROGRAMS + LONG_PROGRAMS + 1.1, -2.9)
    return figure


def draw_program(axes: Axes, program: int, tiles: list[int], first: int, last: int, scale: float) -> None:
    """The share of one program: the key tiles [first, last) of the line of work."""
    start = 0
    for seq, count in enumerate(tiles):
        low, high = max(start, first), min(start + count, last)
        if low < high:
            axes.add_patch(cell((low - first) * scale, program + 0.1, (high - low) * scale, 0.8, COLORS[seq % len(COLORS)]))
            if (low > start or high < start + count) and high - low > 2:
                middle = ((low + high) / 2 - first) * scale
                axes.text(middle, program + 0.5, "partial", ha="center", va="center", color="#ffffff", fontsize=7.5)
        start += count
