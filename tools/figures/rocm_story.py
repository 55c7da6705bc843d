"""The failure of vLLM's test on ROCm, from the output of examples/rocm_story."""

from __future__ import annotations

import json
from typing import Any

from matplotlib import pyplot
from style import COLORS, LIGHT, cell
from tables import ROOT

DATA = ROOT / "docs" / "data" / "rocm_story.json"
"""Written by `python examples/rocm_story --json`."""


def rocm_errors() -> Any:
    """The largest error that each explanation of the ROCm failure can cause, beside the one that was reported."""
    story = json.loads(DATA.read_text())
    limited = [h for h in story["hypotheses"] if h["max_error"] is not None]
    (cause,) = (h for h in story["hypotheses"] if h["max_error"] is None)
    reported, tolerance = story["reported"]["error"], story["batch"]["tolerance"]
    names = [h["name"] for h in limited] + [cause["name"]]
    figure, axes = pyplot.subplots(figsize=(8.6, 2.9), layout="constrained")
    least = 1e-8
    axes.barh(range(len(limited)), [h["max_error"] - least for h in limited], 0.55, left=least, color=COLORS[0])
    axes.barh(len(limited), 10 - least, 0.55, left=least, color=COLORS[1])
    for i, h in enumerate(limited):
        axes.text(2e-8, i, f"at most {h['max_error']:.1e}", va="center", color="#ffffff", fontsize=9)
    axes.text(2e-8, len(limited), "any size: the row is never written", va="center", color="#ffffff", fontsize=9)
    for value, label in ((tolerance, "test tolerance"), (reported, "reported error")):
        axes.axvline(value, color=LIGHT["ink"], linewidth=1.2, linestyle="--")
        axes.text(value * 0.8, -0.75, f"{label} {value:.4g}", ha="right", fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(least, 30)
    axes.set_ylim(len(names) - 0.5, -1.0)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("largest error that the explanation can cause in the failing row")
    return figure


def rocm_q_starts() -> Any:
    """The memory of q_starts, as int64 and as the int32 words that the kernel reads."""
    starts = json.loads(DATA.read_text())["q_starts"]
    words, wrong, true = starts["read_as_int32"], starts["lengths"], starts["true_lengths"]
    figure, axes = pyplot.subplots(figsize=(8.6, 3.1), layout="constrained")
    axes.set_axis_off()
    titles = ("q_starts, int64", "read as int32", "new tokens as read", "new tokens")
    for y, title in zip((0.5, 1.7, 3.1, 4.1), titles):
        axes.text(-0.15, y, title, ha="right", va="center", fontsize=9)
    for i in range(0, len(words), 2):
        width = min(2, len(words) - i)
        axes.add_patch(cell(i, 0.1, width, 0.8, COLORS[0]))
        axes.text(i + width / 2, 0.5, str(starts["starts"][i // 2]), ha="center", va="center", color="#ffffff", fontsize=9)
    for i, word in enumerate(words):
        axes.add_patch(cell(i, 1.3, 1, 0.8, COLORS[0] if i % 2 == 0 else LIGHT["soft"]))
        ink = "#ffffff" if i % 2 == 0 else LIGHT["ink"]
        axes.text(i + 0.5, 1.7, str(word), ha="center", va="center", color=ink, fontsize=9)
    for i, (read, length) in enumerate(zip(wrong, true)):
        decodes = length == 1
        for y, value, color in ((2.7, read, COLORS[1]), (3.7, length, COLORS[2])):
            axes.add_patch(cell(i + 0.5, y, 1, 0.8, color if decodes else LIGHT["soft"]))
            ink = "#ffffff" if decodes else LIGHT["ink"]
            axes.text(i + 1, y + 0.4, str(value), ha="center", va="center", color=ink, fontsize=9)
    note = f"The last sequence decodes one token. The kernel reads {wrong[-1]}, so it skips the sequence."
    axes.text(0, 5.1, note, fontsize=9)
    axes.set_xlim(-2.4, len(words) + 0.1)
    axes.set_ylim(5.5, -0.2)
    return figure
