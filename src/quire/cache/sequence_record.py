"""The record that a pool keeps for each sequence: the meaning of each column of `PagePool._records`, int64 `[sequences,
FIELDS]`."""

from __future__ import annotations

LENGTH = 0
"""Number of tokens."""
PAGES = 1
"""Number of page-table columns: pages that the sequence holds or has dropped."""
LAST = 2
"""The page in the last column; -1 if there is none."""
DROPPED = 3
"""Number of leading columns whose pages were dropped."""
WIDTH = 4
"""The width of the `PageRows` that stores the page ids; 0 if the sequence has no pages."""
ROW = 5
"""The row in that `PageRows`."""
OWN = 6
"""1 if the last run of tokens was written by this sequence, 0 if by an ancestor or if there is none."""
ID = 7
"""The sequence id; -1 once it is freed."""
FIELDS = 8

LONGEST = 2**31 - 1
"""The maximum number of tokens of a sequence: lengths in a batch are int32."""
