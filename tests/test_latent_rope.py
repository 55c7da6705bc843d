"""RoPE in writes and steps of latent caches: every kernel of this CPU against float64, what is not touched, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quire
from quire import ContractError, KVCache, Options, PagePool, Rope, reference
from quire.contract.call import Call
from quire.errors import QuantisationWarning
from quire.kernels.native import write as native
from quire.kernels.torch import write as plain
from support import rope as made
from support.kernels import each_kernel, levels  # noqa: F401
from support.rope import GROUP, GUARD, KV_HEADS, LATENT_TURNS, LIVE, TOKENS, Turn, check_keys, check_queries

on_each = pytest.mark.usefixtures("each_kernel")
ROWS = torch.arange(LIVE)


def parts_of(turn: Turn, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return k[..., : turn.v_in_k].contiguous(), k[..., turn.v_in_k :].contiguous()


@on_each
@pytest.mark.parametrize("given", [None, torch.int64], ids=["own", "given"])
@pytest.mark.parametrize("name", LATENT_TURNS)
def test_every_way_to_rotate(name: str, given: torch.dtype | None) -> None:
    """Whole keys and their parts; queries into a new tensor and in place."""
    turn = LATENT_TURNS[name]
    if given is None and turn.axes is not None:
        pytest.skip("a batch has positions of one axis")
    dtype = torch.bfloat16 if given is None else torch.float32
    rope, (batch, own, slots), (q, k, _) = turn.rope(), made.batch_of(), made.rows_of(turn, dtype)
    positions = None if given is None else made.positions_of(turn, own, given)
    at = own if positions is None else positions.long()
    before = q.clone(), k.clone()
    for keys, in_place in ((k, False), (parts_of(turn, k), True)):
        cache = made.cache_of(turn.head_dim, v_in_k=turn.v_in_k)
        mine = before[0].clone() if in_place else q
        turned = quire.write(keys, None, cache, batch, rope=rope, q=mine, q_out=mine if in_place else None, positions=positions)
        assert turned is not None and turned.dtype is dtype and (turned is mine) == in_place
        check_queries(turn, turned, before[0], at, None)
        check_keys(cache, turn, before[1], at, rope.k_norm, ROWS, slots)
        padding = turned[LIVE:]
        assert padding.isnan().all() if in_place else not padding.any()
    assert all(torch.equal(a[:LIVE], b[:LIVE]) for a, b in zip((q, k), before)), "an input was changed"


@on_each
@pytest.mark.parametrize("format, scales", [
    *((format, scales) for format in ("e4m3fn", "e5m2", "int8") for scales in ("tensor", "head", "token")),
    ("int4", "token"), ("bf16", "tensor"), ("fp16", "tensor"),
])  # fmt: skip
def test_every_format(format: str, scales: str) -> None:
    """One scale for a token is that of rotated keys: the largest element may be in either part."""
    turn = LATENT_TURNS["norm"]
    rope, cache, (batch, own, slots) = turn.rope(), made.cache_of(24, format, scales, v_in_k=16), made.batch_of()
    _, k, _ = made.rows_of(turn, torch.bfloat16)
    if scales == "token":
        k = torch.cat((k[..., :16], k[..., 16:] * torch.tensor([1.0, 4.0], dtype=k.dtype)[:, None]), -1)
    quire.write(parts_of(turn, k), None, cache, batch, rope=rope)
    check_keys(cache, turn, k, own, rope.k_norm, ROWS, slots)


@on_each
def test_fp8_ds_mla() -> None:
    """The codes of a write of keys that were normalised and rotated before, but for some that are next to a boundary."""
    turn = LATENT_TURNS["deepseek"]
    rope, (batch, own, slots) = turn.rope(), made.batch_of()
    _, k, _ = made.rows_of(turn, torch.bfloat16)
    caches = [
        KVCache.allocate(PagePool(made.PAGES, made.PAGE_SIZE), kv_heads=KV_HEADS, head_dim=576, v_in_k=512, format="fp8_ds_mla")
        for _ in range(2)
    ]
    exact, error = turn.exact(k[:LIVE], own, rope.k_norm)
    quire.write(parts_of(turn, k), None, caches[0], batch, rope=rope)
    quire.write(exact.float(), None, caches[1], slots=slots)
    got, want = (cache.k_format.unpack(cache.k).flatten(0, 1)[slots].double() for cache in caches)
    # Numbers of 3 bits of mantissa are 1 / 8 of their power of two apart; below the smallest normal one, 2 ** -9 of a scale.
    largest = exact[..., :512].unflatten(-1, (4, 128)).abs().amax(-1).repeat_interleave(128, -1)
    allowed = (want[..., :512].abs() / 8 + largest / 448 * 2.0**-9) * 1.001
    assert ((got - want)[..., :512].abs() <= allowed).all()
    codes = [cache.k.flatten(0, 1)[slots][..., :512] for cache in caches]
    assert (codes[0] == codes[1]).double().mean() > 0.98
    rest, loss = exact[..., 512:], error[..., 512:]
    assert ((got[..., 512:] - rest).abs() <= made.rounded(rest, loss, torch.bfloat16)).all()


@on_each
def test_slots_and_buffers() -> None:
    """A token without a slot is rotated and not stored; padding rows are touched neither in place nor in a buffer."""
    turn, (batch, own, slots) = LATENT_TURNS["norm"], made.batch_of()
    rope, cache = turn.rope(), made.cache_of(24, v_in_k=16)
    q, k, _ = made.rows_of(turn, torch.bfloat16)
    given = torch.cat((slots, torch.tensor([90, 91])))
    given[[2, 9]] = -1
    kept = (given[:LIVE] >= 0).nonzero().flatten()
    buffer = torch.full((TOKENS, KV_HEADS * GROUP, 2 * 24), GUARD, dtype=q.dtype)[..., ::2]
    assert quire.write(k, None, cache, batch, slots=given, rope=rope, q=q, q_out=buffer) is buffer
    check_queries(turn, buffer, q, own, None)
    check_keys(cache, turn, k, own, rope.k_norm, kept, slots[kept])
    assert (buffer[LIVE:] == GUARD).all()


@on_each
@pytest.mark.parametrize("format", [None, "fp8_ds_mla"])
def test_a_step_attends_with_rotated_queries_and_keys(format: str | None) -> None:
    """DeepSeek's frequencies (YaRN), two steps, and the same in plain torch."""
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope = Rope.make(64, 10000.0, 64, scaling=scaling, interleaved=True)
    pool, g = PagePool(16, 4), torch.Generator().manual_seed(2)
    how: dict[str, Any] = {"dtype": torch.float32} if format is None else {"format": format}
    cache = KVCache.allocate(pool, kv_heads=1, head_dim=576, v_in_k=512, **how, ledger=True)
    a, b, keys, options = pool.sequence(), pool.sequence(), [], Options(scale=192**-0.5)
    for counts in ((5, 9), (1, 3)):
        batch = pool.step({a: counts[0], b: counts[1]})
        q, latent, part = (torch.randn(sum(counts), *shape, generator=g) for shape in ((4, 576), (1, 512), (1, 64)))
        before = q.clone()
        with quire.checked():
            out, lse = quire.step(q, (latent, part), None, cache, batch, options, rope=rope, lse=True)
        assert torch.equal(q, before)
        turned = rope.rotate(q, batch.positions, v_in_k=512)
        assert torch.equal(turned[..., :512], q[..., :512])
        assert torch.equal(turned[..., 512:], rope.rotate(q[..., 512:], batch.positions))
        keys.append(torch.cat((latent, rope.rotate(part, batch.positions)), -1).split(counts))
        for i, rows in enumerate(torch.arange(sum(counts)).split(counts)):
            k = torch.cat([part[i] for part in keys])
            if format is not None:
                page, offset = batch.page_table[i].long(), torch.arange(k.shape[0])
                k = cache.k_format.unpack(cache.k)[page[offset // 4], offset % 4]
            want, want_lse = reference.attention(turned[rows].double(), k.double(), k[..., :512].double(), scale=192**-0.5)
            torch.testing.assert_close(out[rows].double(), want, atol=2e-5, rtol=0)
            torch.testing.assert_close(lse[rows].double(), want_lse, atol=2e-5, rtol=0)


def launched(how: str, call: Call) -> None:
    """One launch without any check."""
    (plain if how == "torch" else native).launcher(None, None)(call)  # type: ignore[arg-type]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("how", ["torch", pytest.param("native", marks=pytest.mark.skipif(not levels(), reason="not built"))])
def test_a_position_outside_of_the_tables_gives_nan(how: str, in_place: bool) -> None:
    """What no check saw: the row of q, and the key, are NaN in every element, the latent too; all others are right."""
    turn, (batch, own, slots) = LATENT_TURNS["half-split-odd"], made.batch_of()
    rope, cache = turn.rope(), made.cache_of(33, v_in_k=20)
    q, k, _ = made.rows_of(turn, torch.float32)
    at = made.positions_of(turn, own)
    at[3] = 32
    out = q.clone() if in_place else torch.empty_like(q)
    rows = parts_of(turn, k)
    launched(how, Call(cache, batch, k=rows[0], v=rows[1], rope=rope, q_in=out if in_place else q, q_out=out, rope_positions=at))
    assert out[3].isnan().all() and cache.k.flatten(0, 1)[slots[3]].isnan().all()
    at[3], out[3] = 0, turn.exact(q[3:4], at[3:4] * 0, None)[0]
    cache.k.flatten(0, 1)[slots[3]] = turn.exact(k[3:4], at[3:4] * 0, None)[0].float()
    check_queries(turn, out, q, at, None)
    check_keys(cache, turn, k, at, None, ROWS, slots)


@pytest.mark.parametrize("fields, rule, message", [
    ({"rotary_dim": 16}, "shapes", "a rotary_dim of 16.*at most the elements of a key behind its value, 8"),
    ({"q_norm": torch.ones(24)}, "latent", r"rope\.q_norm.*absorbed queries"),
    ({"k_norm": torch.ones(24)}, "shapes", r"rope\.k_norm.*\[v_in_k\] = 16"),
])  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], rule: str, message: str) -> None:
    turn, (batch, _, _) = LATENT_TURNS["interleaved"], made.batch_of()
    rope, cache = Rope.make(16, **({"rotary_dim": 8} | fields)), made.cache_of(24, v_in_k=16)
    q, k, _ = made.rows_of(turn, torch.float32)
    for call in (
        lambda: quire.write(k, None, cache, batch, rope=rope, q=q),
        lambda: quire.step(q, parts_of(turn, k), None, cache, batch, rope=rope),
    ):
        with pytest.raises(ContractError, match=f"(?s){rule}.*{message}"):
            call()
    assert not cache.k.any()


def test_a_rotation_that_saturates_is_reported() -> None:
    """By the numbers that are stored: an element is rotated into the other of its pair."""
    pool = PagePool(4, 4)
    cache = KVCache.allocate(pool, kv_heads=1, head_dim=4, v_in_k=2, format="e4m3fn", k_scale=0.01)
    rope, k = Rope(torch.zeros(4, 1), torch.ones(4, 1)), torch.tensor([[[1.0, 1.0, 4.0, 4.0]]])
    batch = pool.step({pool.sequence(): 1})
    with quire.checked(quantisation=True), pytest.warns(QuantisationWarning, match="underflow|saturation") as caught:
        quire.write(k * torch.tensor([1.0, 1.0, 2.0, 1.0]), None, cache, batch, rope=rope)
    assert "by up to 1.79 times" in str(caught[0].message)


def test_compiled() -> None:
    """One graph, with both operators."""
    turn = LATENT_TURNS["norm"]
    rope, (batch, _, _) = turn.rope(), made.batch_of()
    q, k, _ = made.rows_of(turn, torch.float32)
    q, k = q[:LIVE], k[:LIVE]
    batch = quire.Batch(batch.page_table, batch.kv_lens, batch.q_starts)
    made_for = [made.cache_of(24, "e4m3fn", "token", v_in_k=16) for _ in range(2)]

    def model(cache: KVCache) -> tuple[torch.Tensor, ...]:
        out = quire.step(q, parts_of(turn, k), None, cache, batch, rope=rope)
        turned = quire.write(k, None, cache, batch, rope=rope, q=q)
        assert turned is not None
        return out, turned

    want, got = model(made_for[0]), torch.compile(model, fullgraph=True, backend="aot_eager")(made_for[1])
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    assert torch.equal(made_for[0].k_bytes, made_for[1].k_bytes) and made_for[0].k_bytes.any()
