"""What a pool knows about each sequence, as one row of integers."""

from __future__ import annotations

LENGTH = 0
"""Its tokens."""
PAGES = 1
"""Its columns: pages that it holds or has dropped."""
LAST = 2
"""The page in its last column; -1 if there is none."""
DROPPED = 3
"""Its first columns that hold no page any more."""
WIDTH = 4
"""The width of the table that has its row; 0 if it has none."""
ROW = 5
"""Its row in that table."""
OWN = 6
"""1 if its last run is its own, 0 if it is an ancestor's or there is none."""
ID = 7
"""Its id; -1 once it is freed."""
FIELDS = 8

LONGEST = 2**31 - 1
"""The most tokens of a sequence: lengths in a batch are int32."""
