"""Text pictures for error messages: some cells of an array, with the invalid one marked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

AROUND = 5
"""Number of cells shown on each side of the invalid one."""


def row_picture(label: str, cells: Sequence[object] | torch.Tensor, bad: int, note: str = "") -> str:
    """One row of cells, the invalid one in brackets and underlined.

    >>> print(row_picture("page_table[2]", [12, 7, 900, 4], 2, "kv_len 60 needs 4 pages"))
      page_table[2]     12     7  [900]    4
                                  ^^^^^  kv_len 60 needs 4 pages
    """
    first, last = max(0, bad - AROUND), min(len(cells), bad + AROUND + 1)
    shown = cells[first:last].tolist() if isinstance(cells, torch.Tensor) else cells[first:last]
    width = max([len(str(cell)) for cell in shown], default=1) + 1
    line = f"  {label}  " + ("... " if first else "")
    under = 0, 0
    for i, cell in enumerate(shown, first):
        text = f"[{cell}]" if i == bad else f"{cell} "
        line += f"{text:>{width + 2}}"
        if i == bad:
            under = len(line) - len(text), len(text)
    line = (line + (" ..." if last < len(cells) else "")).rstrip()
    marks = " " * under[0] + "^" * under[1]
    return f"{line}\n{marks}" + (f"  {note}" if note else "")
