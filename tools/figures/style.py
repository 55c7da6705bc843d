"""Colors and fonts of the figures, and their SVG with colors that follow the reader's color scheme."""

from __future__ import annotations

import io
import re
import textwrap
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

LIGHT = {"ink": "#1f2328", "paper": "#fffffe", "faint": "#d0d7de", "soft": "#eef1f4"}
DARK = {"ink": "#e6edf3", "paper": "#1e2129", "faint": "#464c57", "soft": "#2b303a"}
COLORS = ("#3678b4", "#b5591c", "#358353", "#af50a0", "#8d721b", "#6a5dee")
"""Of sequences and series. White text on them has a contrast of at least 4.5; they have at least 3 on white and on dark gray."""

NARROW = 3.9
"""Width of a figure for a phone, in inches: it is shown without being scaled down much."""

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


def size(narrow: bool, width: float, height: float, narrow_height: float) -> tuple[float, float]:
    """The size of a figure in inches: for a page, or for a phone."""
    return (NARROW, narrow_height) if narrow else (width, height)


def cell(
    x: float, y: float, width: float, height: float, color: str, edge: str = LIGHT["paper"], linewidth: float = 0.7
) -> Rectangle:
    return Rectangle((x, y), width, height, facecolor=color, edgecolor=edge, linewidth=linewidth)


def wrapped(text: str, narrow: bool, width: int = 48) -> str:
    """Text in lines that fit a narrow figure; in one line otherwise."""
    return "\n".join(textwrap.wrap(text, width)) if narrow else text


def titled(axes: Axes, text: str, narrow: bool) -> None:
    """Sets the title of a panel."""
    axes.set_title(wrapped(text, narrow), loc="left", fontsize=10, weight="bold")


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
