"""Rotations in the writer's launch, against float64, and what must not be touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire import KVCache, PagePool
from quire.contract.call import Call
from quire.kernels.torch import write as plain
from quire.kernels.triton.host.tuning import SMALLEST, WRITE, WorkPerProgram
from quire.kernels.triton.host.write import WriteLauncher
from quire.launch import described
from support import rope as made
from support.launched import platform_at
from support.rope import GROUP, GUARD, KV_HEADS, LATENT_TURNS, LIVE, TOKENS, TURNS, Turn, check_keys, check_queries

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


# Latent caches, of which V is a part of K.


def latent_setting(turn: Turn, dtype: torch.dtype, device: str, *format: str) -> tuple[Any, ...]:
    """The two parts of keys, as a write takes them, in place of k and v; and whole keys."""
    cache, (q, k, _) = made.cache_of(turn.head_dim, *format, device=device, v_in_k=turn.v_in_k), made.rows_of(turn, dtype, device)
    first, rest = k[..., : turn.v_in_k], k[..., turn.v_in_k :].contiguous()
    return turn.rope(device), cache, made.batch_of(device), (q, first, rest), k


@pytest.mark.parametrize("name", LATENT_TURNS)
def test_every_way_to_rotate_for_a_latent_cache(name: str, device: str) -> None:
    """Into a buffer, then in place."""
    turn = LATENT_TURNS[name]
    rope, cache, (batch, own, slots), (q, first, rest), k = latent_setting(turn, torch.bfloat16, device)
    at = made.positions_of(turn, own) if turn.axes is not None else own
    out = torch.full(q.shape, GUARD, dtype=q.dtype, device=device)
    given = at.to(device) if turn.axes is not None else None
    launch(Call(cache, batch, k=first, v=rest, rope=rope, q_in=q, q_out=out, rope_positions=given))
    check_queries(turn, out, q, at, None)
    check_keys(cache, turn, k, at, rope.k_norm, ROWS, slots)
    assert (out[LIVE:] == GUARD).all(), "a padding row was written"
    launch(Call(cache, batch, k=first, v=rest, rope=rope, q_in=q, q_out=q, rope_positions=given), SMALLEST)
    assert torch.equal(q[:LIVE], out[:LIVE]) and q[LIVE:].isnan().all()


@pytest.mark.parametrize("format, scales", [("e4m3fn", "token"), ("e5m2", "head"), ("int8", "token"), ("int4", "token")])
def test_formats_of_a_latent_cache(format: str, scales: str, device: str) -> None:
    turn = LATENT_TURNS["norm"]
    rope, cache, (batch, own, slots), (_, first, rest), k = latent_setting(turn, torch.bfloat16, device, format, scales)
    launch(Call(cache, batch, k=first, v=rest, rope=rope))
    check_keys(cache, turn, k, own, rope.k_norm, ROWS, slots)


def test_rotated_fp8_ds_mla(device: str) -> None:
    """The bytes that the torch kernel stores."""
    turn, (batch, _, _) = LATENT_TURNS["deepseek"], made.batch_of(device)
    rope = replace(turn, norm=None).rope(device)
    _, k, _ = made.rows_of(turn, torch.bfloat16, device)
    how: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": 576, "v_in_k": 512, "format": "fp8_ds_mla", "device": device}
    caches = [KVCache.allocate(PagePool(made.PAGES, made.PAGE_SIZE), **how) for _ in range(2)]
    calls = [Call(cache, batch, k=k[..., :512], v=k[..., 512:], rope=rope) for cache in caches]
    launch(calls[0])
    plain.launcher(None, None)(calls[1])  # type: ignore[arg-type]
    codes, rest = ([cache.k[..., part].contiguous() for cache in caches] for part in (slice(528), slice(528, None)))
    assert torch.equal(*codes) and codes[0].any()
    # Two products and a sum in fp32, fused or not, then bf16.
    torch.testing.assert_close(*(x.view(torch.bfloat16).float() for x in rest), rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_latent_at_a_position_outside_of_the_tables_is_nan(in_place: bool, device: str) -> None:
    """With what is behind it, in q too; a new tensor has zeros in padding rows."""
    turn = LATENT_TURNS["half-split-odd"]
    rope, cache, (batch, own, slots), (q, first, rest), _ = latent_setting(turn, torch.float32, device)
    at = made.positions_of(turn, own)
    at[3] = 32
    out = q if in_place else torch.full_like(q, GUARD)
    call = Call(cache, batch, k=first, v=rest, rope=rope, q_in=q, q_out=out, rope_positions=at.to(device))
    call.zero_padding = not in_place
    launch(call)
    assert out[3].isnan().all() and cache.k.cpu().flatten(0, 1)[slots[3]].isnan().all()
    good = torch.arange(LIVE) != 3
    assert not out[:LIVE][good].isnan().any() and not cache.k.cpu().flatten(0, 1)[slots[good]].isnan().any()
    assert in_place or not out[LIVE:].any()
