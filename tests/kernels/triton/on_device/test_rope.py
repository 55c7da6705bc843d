"""Rotations in the writer's launch, against float64, and what must not be touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.contract.call import Call
from quire.kernels.triton.host.tuning import SMALLEST, WRITE, WorkPerProgram
from quire.kernels.triton.host.write import WriteLauncher
from quire.launch import described
from support import rope as made
from support.launched import platform_at
from support.rope import GROUP, GUARD, KV_HEADS, LIVE, TOKENS, TURNS, Turn, check_keys, check_queries

ROWS = torch.arange(LIVE)
TWO = ("half-split", "norm-partial-interleaved")


def launch(call: Call, work: WorkPerProgram = WRITE) -> None:
    WriteLauncher(described("write", call)[0], platform_at(call.cache.device), work)(call)


def setting(turn: Turn, dtype: torch.dtype, device: str, format: str = "fp32", scales: str = "head", **how: Any) -> tuple[Any, ...]:
    rope, cache = turn.rope(device), made.cache_of(turn.head_dim, format, scales, device)
    return rope, cache, made.batch_of(device, **how), made.rows_of(turn, dtype, device)


@pytest.mark.parametrize("name", TURNS)
def test_every_way_to_rotate(name: str, device: str) -> None:
    turn = TURNS[name]
    rope, cache, (batch, own, slots), (q, k, v) = setting(turn, torch.bfloat16, device)
    at = made.positions_of(turn, own) if turn.axes is not None else own
    out = torch.full(q.shape, GUARD, dtype=q.dtype, device=device)
    given = at.to(device) if turn.axes is not None else None
    launch(Call(cache, batch, k=k, v=v, rope=rope, q_in=q, q_out=out, rope_positions=given))
    check_queries(turn, out, q, at, rope.q_norm)
    check_keys(cache, turn, k, at, rope.k_norm, ROWS, slots)
    assert torch.equal(cache.v.cpu().flatten(0, 1)[slots], v[:LIVE].float().cpu())
    assert (out[LIVE:] == GUARD).all(), "a padding row was written"


@pytest.mark.parametrize("format, scales", [("e4m3fn", "head"), ("e5m2", "tensor"), ("int8", "token"), ("bf16", "tensor")])
def test_formats(format: str, scales: str, device: str) -> None:
    turn = TURNS["norm"]
    rope, cache, (batch, own, slots), (_, k, v) = setting(turn, torch.bfloat16, device, format, scales)
    launch(Call(cache, batch, k=k, v=v, rope=rope))
    check_keys(cache, turn, k, own, rope.k_norm, ROWS, slots)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", TWO)
def test_given_positions_and_slots(name: str, index: torch.dtype, device: str) -> None:
    """Both integer types, with strides; a token without a slot is rotated all the same."""
    turn = TURNS[name]
    rope, cache, (batch, own, slots), (q, k, v) = setting(turn, torch.float32, device, index=index)
    given = torch.cat((slots, torch.tensor([90, 91])))
    given[[2, 9]] = -1
    kept = (given[:LIVE] >= 0).nonzero().flatten()
    at = made.positions_of(turn, own, index)
    strided = torch.stack((at, at * 0), -1).to(device)[:, 0]
    out = torch.empty_like(q)
    call = Call(cache, batch, k=k, v=v, slots=given.to(device, index), rope=rope, q_in=q, q_out=out, rope_positions=strided)
    launch(call, SMALLEST)
    check_queries(turn, out, q, at.long(), rope.q_norm)
    check_keys(cache, turn, k, at.long(), rope.k_norm, kept, slots[kept])


@pytest.mark.parametrize("name", TWO)
def test_in_place_and_zeros_in_padding(name: str, device: str) -> None:
    turn = TURNS[name]
    rope, cache, (batch, own, slots), (q, k, v) = setting(turn, torch.bfloat16, device)
    before = q.clone()
    launch(Call(cache, batch, k=k, v=v, rope=rope, q_in=q, q_out=q))
    check_queries(turn, q, before, own, rope.q_norm)
    check_keys(cache, turn, k, own, rope.k_norm, ROWS, slots)
    assert q[LIVE:].isnan().all()
    out = torch.full_like(before, GUARD)
    launch(Call(cache, batch, k=k, v=v, rope=rope, q_in=before, q_out=out, zero_padding=True))
    assert torch.equal(out[:LIVE], q[:LIVE]) and not out[LIVE:].any()


@pytest.mark.parametrize("bad", [-1, 32, 2**31 + 5, 2**32 + 3, -(2**40)])
@pytest.mark.parametrize("name", ["half-split", "sections"])
def test_a_position_outside_of_the_tables_gives_nan(name: str, bad: int, device: str) -> None:
    turn = TURNS[name]
    rope, cache, (batch, own, slots), (q, k, v) = setting(turn, torch.float32, device)
    at = made.positions_of(turn, own)
    at[(-1, 3) if at.dim() == 2 else 3] = bad
    out = torch.empty_like(q)
    launch(Call(cache, batch, k=k, v=v, rope=rope, q_in=q, q_out=out, rope_positions=at.to(device)))
    assert out[3].isnan().all() and cache.k.cpu().flatten(0, 1)[slots[3]].isnan().all()
    good = torch.arange(LIVE) != 3
    assert not out[:LIVE][good].isnan().any() and not cache.k.cpu().flatten(0, 1)[slots[good]].isnan().any()


def test_a_shard_rotates_all_queries_and_stores_its_keys(device: str) -> None:
    turn = TURNS["half-split"]
    rope, cache, (batch, own, _), (q, k, v) = setting(turn, torch.float32, device, shard=(1, 2, 3))
    out = torch.empty_like(q)
    launch(Call(cache, batch, k=k, v=v, rope=rope, q_in=q, q_out=out))
    check_queries(turn, out, q, own, None)
    mine = (own // 3 % 2 == 1).nonzero().flatten()
    key = own[mine] // 6 * 3 + own[mine] % 3
    table, seq = batch.page_table.cpu().long(), batch.sequences_of_tokens(LIVE).cpu()[mine]
    slots = table[seq, key // made.PAGE_SIZE] * made.PAGE_SIZE + key % made.PAGE_SIZE
    check_keys(cache, turn, k, own, None, mine, slots)


def test_a_table_that_vectors_can_read(device: str) -> None:
    """A whole number of 16 bytes in each row: as tables usually are, and as those above are not."""
    turn = TURNS["half-split"]
    rope, cache, (batch, own, slots), (q, k, v) = setting(turn, torch.float32, device)
    rope = type(rope)(rope.cos.clone(), rope.sin.clone())
    assert rope.traits(True).vectors and not turn.rope(device).traits(True).vectors
    out = torch.empty(TOKENS, KV_HEADS * GROUP, 16, device=device)
    launch(Call(cache, batch, k=k, v=v, rope=rope, q_in=q, q_out=out))
    check_queries(turn, out, q, own, None)
    check_keys(cache, turn, k, own, None, ROWS, slots)
