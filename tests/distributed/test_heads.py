"""How heads are divided: the table of docs/integrations/distributed.md, and every division that is possible."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire import ArgumentError
from quire.distributed.heads import allowed_ranks, split

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "distributed.md"


def shown(heads: slice) -> str:
    return str(heads.start) if heads.stop == heads.start + 1 else f"{heads.start}-{heads.stop - 1}"


def test_the_table_of_the_page() -> None:
    rows = re.findall(r"^\| (\d+) \| ([\d· -]+) \| ([\d· -]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 3
    for ranks, q, kv in rows:
        divided = [split(8, 2, int(ranks), rank) for rank in range(int(ranks))]
        assert q == " · ".join(shown(each.q) for each in divided) and kv == " · ".join(shown(each.kv) for each in divided)


@pytest.mark.parametrize("q_heads, kv_heads", [(8, 2), (12, 3), (32, 4), (6, 6), (7, 1), (24, 6)])
def test_every_query_head_is_once_and_with_its_kv_head(q_heads: int, kv_heads: int) -> None:
    group = q_heads // kv_heads
    for ranks in allowed_ranks(q_heads, kv_heads):
        divided = [split(q_heads, kv_heads, ranks, rank) for rank in range(ranks)]
        assert [head for each in divided for head in range(q_heads)[each.q]] == list(range(q_heads))
        for each in divided:
            mine = range(kv_heads)[each.kv]
            assert {head // group for head in range(q_heads)[each.q]} == set(mine)
            # Quire's kernels take query head i of a rank with KV head i // group of the rank.
            local = len(range(q_heads)[each.q]) // len(mine)
            assert [mine[i // local] for i in range(len(mine) * local)] == [head // group for head in range(q_heads)[each.q]]
        assert sum(len(range(kv_heads)[each.kv]) for each in divided) == kv_heads * divided[0].replicas


@pytest.mark.parametrize("ranks", [n for n in range(1, 40) if n not in (1, 2, 4, 8, 16, 32)])
def test_other_numbers_of_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(ArgumentError, match="allowed: 1, 2, 4, 8, 16, 32 ranks for 32 q_heads and 8 kv_heads"):
        split(32, 8, ranks, 0)


@pytest.mark.parametrize("q_heads, kv_heads", [(0, 1), (8, 0), (True, 1), (8.0, 2)])
def test_sizes_that_are_refused(q_heads: int, kv_heads: int) -> None:
    with pytest.raises(ArgumentError, match=r"heads: given .*; allowed: an int of 1 or more"):
        split(q_heads, kv_heads, 1, 0)
