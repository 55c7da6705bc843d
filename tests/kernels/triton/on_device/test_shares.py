"""How the work of short rows is cut: into shares that follow each other and leave nothing out; and a piece tells its share."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.triton.arguments import Rows, Tile
from quire.kernels.triton.schedule import share_begin, share_of, share_out


class Only(NamedTuple):
    """Of the constants, those that cutting depends on."""

    SMALL: int
    REST: int
    LEAST: int = 2
    OPENING: int = 2
    SCAN: int = 16
    FEWEST: int = 0
    MOST: int = 2**31 - 1
    SHORT: int = 2**31 - 1
    LEFT: int | None = None
    TREE: bool = False
    INVARIANT: bool = False
    MANY: bool = False
    WIDE: bool = False
    UNIFORM: bool = False


@triton.jit
def cut_kernel(rows, begins, owners, facts, programs, T: tl.constexpr, C: tl.constexpr):
    shares = share_out(rows, tl.arange(0, C.SCAN), programs, T, C)
    tl.store(facts, shares.total)
    tl.store(facts + 1, shares.larges)
    tl.store(facts + 2, shares.large_to)
    tl.store(facts + 3, shares.smalls)
    for share in range(programs * (1 + C.SMALL) + 1):
        tl.store(begins + share, share_begin(share + shares.larges * 0, shares))
    for at in range(shares.total):
        tl.store(owners + at, share_of(at + shares.total * 0, shares))


def cut(
    kv_lens: list[int], programs: int, heads: int, device: str, **constants: int
) -> tuple[dict[str, int], list[int], list[int]]:
    """What is cut of decodes of these lengths: the facts, where shares begin, and whose each piece is."""
    seqs = len(kv_lens)
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    starts = torch.arange(seqs + 1, dtype=torch.int32, device=device)
    only = Only(**constants)
    facts = torch.zeros(4, dtype=torch.int32, device=device)
    begins = torch.full((programs * (1 + only.SMALL) + 1,), -1, dtype=torch.int32, device=device)
    owners = torch.full((10_000,), -1, dtype=torch.int32, device=device)
    rows = Rows(lens, 0, 0, lens, 1, starts, 1, None, seqs, seqs)
    cut_kernel[(1,)](rows, begins, owners, facts, programs, Tile.of(16, 32, 1, True, 1, heads), only)
    found = facts.tolist()
    return dict(zip(("total", "larges", "large_to", "smalls"), found)), begins.tolist(), owners[: found[0]].tolist()


BATCHES: dict[str, dict[str, Any]] = {
    "one-long-row": {"kv_lens": [4000], "programs": 6, "heads": 1},
    "as-many-units-as-programs": {"kv_lens": [320] * 3, "programs": 6, "heads": 2},
    "units-for-most-programs": {"kv_lens": [320] * 11, "programs": 6, "heads": 1},
    "many-units": {"kv_lens": [300] * 16, "programs": 6, "heads": 5},
    "ragged": {"kv_lens": [1, 900, 40, 0, 333, 2, 70, 600], "programs": 5, "heads": 3},
    "hardly-any": {"kv_lens": [40], "programs": 40, "heads": 1},
}


@pytest.mark.parametrize("small", [0, 1, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_shares_follow_each_other_and_leave_nothing_out(name: str, small: int, device: str) -> None:
    facts, begins, owners = cut(**BATCHES[name], device=device, SMALL=small, REST=8)
    assert begins[0] == 0 and begins[-1] == facts["total"] and begins == sorted(begins)
    assert facts["larges"] <= BATCHES[name]["programs"] and facts["smalls"] <= small * BATCHES[name]["programs"]
    for at, owner in enumerate(owners):
        assert begins[owner] <= at < begins[owner + 1], (at, owner)


def test_large_shares_are_whole_units_where_there_are_enough(device: str) -> None:
    """80 units of 12 pieces, 6 programs: 13 units each would leave 2, too little; so it is 12 each, and 8 to share out."""
    facts, begins, _ = cut(**BATCHES["many-units"], device=device, SMALL=4, REST=8)
    assert facts == {"total": 960, "larges": 6, "large_to": 6 * 12 * 12, "smalls": 24}
    assert [begin % 12 for begin in begins[:7]] == [0] * 7


def test_small_shares_are_worth_a_program_each(device: str) -> None:
    """An eighth of 127 pieces is left: 15, in shares of at least 2."""
    facts, begins, _ = cut(**BATCHES["one-long-row"], device=device, SMALL=4, REST=8)
    assert facts == {"total": 127, "larges": 6, "large_to": 112, "smalls": 7}
    assert all(begins[share + 1] - begins[share] >= 2 for share in range(6, 13))
