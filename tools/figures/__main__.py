"""Draws docs/figures/*.svg: `python tools/figures [FOLDER]`.

The numbers come from the tables of docs/performance.md, from the workloads of `quire bench`, from a real page pool, from the
scheduler of the GPU kernels and from the output of examples/rocm_story, so a figure cannot disagree with them. Each figure has a
narrow variant for phones.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the schedule is computed in its interpreter

from page_table import page_table
from rocm_story import rocm_errors, rocm_q_starts
from schedule import schedule
from speed import roofline, speed
from style import as_svg
from tables import ROOT

FIGURES = {
    "speed": speed,
    "roofline": roofline,
    "page_table": page_table,
    "schedule": schedule,
    "rocm_errors": rocm_errors,
    "rocm_q_starts": rocm_q_starts,
}


def main(folder: Path = ROOT / "docs" / "figures") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (folder / f"{name}.svg").write_text(as_svg(draw()))
        (folder / f"{name}_narrow.svg").write_text(as_svg(draw(narrow=True)))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
