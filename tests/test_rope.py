"""RoPE in writes and steps: every kernel of this CPU against float64, what must not be touched, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quire
from quire import ArgumentError, Batch, ContractError, KVCache, Options, Problem, Rope, reference
from quire.contract.call import Call
from quire.kernels.native import write as native
from quire.kernels.torch import write as plain
from support import nvfp4
from support import rope as made
from support.kernels import each_kernel, levels  # noqa: F401
from support.rope import GROUP, GUARD, KV_HEADS, LIVE, TOKENS, TURNS, Turn, check_keys, check_queries
from support.scenario import LARGEST, TYPES

on_each = pytest.mark.usefixtures("each_kernel")
ROWS = torch.arange(LIVE)


@on_each
@pytest.mark.parametrize("given", [None, torch.int32, torch.int64], ids=["own", "int32", "int64"])
@pytest.mark.parametrize("name", TURNS)
def test_every_way_to_rotate(name: str, given: torch.dtype | None) -> None:
    turn = TURNS[name]
    if given is None and turn.axes is not None:
        pytest.skip("a batch has positions of one axis")
    dtype = torch.bfloat16 if given is None else torch.float32
    rope, cache, (batch, own, slots) = turn.rope(), made.cache_of(turn.head_dim, "fp32"), made.batch_of()
    q, k, v = made.rows_of(turn, dtype)
    positions = None if given is None else made.positions_of(turn, own, given)
    before = q.clone(), k.clone()
    turned = quire.write(k, v, cache, batch, rope=rope, q=q, positions=positions)
    at = own if positions is None else positions.long()
    assert turned is not None and turned.dtype is dtype and turned.is_contiguous()
    check_queries(turn, turned, q, at, rope.q_norm)
    check_keys(cache, turn, k, at, rope.k_norm, ROWS, slots)
    assert torch.equal(cache.v.flatten(0, 1)[slots], v[:LIVE].float())
    assert not turned[LIVE:].any(), "padding rows of a new tensor are zeros"
    assert all(torch.equal(a[:LIVE], b[:LIVE]) for a, b in zip((q, k), before)), "an input was changed"


@on_each
@pytest.mark.parametrize("scales", ["tensor", "head", "token"])
@pytest.mark.parametrize("format", [format for format in TYPES if format != "int4_zp" and not format.startswith("nvfp4")])
def test_every_format(format: str, scales: str) -> None:
    if format not in LARGEST and scales != "tensor":
        pytest.skip("no scales")
    turn = Turn(norm=torch.bfloat16)
    rope, cache, (batch, own, slots) = turn.rope(), made.cache_of(16, format, scales), made.batch_of()
    _, k, v = made.rows_of(turn, torch.float32 if format == "fp32" else torch.bfloat16)
    quire.write(k, v, cache, batch, rope=rope)
    check_keys(cache, turn, k, own, rope.k_norm, ROWS, slots)


@on_each
def test_scales_of_groups() -> None:
    """The codes and scales of what a cache of fp32 holds."""
    rope, (batch, _, slots) = TURNS["norm"].rope(), made.batch_of()
    _, k, _ = made.rows_of(TURNS["norm"], torch.bfloat16)
    caches = []
    for how in ({"dtype": torch.float32}, {"format": "nvfp4", "k_scale": 0.01, "v_scale": 0.02}):
        pool = quire.PagePool(made.PAGES, made.PAGE_SIZE)
        caches.append(KVCache.allocate(pool, kv_heads=KV_HEADS, head_dim=16, **how))
        quire.write(k, k, caches[-1], batch, rope=rope)
    plain, cache = caches
    for part, view, groups, scale in ((plain.k, cache.k_view, cache.k_groups, 0.01), (plain.v, cache.v_view, cache.v_groups, 0.02)):
        want = nvfp4.encoded(part.flatten(0, 1)[slots] / scale)
        held = [x.flatten(4).flatten(2, 3).transpose(1, 2).flatten(0, 1)[slots] for x in (view, groups)]
        assert torch.equal(held[0], want.bytes()) and torch.equal(held[1], want.scales)


@on_each
@pytest.mark.parametrize("layout", ["hnd", "vllm_x", "vllm_joint", "aiter"])
def test_other_layouts_hold_the_same(layout: str) -> None:
    rope, (batch, _, _) = TURNS["half-split"].rope(), made.batch_of()
    _, k, v = made.rows_of(TURNS["half-split"], torch.float32)
    caches = []
    for one in ("nhd", layout):
        pool = quire.PagePool(made.PAGES, made.PAGE_SIZE)
        caches.append(KVCache.allocate(pool, kv_heads=KV_HEADS, head_dim=16, v_head_dim=8, dtype=torch.float32, layout=one))
        quire.write(k, v, caches[-1], batch, rope=rope)
    assert torch.equal(*(cache.k_view.flatten(4).flatten(2, 3) for cache in caches))


@on_each
def test_slots_padding_and_buffers() -> None:
    """A token without a slot is rotated and not stored; padding rows are touched neither in place nor in a buffer."""
    turn, (batch, own, slots) = TURNS["norm"], made.batch_of()
    rope, cache = turn.rope(), made.cache_of(16)
    q, k, v = made.rows_of(turn, torch.bfloat16)
    given = torch.cat((slots, torch.tensor([90, 91])))
    given[[2, 9]] = -1
    kept = (given[:LIVE] >= 0).nonzero().flatten()
    buffer = torch.full((TOKENS, KV_HEADS * GROUP, 2 * 16), GUARD, dtype=q.dtype)[..., ::2]
    assert quire.write(k, v, cache, batch, slots=given, rope=rope, q=q, q_out=buffer) is buffer
    check_queries(turn, buffer, q, own, rope.q_norm)
    check_keys(cache, turn, k, own, rope.k_norm, kept, slots[kept])
    assert (buffer[LIVE:] == GUARD).all()
    before = q.clone()
    assert quire.write(k, v, made.cache_of(16), batch, rope=rope, q=q, q_out=q) is q
    assert torch.equal(q[:LIVE], buffer[:LIVE]) and torch.equal(q[LIVE:].isnan(), before[LIVE:].isnan())


@on_each
def test_slots_without_a_batch() -> None:
    turn, (_, own, slots) = TURNS["interleaved"], made.batch_of()
    rope, cache = turn.rope(), made.cache_of(16)
    q, k, v = (rows[:LIVE] for rows in made.rows_of(turn, torch.float32))
    turned = quire.write(k, v, cache, slots=slots, rope=rope, q=q, positions=own)
    assert turned is not None
    check_queries(turn, turned, q, own, rope.q_norm)
    check_keys(cache, turn, k, own, rope.k_norm, ROWS, slots)


@on_each
@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_rotates_all_queries_and_stores_its_keys(rank: int) -> None:
    turn, (_, own, _) = TURNS["half-split"], made.batch_of()
    rope, cache = turn.rope(), made.cache_of(16)
    batch, _, _ = made.batch_of(shard=(rank, 2, 3))
    q, k, v = made.rows_of(turn, torch.float32)
    turned = quire.write(k, v, cache, batch, rope=rope, q=q)
    assert turned is not None
    check_queries(turn, turned, q, own, None)
    mine = (own // 3 % 2 == rank).nonzero().flatten()
    key = own[mine] // 6 * 3 + own[mine] % 3
    seq = batch.sequences_of_tokens(LIVE)[mine]
    slots = batch.page_table.long()[seq, key // made.PAGE_SIZE] * made.PAGE_SIZE + key % made.PAGE_SIZE
    check_keys(cache, turn, k, own, None, mine, slots)


@on_each
def test_a_step_attends_with_rotated_queries_and_keys() -> None:
    turn = TURNS["norm"]
    rope, pool = turn.rope(), quire.PagePool(16, 4)
    cache = KVCache.allocate(pool, kv_heads=KV_HEADS, head_dim=16, dtype=torch.float32, ledger=True)
    a, b, keys, values = pool.sequence(), pool.sequence(), [], []
    for counts in ((5, 9), (1, 3)):
        batch = pool.step({a: counts[0], b: counts[1]})
        q, k, v = torch.randn(sum(counts), KV_HEADS * (GROUP + 2), 16).split((KV_HEADS * GROUP, KV_HEADS, KV_HEADS), 1)
        before = q.clone()
        with quire.checked():
            out, lse = quire.step(q, k, v, cache, batch, Options(window=6), rope=rope, lse=True)
        assert torch.equal(q, before)
        exact_q, _ = turn.exact(q, batch.positions, rope.q_norm)
        keys.append(turn.exact(k, batch.positions, rope.k_norm)[0].split(counts))
        values.append(v.split(counts))
        for i, rows in enumerate(torch.arange(sum(counts)).split(counts)):
            so_far = (torch.cat([part[i] for part in parts]) for parts in (keys, values))
            want, want_lse = reference.attention(exact_q[rows], *so_far, window=(5, 5))
            torch.testing.assert_close(out[rows].double(), want, atol=2e-5, rtol=0)
            torch.testing.assert_close(lse[rows].double(), want_lse, atol=2e-5, rtol=0)


@on_each
def test_a_tree_is_rotated_by_its_positions() -> None:
    """`Options(positions=...)` are those of the rotation too, unless others are given."""
    turn, (batch, _, slots) = TURNS["half-split"], made.batch_of()
    rope, (q, k, v) = turn.rope(), made.rows_of(TURNS["half-split"], torch.float32)
    at = made.positions_of(turn, slots)
    options = Options(mask=torch.ones(TOKENS, 11, dtype=torch.bool), positions=at)
    for how, used in (({}, at), ({"positions": at.flip(0)}, at.flip(0))):
        cache = made.cache_of(16)
        values = torch.zeros_like(v)
        used = used.clone()
        used[LIVE:] = -1
        quire.step(q, k, values, cache, batch, options, rope=rope, **({} if not how else {"positions": used.clamp(max=31)}))
        check_keys(cache, turn, k, used.clamp(0, 31), None, ROWS, slots)


def launched(how: str, call: Call) -> None:
    """One launch without any check."""
    (plain if how == "torch" else native).launcher(None, None)(call)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [-1, 32, 2**31 + 5, 2**32 + 3, -(2**40)])
@pytest.mark.parametrize("name", ["half-split", "partial-interleaved", "sections"])
@pytest.mark.parametrize("how", ["torch", pytest.param("native", marks=pytest.mark.skipif(not levels(), reason="not built"))])
def test_a_position_outside_of_the_tables_gives_nan(how: str, name: str, bad: int) -> None:
    """What no check saw: the row of q, and the key, are NaN in every element; all others are right."""
    turn, (batch, own, slots) = TURNS[name], made.batch_of()
    rope, cache = turn.rope(), made.cache_of(turn.head_dim)
    q, k, v = made.rows_of(turn, torch.float32)
    at = made.positions_of(turn, own)
    at[(-1, 3) if at.dim() == 2 else 3] = bad
    out = torch.empty_like(q)
    launched(how, Call(cache, batch, k=k, v=v, rope=rope, q_in=q, q_out=out, rope_positions=at))
    assert out[3].isnan().all() and cache.k.flatten(0, 1)[slots[3]].isnan().all()
    at[..., 3], out[3] = 0, turn.exact(q[3:4], at[..., 3:4] * 0, None)[0]
    cache.k.flatten(0, 1)[slots[3]] = turn.exact(k[3:4], at[..., 3:4] * 0, None)[0].float()
    check_queries(turn, out, q, at, None)
    check_keys(cache, turn, k, at, None, ROWS, slots)


# The tables.


def test_scaled_tables() -> None:
    """Against formulas written out pair by pair."""
    import math

    def turns(rope: Rope) -> torch.Tensor:
        return torch.atan2(rope.sin[1], rope.cos[1]).double()

    plain_turns = [10000.0 ** (-2 * i / 64) for i in range(32)]
    torch.testing.assert_close(turns(Rope.make(64)), torch.tensor(plain_turns).double(), rtol=1e-6, atol=1e-9)
    linear = Rope.make(64, scaling={"type": "linear", "factor": 4})
    torch.testing.assert_close(turns(linear), torch.tensor(plain_turns).double() / 4, rtol=1e-6, atol=1e-9)
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    want = []
    for f in plain_turns:
        wave = 2 * math.pi / f
        part = (512 / wave - 1) / 3
        want.append(f if wave < 512 / 4 else f / 8 if wave > 512 / 1 else (1 - part) * f / 8 + part * f)
    llama = Rope.make(64, scaling={"rope_type": "llama3", **numbers})
    torch.testing.assert_close(turns(llama), torch.tensor(want).double(), rtol=1e-6, atol=1e-9)
    yarn = Rope.make(64, scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512})
    pair_of = lambda count: 64 * math.log(512 / (count * 2 * math.pi)) / (2 * math.log(10000.0))  # noqa: E731
    low, high = math.floor(pair_of(32)), math.ceil(pair_of(1))
    blend = [min(max((i - low) / (high - low), 0), 1) for i in range(32)]
    want = [f * (1 - b) + f / 4 * b for f, b in zip(plain_turns, blend)]
    torch.testing.assert_close(turns(yarn), torch.tensor(want).double(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(yarn.cos[0], torch.full((32,), 0.1 * math.log(4) + 1))


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "truncate": False},
    {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.5},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_tables_of_transformers(scaling: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**scaling, "rope_theta": 150000.0}
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=8, head_dim=64, max_position_embeddings=131072, rope_parameters=parameters
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    rope = Rope.make(64, 150000.0, 300, scaling=parameters)
    angles = torch.arange(300)[:, None].double() * frequencies.double()
    # transformers has frequencies in fp32: each angle is off by up to its rounding, times the position.
    for got, want in ((rope.cos, angles.cos()), (rope.sin, angles.sin())):
        torch.testing.assert_close(got.double(), want * factor, rtol=1e-6, atol=300 * 4 * 2.0**-24)


def rotated(x: torch.Tensor, positions: torch.Tensor, base: float, dim: int, scaling: dict[str, Any]) -> torch.Tensor:
    """Heads rotated as transformers does it in Qwen2-VL, Qwen3-VL and GLM, in float64: angles of every axis, joined by sections."""
    x, sections = x.double(), scaling.get("mrope_section")
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2).double() / dim)
    if sections is None:
        angles = positions[:, None].double() * frequencies
    elif scaling.get("mrope_interleaved"):
        each = positions[:, :, None].double() * frequencies
        angles = each[0].clone()
        for axis in (1, 2):
            own = slice(axis, 3 * sections[axis], 3)
            angles[:, own] = each[axis][:, own]
    else:
        each = positions[:, :, None].double() * frequencies
        angles = torch.cat([part[axis] for axis, part in enumerate(each.split(sections, dim=-1))], -1)
    turned, rest = x[..., :dim], x[..., dim:]
    cos, sin = (torch.cat((part, part), -1)[:, None] for part in (angles.cos(), angles.sin()))
    half = torch.cat((-turned[..., dim // 2 :], turned[..., : dim // 2]), -1)
    return torch.cat((turned * cos + half * sin, rest), -1)


CONFIGURATIONS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen2-vl": ({"type": "mrope", "mrope_section": [16, 24, 24]}, 128),
    "qwen2.5-vl": ({"rope_type": "default", "type": "default", "mrope_section": [16, 24, 24]}, 128),
    "qwen3-vl": ({"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_theta": 5e6}, 128),
    "glm-4v": ({"rope_type": "default", "mrope_section": (8, 12, 12), "partial_rotary_factor": 0.5}, 64),
    "partial": ({"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 5e6}, 32),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations_with_sections_and_parts(name: str) -> None:
    scaling, dim = CONFIGURATIONS[name]
    before = repr(scaling)
    rope = Rope.make(128, 5e6, 500, scaling=scaling)
    assert rope.rotary_dim == dim and repr(scaling) == before
    assert rope.sections == (None if "mrope_section" not in scaling else tuple(scaling["mrope_section"]))
    x = torch.randn(40, 3, 128)
    positions = torch.randint(500, (3, 40)) if rope.sections else torch.randint(500, (40,))
    want = rotated(x, positions, 5e6, dim, scaling)
    # The tables are rounded to fp32, and so are products and sums of elements of up to 5.
    torch.testing.assert_close(rope.rotate(x, positions).double(), want, rtol=0, atol=4 * 5 * 2.0**-23)
    same = {"rotary_dim": dim, "sections": scaling.get("mrope_section")} if rope.sections else {"rotary_dim": dim}
    assert torch.equal(Rope.make(128, 5e6, 500, scaling=scaling, **same).rotate(x, positions), rope.rotate(x, positions))


def test_a_scaled_part_with_sections() -> None:
    """Frequencies are scaled as for a head of the rotated part alone."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    rope = Rope.make(128, 1e6, 50, scaling={**yarn, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]})
    plain = Rope.make(64, 1e6, 50, scaling=yarn)
    assert torch.equal(rope.cos, plain.cos) and torch.equal(rope.sin, plain.sin) and rope.sections == (8, 12, 12)


def test_the_table_of_vllm() -> None:
    own = Rope.make(16, 100.0, 32)
    packed = torch.cat((own.cos, own.sin), 1)
    rope = Rope.from_cos_sin_cache(packed)
    assert torch.equal(rope.cos, own.cos) and torch.equal(rope.sin, own.sin) and rope.cos.data_ptr() == packed.data_ptr()
    assert torch.equal(Rope.from_cos_sin_cache(packed.bfloat16()).sin, own.sin.bfloat16().float())


# What is refused.

TABLE = torch.ones(4, 8)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"cos": TABLE.double()}, "cos"),
    ({"cos": TABLE.T}, "cos"),
    ({"sin": torch.ones(4, 6)}, "sin"),
    ({"interleaved": 1}, "interleaved"),
    ({"q_norm": torch.ones(16, dtype=torch.float64)}, "q_norm"),
    ({"k_norm": torch.ones(4)}, "k_norm"),
    ({"k_norm": torch.ones(32)[::2]}, "k_norm"),
    ({"eps": -1e-6}, "eps"),
    ({"sections": (4, 4)}, "sections"),
    ({"sections": (4, 4, 4)}, "sections"),
    ({"sections": (2, 3, 3), "sections_interleaved": True}, "sections"),
    ({"sections_interleaved": True}, "sections_interleaved"),
    ({"unit_offset": None}, "unit_offset"),
    ({"rotary_dim": 16}, "rotary_dim"),
]


@pytest.mark.parametrize("fields, argument", WRONG, ids=[f"{name}{i}" for i, (_, name) in enumerate(WRONG)])
def test_a_rope_that_is_no_rope(fields: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as error:
        Rope(**{"cos": TABLE, "sin": TABLE, **fields})
    assert error.value.argument == argument


@pytest.mark.parametrize(
    "how, argument",
    [
        ({"scaling": {"type": "mrope"}}, "scaling"),
        ({"scaling": {"type": "mrope", "rope_type": "linear", "factor": 2.0, "mrope_section": [2, 3, 3]}}, "scaling"),
        ({"scaling": {"rope_type": "default", "mrope_section": [2, 3, 4]}}, "sections"),
        ({"scaling": {"rope_type": "default", "mrope_section": 8}}, "sections"),
        ({"scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}, "sections": (3, 3, 2)}, "sections"),
        ({"scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}, "sections": None}, "sections"),
        ({"scaling": {"rope_type": "default", "mrope_interleaved": True}}, "sections_interleaved"),
        (
            {
                "scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
                "sections_interleaved": False,
            },
            "sections_interleaved",
        ),
        ({"scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}, "rotary_dim": 16}, "rotary_dim"),
        ({"scaling": {"rope_type": "default", "partial_rotary_factor": 0.2}}, "rotary_dim"),
        ({"scaling": {"rope_type": "default", "partial_rotary_factor": 0.05}}, "rotary_dim"),
        ({"scaling": {"rope_type": "default", "partial_rotary_factor": 1.5}}, "scaling"),
        ({"scaling": {"rope_type": "default", "partial_rotary_factor": True}}, "scaling"),
        ({"scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}, "scaling"),
        ({"rotary_dim": 0}, "rotary_dim"),
        ({"rotary_dim": False}, "rotary_dim"),
        ({"scaling": {"rope_type": "yarn", "factor": 4.0}}, "scaling"),
        ({"scaling": {"rope_type": "linear", "factor": 0}}, "scaling"),
        ({"scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}}, "scaling"),
        ({"scaling": {"factor": 2.0}}, "scaling"),
        ({"rotary_dim": 32}, "rotary_dim"),
        ({"rotary_dim": 7}, "rotary_dim"),
        ({"base": 1.0}, "base"),
        ({"max_positions": 0}, "max_positions"),
    ],
)
def test_tables_that_cannot_be_made(how: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as error:
        Rope.make(16, **how)
    assert error.value.argument == argument


def refusals() -> list[tuple[str, dict[str, Any], str]]:
    turn = TURNS["half-split"]
    q, _, _ = made.rows_of(turn, torch.float32)
    at = torch.zeros(TOKENS, dtype=torch.int64)
    late = at.clone()
    late[4] = 32
    memory = torch.randn(q.numel() + 8)
    both = [memory[start : start + q.numel()].view(q.shape) for start in (0, 8)]
    sections = {"rope": TURNS["sections"].rope()}
    return [
        ("rope: rotary_dim", {"rope": Rope.make(32)}, "shapes rope"),
        ("norm", {"rope": Rope.make(16, q_norm=torch.ones(24))}, "shapes rope.q_norm"),
        ("positions of two axes", {"positions": torch.zeros(3, TOKENS, dtype=torch.int64)}, "shapes positions"),
        ("too few positions", {"positions": at[1:]}, "shapes positions"),
        ("positions of one axis", {**sections, "positions": at}, "shapes positions"),
        ("sections without positions", sections, "shapes positions"),
        ("type of positions", {"positions": at.float()}, "index-types positions"),
        ("device", {"positions": at.to("meta")}, "devices positions"),
        ("late position", {"positions": late}, "rotation positions[4]"),
        ("late sequence", {"rope": Rope.make(16, max_positions=29)}, "rotation kv_lens[2]"),
        ("q of another type", {"q": q.bfloat16()}, "shapes q"),
        ("heads of q", {"q": q[:, :5]}, "shapes q"),
        ("rows of q", {"q": q[1:]}, "shapes q"),
        ("q_out of another shape", {"q_out": torch.empty(TOKENS, 6, 18)}, "output q_out"),
        ("q_out overlaps itself", {"q_out": torch.empty(1, 6, 16).expand(TOKENS, 6, 16)}, "output q_out"),
        ("q_out shares memory with k", {"q_out": "moved"}, "output q_out"),
        ("q_out shares memory with q", {"q": both[0], "q_out": both[1]}, "output q_out"),
    ]


@pytest.mark.parametrize("name, how, broken", refusals(), ids=[name for name, _, _ in refusals()])
def test_calls_that_are_refused(name: str, how: dict[str, Any], broken: str) -> None:
    q, k, v = made.rows_of(TURNS["half-split"], torch.float32)
    if isinstance(how.get("q_out"), str):
        how = {"q_out": q.as_strided(q.shape, q.stride(), 32)}
    cache, (batch, _, _) = made.cache_of(16), made.batch_of()
    with pytest.raises(ContractError) as error:
        quire.write(k, v, cache, batch, **{"rope": TURNS["half-split"].rope(), "q": q, **how})
    assert broken in [f"{violation.rule} {violation.argument}" for violation in error.value.violations]
    assert not cache.k.any()


@pytest.mark.parametrize(
    "how, argument",
    [
        ({"rope": None, "q": 0}, "q"),
        ({"rope": None, "positions": 0}, "positions"),
        ({"q_out": 0}, "q_out"),
        ({"rope": 5}, "rope"),
        ({"batch": None, "slots": torch.arange(TOKENS)}, "positions"),
    ],
)
def test_arguments_that_do_not_belong_together(how: dict[str, Any], argument: str) -> None:
    q, k, v = made.rows_of(TURNS["half-split"], torch.float32)
    given = {name: q if isinstance(value, int) and value == 0 else value for name, value in how.items()}
    with pytest.raises(ArgumentError) as error:
        quire.write(k, v, made.cache_of(16), **{"batch": made.batch_of()[0], "rope": TURNS["half-split"].rope(), **given})
    assert error.value.argument == argument


def test_a_tree_needs_positions() -> None:
    q, k, v = made.rows_of(TURNS["half-split"], torch.float32)
    options = Options(mask=torch.ones(TOKENS, 11, dtype=torch.bool))
    with pytest.raises(ContractError, match="branches of a tree share positions"):
        quire.step(q, k, v, made.cache_of(16), made.batch_of()[0], options, rope=TURNS["half-split"].rope())


def test_the_validated_batch_is_not_valid_for_shorter_tables() -> None:
    _, k, v = made.rows_of(TURNS["half-split"], torch.float32)
    cache, (batch, _, _) = made.cache_of(16), made.batch_of()
    quire.write(k, v, cache, batch, rope=Rope.make(16, max_positions=30))
    with pytest.raises(ContractError, match="rotation"):
        quire.write(k, v, cache, batch, rope=Rope.make(16, max_positions=29))


def test_given_positions_are_checked_in_every_call() -> None:
    """Also if the batch was found legal before."""
    _, k, v = made.rows_of(TURNS["half-split"], torch.float32)
    cache, (batch, own, _) = made.cache_of(16), made.batch_of()
    at, rope = made.positions_of(TURNS["half-split"], own), TURNS["half-split"].rope()
    quire.write(k, v, cache, batch, rope=rope, positions=at)
    at[4] = 32
    with pytest.raises(ContractError, match=r"positions\[4\]"):
        quire.write(k, v, cache, batch, rope=rope, positions=at)


# What knows of it.


def test_problem_explain_and_prepare() -> None:
    turn, (batch, _, _) = TURNS["sections-take-turns"], made.batch_of()
    q, _, _ = made.rows_of(turn, torch.bfloat16)
    rope, cache = turn.rope(), made.cache_of(16, "bf16")
    positions = made.positions_of(turn, torch.zeros(0))
    decision = quire.explain(
        q, cache, batch, operation="write", rope=rope, positions=positions, platform=quire.Platform.named("h100")
    )
    problem = decision.problem
    assert decision.chosen is not None and (decision.chosen.name, problem.q_heads) == ("triton", KV_HEADS * GROUP)
    assert "interleaved rope 16" in str(problem) and "rope" in problem.features
    assert Problem.from_json(problem.to_json()) == problem
    plain_write = quire.explain(q, cache, batch, operation="write", platform=quire.Platform.named("h100"))
    assert plain_write.compiled != decision.compiled
    assert quire.check(q, cache, batch, k=q[:, :2], v=q[:, :2, :8], rope=rope, positions=positions.clamp(max=31)) == []
    assert quire.prepare(cache, q_heads=6, q_dtype=torch.bfloat16, rope=rope).kernels == ()  # this is a CPU


def test_quantisation_warns_of_rotated_keys() -> None:
    """The norm makes keys fit that would saturate."""
    turn, (batch, _, _) = Turn(norm=torch.float32), made.batch_of()
    _, k, v = made.rows_of(turn, torch.float32)
    cache, k = made.cache_of(16, "int8", "tensor"), k.nan_to_num() * 1000
    with quire.checked(quantisation=True), pytest.warns(quire.errors.QuantisationWarning, match="saturation"):
        quire.write(k, v.nan_to_num(), cache, batch)
    import warnings

    with quire.checked(quantisation=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        quire.write(k, v.nan_to_num(), cache, batch, rope=turn.rope())


def test_a_recorded_step_holds_what_it_wrote(tmp_path: Any) -> None:
    from quire.conformance.recording.record import load

    turn, (batch, _, _) = Turn(norm=torch.float32), made.batch_of()
    q, k, v = made.rows_of(turn, torch.float32)
    whole = Batch(batch.page_table, torch.tensor(made.Q_LENS), batch.q_starts)
    cache = made.cache_of(16)
    with quire.record(tmp_path / "step.safetensors"):
        quire.step(q, k, v, cache, whole, rope=turn.rope())
    (recorded,) = load(tmp_path / "step.safetensors")
    assert recorded.lost_tokens() == []
    recorded.cache.k.view(-1, *recorded.cache.k.shape[2:])[recorded.batch.slots_of_tokens(LIVE, made.PAGE_SIZE)[6]] = 0
    assert recorded.lost_tokens() == [6]
