"""A page table, drawn from a real pool."""

from __future__ import annotations

import textwrap
from typing import Any

import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from style import COLORS, LIGHT, size

import quire


def page_table(narrow: bool = False) -> Any:
    """Three sequences of a real pool, one of them forked from another, and where their pages are."""
    pool = quire.PagePool(pages=16, page_size=16)
    a, b = pool.sequence(), pool.sequence()
    pool.step({a: 40, b: 20})
    pool.step({a: 20, b: 30})
    c = pool.fork(a)
    batch = pool.step({a: 1, b: 40, c: 6})
    names = ("A", "B", "C (forked from A)")
    table, lens = batch.page_table.tolist(), batch.kv_lens.tolist()
    copied = {target: source for source, target in pairs_of(batch.copies)}
    holders: dict[int, list[int]] = {}
    for seq, ids in enumerate(table):
        for page in ids[: -(-lens[seq] // pool.page_size)]:
            holders.setdefault(page, []).append(seq)

    columns = 8 if narrow else 16
    figure, axes = pyplot.subplots(figsize=size(narrow, 8.6, 3.9, 5.4), layout="constrained")
    axes.set_axis_off()
    left = columns - max(map(len, table)) - 0.1 if narrow else 5.4
    axes.text(0, -0.35, "page_table: one row per sequence", weight="bold")
    for seq, ids in enumerate(table):
        axes.text(0, seq + 0.55, names[seq][0] if narrow else f"{names[seq]}, {lens[seq]} tokens", va="center")
        for column, page in enumerate(ids):
            draw_cell(axes, left + column, seq + 0.08, COLORS[seq] if page >= 0 else LIGHT["soft"], str(page), used=page >= 0)
    top = 4.0
    axes.text(0, top, f"pool: {pool.pages} pages of {pool.page_size} slots", weight="bold")
    for page in range(pool.pages):
        owners = holders.get(page, [])
        x, y = page % columns, top + 0.35 + page // columns * 1.7
        draw_page(axes, x, y, str(page), [COLORS[seq] for seq in owners])
        filled = max((min(lens[seq] - table[seq].index(page) * pool.page_size, pool.page_size) for seq in owners), default=0)
        text = f"{filled}/{pool.page_size}" if owners else "free"
        axes.text(x + 0.45, y + 1.27, text, ha="center", va="center", fontsize=8)
    shared = sorted(page for page, owners in holders.items() if len(owners) > 1)
    note = "" if not narrow else ", ".join(f"{name} has {length} tokens" for name, length in zip(names, lens)) + ". "
    note += f"Pages {', '.join(map(str, shared))} belong to A and C."
    for target, source in copied.items():
        owner = names[holders[target][0]].split()[0]
        note += f" Page {target} is {owner}'s copy of page {source}, which was shared and partly filled when {owner} wrote to it."
    end = top + 0.8 + pool.pages // columns * 1.7
    axes.text(0, end, "\n".join(textwrap.wrap(note, 56 if narrow else 140)), va="top", fontsize=9)
    axes.set_xlim(0, columns + 0.2)
    axes.set_ylim(end + (2.6 if narrow else 1.1), -0.7)
    return figure


def pairs_of(copies: Any) -> list[tuple[int, int]]:
    """The pages to copy before a batch is written, as (source, target)."""
    if copies is None:
        return []
    values = copies.tolist() if isinstance(copies, torch.Tensor) else list(copies)
    return [(int(source), int(target)) for source, target in values]


def draw_cell(axes: Axes, x: float, y: float, color: str, text: str, used: bool) -> None:
    axes.add_patch(Rectangle((x, y), 0.9, 0.84, facecolor=color, edgecolor=LIGHT["paper"]))
    axes.text(x + 0.45, y + 0.44, text, ha="center", va="center", color="#ffffff" if used else LIGHT["ink"], fontsize=9)


def draw_page(axes: Axes, x: float, y: float, text: str, colors: list[str]) -> None:
    height = 1.0
    for i, color in enumerate(colors or [LIGHT["soft"]]):
        part = height / max(len(colors), 1)
        axes.add_patch(Rectangle((x, y + i * part), 0.9, part, facecolor=color, edgecolor="none"))
    ink = "#ffffff" if colors else LIGHT["ink"]
    axes.text(x + 0.45, y + height / 2, text, ha="center", va="center", fontsize=9, color=ink)
