"""How short and long sequences share a GPU: the division that the kernels' scheduler computes, on a time axis."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from matplotlib import pyplot
from matplotlib.axes import Axes
from scheduler import Division, divided
from style import COLORS, LIGHT, cell, size, titled, wrapped

FEW = [(1, 576), (1, 160), (1, 96), (1, 448), (256, 384)]
"""(new tokens, all tokens) of each sequence of the mixed batch: four decode, the last one prefills."""
MANY = [
    (1, 32 * tiles) for tiles in (4, 11, 14, 14, 3, 6, 3, 9, 14, 9, 9, 12, 8, 14, 5, 3, 9, 2, 8, 8, 11, 14, 14, 2, 13, 9, 6, 13)
]
"""The same of a batch with many more sequences than programs."""
MULTIPROCESSORS = 4
PROGRAMS_AT_ONCE = 2
"""Programs that a multiprocessor runs at a time in the mixed batch: one of a short share, one of a query tile."""
SLOW, SLOWER = 2, 1.2
"""A multiprocessor that takes longer, and how much: the reason for the tail."""


class Piece(NamedTuple):
    """A part of one sequence in a share, in pieces of work from the start of the share."""

    seq: int
    at: int
    length: int
    starting: int
    """Pieces at the beginning that are the overhead of starting the unit."""
    part: int
    parts: int


def schedule(narrow: bool = False) -> Any:
    """Two batches: a mixed one with fewer sequences than programs, and decodes of many sequences."""
    figure, (line, few, many) = pyplot.subplots(
        3, 1, figsize=size(narrow, 8.6, 6.6, 7.4), layout="constrained", height_ratios=(1.2, 8.6, 5.2)
    )
    division = divided("mixed", FEW, MULTIPROCESSORS)
    draw_list(line, division, narrow)
    draw_mixed(few, division, narrow)
    draw_many(many, divided("decode", MANY, MULTIPROCESSORS), narrow)
    return figure


def pieces_of(division: Division) -> list[list[Piece]]:
    """The parts of sequences in each share."""
    starts = [sum(division.work[:seq]) for seq in range(len(division.work))]
    shares: list[list[Piece]] = []
    for share in division.shares:
        found = []
        for seq, (start, work) in enumerate(zip(starts, division.work)):
            low, high = max(start, share.begin), min(start + work, share.end)
            if low < high:
                mine = [s for s in division.shares if s.begin < start + work and s.end > start]
                part = sum(s.begin < share.begin for s in mine)
                starting = max(min(start + division.overhead, high) - low, 0)
                found.append(Piece(seq, low - share.begin, high - low, starting, part + 1, len(mine)))
        shares.append(found)
    return shares


def draw_list(axes: Axes, division: Division, narrow: bool) -> None:
    """The list of work, with the places where it is divided."""
    axes.set_axis_off()
    titled(axes, "Key tiles of the short sequences A to D, and where the list is divided", narrow)
    at = 0
    for seq, work in enumerate(division.work):
        for tile in range(work):
            starting = tile < division.overhead
            axes.add_patch(cell(at + tile, 0.15, 1, 0.7, LIGHT["faint"] if starting else COLORS[seq]))
        if work:
            axes.text(at + division.overhead / 2, 0.5, chr(65 + seq), ha="center", va="center", fontsize=9)
        at += work
    for share in division.shares[1:]:
        axes.plot([share.begin] * 2, [-0.1, 1.1], color=LIGHT["ink"], linewidth=1.8)
    axes.set_xlim(0, at)
    axes.set_ylim(1.15, -0.15)


def draw_mixed(axes: Axes, division: Division, narrow: bool) -> None:
    """The mixed batch over time: the shares of the short sequences start first, then the query tiles, longest first."""
    free = [0.0] * (MULTIPROCESSORS * PROGRAMS_AT_ONCE)
    for program, pieces in enumerate(pieces_of(division)):
        for piece in pieces:
            draw_piece(axes, program, piece, 1.0, chr(65 + piece.seq))
        free[program] = float(pieces[-1].at + pieces[-1].length)
    new, total = FEW[-1]
    ends = range(total, total - new, -division.long_tokens)
    for end in ends:
        keys, slot = math.ceil(end / division.tile), free.index(min(free))
        axes.add_patch(cell(free[slot], slot + 0.1, keys, 0.8, LIGHT["soft"], LIGHT["ink"]))
        axes.text(free[slot] + keys / 2, slot + 0.5, f"E, {keys} tiles", ha="center", va="center", fontsize=8)
        free[slot] += keys
    names = [f"{'' if narrow else 'slot '}{i}" for i in range(len(free))]
    finish(axes, names, max(free), "Mixed batch: A to D decode, E prefills in tiles of queries (gray, longest first)", narrow)
    axes.set_xlabel("time, in key tiles")


def draw_many(axes: Axes, division: Division, narrow: bool) -> None:
    """Many decodes over time: main programs take equal shares; programs of the tail start where others have ended."""
    free = [0.0] * MULTIPROCESSORS
    for program, (share, pieces) in enumerate(zip(division.shares, pieces_of(division))):
        tail = program >= MULTIPROCESSORS
        slot = free.index(min(free)) if tail else program
        pace = SLOWER if slot == SLOW else 1.0
        for piece in pieces:
            draw_piece(axes, slot, piece, pace, "", free[slot])
        width = (share.end - share.begin) * pace
        if tail:
            axes.add_patch(cell(free[slot], slot + 0.05, width, 0.9, "none", LIGHT["ink"], 1.6))
        free[slot] += width
    names = [f"{'' if narrow else 'processor '}{i}{', slow' if i == SLOW and not narrow else ''}" for i in range(MULTIPROCESSORS)]
    title = f"{len(MANY)} decodes: equal shares, then a tail (framed) where a program has ended; processor 2 is slower"
    finish(axes, names, max(free), title, narrow)
    axes.set_xlabel(wrapped("time, in key tiles; triangle: part of a sequence, stored as a partial result", narrow))


def draw_piece(axes: Axes, row: int, piece: Piece, pace: float, name: str, begin: float = 0.0) -> None:
    """One part of a sequence: the overhead of its start, its key tiles, and what it is a part of."""
    color, at, length = COLORS[piece.seq % len(COLORS)], begin + piece.at * pace, piece.length * pace
    starting = piece.starting * pace
    axes.add_patch(cell(at, row + 0.1, length, 0.8, color))
    if starting:
        axes.add_patch(cell(at, row + 0.1, starting, 0.8, LIGHT["faint"]))
    if name and length > starting:
        text = f"{name} {piece.part}/{piece.parts}" if piece.parts > 1 else name
        middle = at + (starting + length) / 2
        axes.text(middle, row + 0.5, text, ha="center", va="center", color="#ffffff", fontsize=8)
    elif not name and piece.parts > 1:
        axes.plot(at + length / 2, row + 0.5, "^", color="#ffffff" if length > starting else LIGHT["ink"], markersize=4.5)


def finish(axes: Axes, names: list[str], end: float, title: str, narrow: bool) -> None:
    titled(axes, title, narrow)
    axes.set_yticks([i + 0.5 for i in range(len(names))], names)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, end * 1.01)
    axes.set_ylim(len(names), 0)
