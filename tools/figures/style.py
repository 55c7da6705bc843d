"""Colors and fonts of the figures, and their SVG with colors that follow the reader's color scheme."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.patches import Rectangle

LIGHT = {"ink": "#1f2328", "paper": "#fffffe", "faint": "#d0d7de", "soft": "#eef1f4"}
DARK = {"ink": "#e6edf3", "paper": "#1e2129", "faint": "#464c57", "soft": "#2b303a"}
COLORS = ("#3b82c4", "#e07b39", "#3f9d63", "#b65fa8", "#c9a227", "#7a6ff0")
"""Of sequences and series: readable on white and on dark gray."""

matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "quire",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": LIGHT["ink"],
        "axes.labelcolor": LIGHT["ink"],
        "axes.facecolor": LIGHT["paper"],
        "figure.facecolor": LIGHT["paper"],
        "text.color": LIGHT["ink"],
        "xtick.color": LIGHT["ink"],
        "ytick.color": LIGHT["ink"],
        "grid.color": LIGHT["faint"],
        "legend.frameon": False,
    }
)


def cell(x: float, y: float, width: float, height: float, color: str, edge: str = LIGHT["paper"]) -> Rectangle:
    return Rectangle((x, y), width, height, facecolor=color, edgecolor=edge, linewidth=0.7)


def as_svg(figure: Any) -> str:
    """The figure as SVG with CSS variables for the colors that depend on the color scheme."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    text = written.getvalue()
    for name, color in LIGHT.items():
        text = text.replace(color, f"var(--{name}, {color})")
    text = re.sub(r"font-family: [^;\"]*", "font-family: Helvetica, Arial, sans-serif", text)
    style = f"<style>:root {{ {css(LIGHT)} }} @media (prefers-color-scheme: dark) {{ :root {{ {css(DARK)} }} }}</style>"
    text = re.sub(r"(<svg [^>]*>)", lambda found: f"{found[1]}\n {style}", text, count=1)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def css(colors: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())
