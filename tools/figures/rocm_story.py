"""The failure of vLLM's test on ROCm, from the output of examples/rocm_story."""

from __future__ import annotations

import json
from typing import Any

from matplotlib import pyplot
from style import COLORS, LIGHT, cell, size, wrapped
from tables import ROOT

DATA = ROOT / "docs" / "data" / "rocm_story.json"
"""Written by `python examples/rocm_story --json`."""


def rocm_errors(narrow: bool = False) -> Any:
    """The largest error that each explanation of the ROCm failure can cause, beside the one that was reported."""
    story = json.loads(DATA.read_text())
    limited = [h for h in story["hypotheses"] if h["max_error"] is not None]
    (cause,) = (h for h in story["hypotheses"] if h["max_error"] is None)
    reported, tolerance = story["reported"]["error"], story["batch"]["tolerance"]
    names = [h["name"] for h in limited] + [cause["name"]]
    figure, axes = pyplot.subplots(figsize=size(narrow, 8.6, 2.9, 4.6), layout="constrained")
    least = 1e-8
    height = 0.42 if narrow else 0.55
    shift = 0.14 if narrow else 0.0  # on a phone the name of an explanation is above its bar
    rows = [i + shift for i in range(len(names))]
    axes.barh(rows[:-1], [h["max_error"] - least for h in limited], height, left=least, color=COLORS[0])
    axes.barh(rows[-1], 10 - least, height, left=least, color=COLORS[1])
    for y, h in zip(rows, limited):
        place, ink = (h["max_error"] * 1.3, LIGHT["ink"]) if narrow else (2e-8, "#ffffff")
        axes.text(place, y, f"at most {h['max_error']:.1e}", va="center", color=ink, fontsize=9)
    axes.text(2e-8, rows[-1], "any size: the row is never written", va="center", color="#ffffff", fontsize=9)
    for value, label in ((tolerance, "test tolerance"), (reported, "reported error")):
        axes.axvline(value, color=LIGHT["ink"], linewidth=1.2, linestyle="--")
        text = f"{label}\n{value:.4g}" if narrow else f"{label} {value:.4g}"
        axes.text(value * 0.8, -0.75, text, ha="right", fontsize=9, va="center")
    axes.set_xscale("log")
    axes.set_xlim(least, 30)
    axes.set_ylim(len(names) - 0.5, -1.3 if narrow else -1.0)
    axes.set_yticks(range(len(names)), [""] * len(names) if narrow else names)
    if narrow:
        axes.tick_params(axis="y", length=0)
        for i, name in enumerate(names):
            axes.text(1.2e-8, i - 0.24, name, fontsize=9, va="center")
    axes.set_xlabel(wrapped("largest error that the explanation can cause in the failing row", narrow))
    return figure


def rocm_q_starts(narrow: bool = False) -> Any:
    """The memory of q_starts, as int64 and as the int32 words that the kernel reads."""
    starts = json.loads(DATA.read_text())["q_starts"]
    words, wrong, true = starts["read_as_int32"], starts["lengths"], starts["true_lengths"]
    figure, axes = pyplot.subplots(figsize=size(narrow, 8.6, 3.1, 3.6), layout="constrained")
    axes.set_axis_off()
    gap, font = (0.75, 7.5) if narrow else (0.0, 9.0)  # on a phone the titles are above the rows
    ys = [0.1 + gap, 1.3 + 2 * gap, 2.7 + 3 * gap, 3.7 + 4 * gap]
    for y, title in zip(ys, ("q_starts, int64", "read as int32", "new tokens as read", "new tokens")):
        if narrow:
            axes.text(0, y - 0.35, title, va="center", fontsize=9)
        else:
            axes.text(-0.15, y + 0.4, title, ha="right", va="center", fontsize=9)

    def number_cell(x: float, y: float, width: float, value: int, color: str | None) -> None:
        axes.add_patch(cell(x, y, width, 0.8, color or LIGHT["soft"]))
        ink = "#ffffff" if color else LIGHT["ink"]
        axes.text(x + width / 2, y + 0.4, str(value), ha="center", va="center", color=ink, fontsize=font)

    for i in range(0, len(words), 2):
        number_cell(i, ys[0], min(2, len(words) - i), starts["starts"][i // 2], COLORS[0])
    for i, word in enumerate(words):
        number_cell(i, ys[1], 1, word, COLORS[0] if i % 2 == 0 else None)
    for i, (read, length) in enumerate(zip(wrong, true)):
        number_cell(i + 0.5, ys[2], 1, read, COLORS[1] if length == 1 else None)
        number_cell(i + 0.5, ys[3], 1, length, COLORS[2] if length == 1 else None)
    note = f"The last sequence decodes one token. The kernel reads {wrong[-1]}, so it skips the sequence."
    axes.text(0, ys[3] + 1.2, wrapped(note, narrow), fontsize=9, va="top")
    axes.set_xlim(0 if narrow else -2.4, len(words) + 0.1)
    axes.set_ylim(ys[3] + (2.4 if narrow else 1.8), -0.2)
    return figure
