"""What `run.py` makes of racecheck's words, and how tests are dealt out. No GPU is needed for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpu.run import hazards
from support.share import pytest_collection_modifyitems

HANDED = """========= Error: Race reported between Read access at prefill_kernel+0x100 in prefill.py:28
=========     and Write access at prefill_kernel+0xd760 in prefill.py:28 [9 hazards]
=========     and Write access at prefill_kernel+0x164e0 in prefill.py:54 [6 hazards]
========= """


@pytest.mark.parametrize(
    "said, found",
    [
        (HANDED, (1, 0)),
        (HANDED.replace("prefill.py:54", "loader.py:54"), (0, 1)),
        (f"{HANDED}\n{HANDED.replace('prefill.py', 'rings.py')}", (1, 1)),
        ("========= Error: Invalid __global__ read of size 4 bytes at attend_kernel+0x10 in prefill.py:28", (0, 1)),
        ("========= Error: Race reported between Read access at a+0x1 and Write access at a+0x2", (0, 1)),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", (0, 0)),
    ],
    ids=["the-compilers", "one-access-is-ours", "both", "not-a-race", "without-a-place", "none"],
)
def test_hazards_are_classified(said: str, found: tuple[int, int]) -> None:
    assert hazards(said.splitlines()) == found


@pytest.mark.parametrize("share, mine", [("1/3", [1, 4, 7]), ("0/2/4", [0, 1, 2, 3, 8, 9]), ("1/2/4", [4, 5, 6, 7])])
def test_shares(share: str, mine: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_TEST_SHARE", share)
    items, left = list(range(10)), []
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: left.extend(items)))
    pytest_collection_modifyitems(config, items)
    assert items == mine and sorted(items + left) == list(range(10))
