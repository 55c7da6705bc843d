"""What an engine may get wrong without a fault: ids that do not exist, tables that are too short, hints that are too low. And no
call waits for the card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import quire
from gpu.calls import DEVICE, attend, attend_and_check, check, check_but, every, needs_gpu
from support.scenario import build

LENS: dict[str, Any] = {"q_lens": [1, 40, 0, 3, 1], "kv_lens": [150, 57, 60, 75, 700], "padding": 2}
BF16: dict[str, Any] = {"format": "bf16", "q_dtype": "bf16", "head_dim": 64}
CASES: dict[str, dict[str, Any]] = {
    "full": {**BF16},
    "context": {**BF16, "form": "context"},
    "window": {**BF16, "window": 60},
    "bytes": {"format": "e4m3fn", "q_dtype": "bf16", "head_dim": 64},
    "token-scales": {"format": "int8", "scales": "token", "q_dtype": "bf16"},
}
IDS = {
    "too-large": 10**9,
    "one-too-large": None,
    "minus-one": -1,
    "lowest": -(2**31),
    "beyond-32-bits": 2**40,
    "beyond-and-0": 2**40 + 2**32,
}


@needs_gpu
@every
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", IDS)
def test_a_page_that_does_not_exist_makes_its_row_nan(which: str, name: str, kernel: str) -> None:
    """Rows that are one tile, rows of many, rows that are shared out: all of it is NaN, and no other row is."""
    bad = IDS[which]
    index = torch.int64 if bad is not None and bad > 2**31 else torch.int32
    s = build(31, **LENS, **CASES[name], index=(index, torch.int32, torch.int32), device=DEVICE)
    table = s.batch.page_table
    for row in (0, 1, 3, 4):
        needed = (table[row] >= 0).nonzero().flatten().tolist()
        for column in {needed[0], needed[-1]}:
            before = int(table[row, column])
            table[row, column] = s.cache.pages if bad is None else bad
            check_but(s, row, *attend(s, kernel))
            table[row, column] = before
    check(s, *attend(s, kernel))


@needs_gpu
@every
@pytest.mark.parametrize("row", [0, 4])
def test_a_table_that_is_too_short_makes_its_row_nan(row: int, kernel: str) -> None:
    kv_lens = [20, 20, 30, 9, 32]
    kv_lens[row] = 60
    s = build(32, [1, 18, 0, 2, 20], kv_lens, **BF16, device=DEVICE)
    s.batch = quire.Batch(s.batch.page_table[:, :2], s.batch.kv_lens, s.batch.q_starts)
    for _ in range(2):
        check_but(s, row, *attend(s, kernel))
    s.batch = quire.Batch(s.batch.page_table[:, :2].contiguous(), s.batch.kv_lens, s.batch.q_starts)
    check_but(s, row, *attend(s, kernel))


@every
@pytest.mark.parametrize("hints", [(1, 1), (1, None), (None, 1), (4, 64)], ids=str)
def test_low_hints_do_not_truncate(hints: tuple[int | None, int | None], kernel: str) -> None:
    if kernel == "triton-decode" and hints[0] is None:
        pytest.skip("without a hint the dispatcher does not decode this")
    s = build(33, [1, 300 if DEVICE == "cuda" else 90, 0, 1], [700, 410, 9, 20], **BF16, device=DEVICE)
    s.batch.max_q_len, s.batch.max_kv_len = hints
    for name in (kernel, None):
        out = torch.full(s.q.shape, torch.nan, dtype=s.q.dtype, device=DEVICE)
        out, lse = quire.attend(s.q, s.cache, s.batch, out=out, lse=True, kernel=name)
        check(s, out, lse)


class no_waiting:
    """Within it, whatever waits for the card raises."""

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_waiting_is_noticed() -> None:
    x = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError), no_waiting():
        x.nonzero()


@needs_gpu
@every
@pytest.mark.parametrize("name", CASES)
def test_attend_does_not_wait(name: str, kernel: str) -> None:
    """Neither the first call of a kind nor a bound one."""
    s = build(34, **LENS, **CASES[name], sinks=True, device=DEVICE)
    outs = [torch.full(s.q.shape, 40.0, dtype=s.q.dtype, device=DEVICE) for _ in range(3)]
    with no_waiting():
        results = [attend(s, kernel, out=out) for out in outs]
    for out, lse in results:
        check(s, out, lse)


@needs_gpu
@pytest.mark.parametrize("slots", ["given", "derived"])
@pytest.mark.parametrize("operation", ["write", "step"])
def test_writes_do_not_wait(operation: str, slots: str) -> None:
    pool = quire.PagePool(20, 16, device=DEVICE)
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64, dtype=torch.float8_e4m3fn, scales="token")
    batch = pool.step({pool.sequence(): 40, pool.sequence(): 1})
    if slots == "given":
        batch.slots = batch.slots_of_tokens(41, 16)
    else:
        batch.slots = None
    q, k, v = (torch.randn(41, heads, 64, device=DEVICE).bfloat16() for heads in (8, 2, 2))
    calls: dict[str, Callable[[], Any]] = {
        "write": lambda: quire.write(k, v, cache, batch, kernel="triton"),
        "step": lambda: quire.step(q, k, v, cache, batch),
    }
    with no_waiting():
        for _ in range(3):
            calls[operation]()
    assert cache.k_scale is not None and (cache.k_scale != 1).any()


@every
def test_rules_read_values_on_request(kernel: str) -> None:
    """`check="full"` names the cell; without it the same call only gives NaN."""
    s = build(35, **LENS, **BF16, device=DEVICE)
    attend_and_check(s, kernel)
    s.batch.page_table[1, 1] = s.cache.pages + 5
    with pytest.raises(quire.ContractError, match="page_table"):
        quire.attend(s.q, s.cache, s.batch, s.options, kernel=kernel, check="full")
