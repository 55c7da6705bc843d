"""Any heads, widths, pages and strides; and work shared out over any number of programs, in batches of any size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire import Batch, KVCache
from quire.kernels.triton.host.tuning import tuning_for
from quire.problem import Extent
from support.launched import attend, card, check, needs_hopper, prepared, run
from support.scenario import build

LENS: dict[str, Any] = {"q_lens": [1, 20, 3], "kv_lens": [5, 40, 70]}
SHAPES: dict[str, dict[str, Any]] = {
    "odd-widths": {"head_dim": 24, "v_head_dim": 40, "group": 5, "page_size": 5},
    "wider-keys": {"head_dim": 40, "v_head_dim": 8, "group": 1},
    "one-head": {"kv_heads": 1, "group": 1},
    "group-of-a-tile": {"kv_heads": 2, "group": 16},
    "group-beyond-a-tile": {"head_dim": 80, "group": 40, "kv_heads": 1, "page_size": 33},
    "group-beyond-every-tile": {"group": 70, "kv_heads": 2},
    "page-of-one": {"page_size": 1},
    "page-beyond-a-row": {"page_size": 544},
}


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
@pytest.mark.parametrize("name", SHAPES)
def test_shape(name: str, kernel: str, device: str) -> None:
    attend(kernel, device, **LENS, **SHAPES[name])


def test_widest_head(device: str) -> None:
    attend("mixed", device, q_lens=[1, 18], kv_lens=[40, 18], head_dim=512, q_dtype="bf16", format="bf16", kv_heads=1)


@pytest.mark.parametrize("how", [{"group": 40}, {"group": 4, "batch_invariant": True}], ids=["many heads", "batch-invariant"])
@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_widest_head_of_wide_numbers(kernel: str, how: dict[str, Any], device: str) -> None:
    """Tiles hold fewer rows than elsewhere, or their queries would not fit into the memory of small cards."""
    usual = {"q_dtype": "fp32", "format": "fp32", "head_dim": 512, "kv_heads": 1}
    attend(kernel, device, q_lens=[1, 18], kv_lens=[40, 18], **usual, **how)


@pytest.mark.parametrize("multiprocessors", [1, 2, 7, 40])
@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_any_number_of_programs(kernel: str, multiprocessors: int, device: str) -> None:
    """A unit alone with a program, shared by two, by many, and by more than `combine` adds at a time; programs without work."""
    platform = card(device, multiprocessors)
    row = tuning_for(kernel, platform.arch, 16, 4, 4)._replace(per_multiprocessor=1.0)
    for least in (1, row.least):
        how = {"platform": platform, "tuning": row._replace(least=least)}
        attend(kernel, device, q_lens=[1, 1, 2], kv_lens=[1400, 33, 2], kv_heads=1, how=how)
        attend(kernel, device, q_lens=[1, 0, 19], kv_lens=[100, 0, 40], form="context", sinks=True, how=how)


@pytest.mark.parametrize(
    "kv_lens, multiprocessors",
    [([40] * 24, 2), ([7 * row % 120 + 2 for row in range(24)], 5), ([300] + [2] * 23, 5), ([2] * 23 + [300], 2)],
    ids=["alike", "ragged", "one-long-first", "one-long-last"],
)
def test_many_units_a_program(kv_lens: list[int], multiprocessors: int, device: str) -> None:
    """Most are taken in runs, the last by whoever is ready. Rows without new tokens count for nothing, few or nearly all."""
    platform = card(device, multiprocessors)
    row = tuning_for("decode", platform.arch, 16, 4, 4)._replace(per_multiprocessor=1.0, least=1)
    how = {"platform": platform, "tuning": row}
    for q_lens in ([1] * 24, [0, 1, 2, 1] * 6, [0] * 20 + [1, 2, 1, 0]):
        attend("decode", device, q_lens=q_lens, kv_lens=kv_lens, kv_heads=2, head_dim=16, how=how)


@pytest.mark.parametrize("group, q_len", [(1, 17), (16, 2), (3, 6), (1, 33)])
def test_rows_just_long_enough_to_be_long(group: int, q_len: int, device: str) -> None:
    attend("mixed", device, q_lens=[q_len] * 3, kv_lens=[q_len, q_len + 40, q_len + 1], group=group, kv_heads=1)


@pytest.mark.parametrize("hint", [1, 4, 10**6])
@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_wrong_hints_change_no_result(kernel: str, hint: int, device: str) -> None:
    s = build(2, **LENS, device=device)
    s.batch.max_q_len = s.batch.max_kv_len = hint
    check(kernel, s, *run(kernel, s))


@pytest.mark.parametrize("group", [1, 3, 5, 7, 16, 40])
def test_few_tiles_serve_every_batch(group: int, device: str) -> None:
    """Nothing is compiled for a batch: whatever its size and its hints, it gets one of the tiles that were known beforehand."""
    s = build(2, [17, 3, 1], [40, 5, 9], group=group, device=device)
    call, launcher = prepared("decode", s, torch.empty_like(s.q))
    sizes = [(seqs, tokens) for seqs in (1, 7, 130, 5000) for tokens in (seqs, 3 * seqs + 5, 17 * seqs)]
    got = {launcher.schedule(call, Extent(seqs, tokens, hint, 64)).tile for seqs, tokens in sizes for hint in range(1, 40)}
    assert got <= set(launcher.programs) and len(launcher.programs) <= 5


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_more_rows_than_are_scanned_at_once(kernel: str, device: str) -> None:
    """Three times as many, nearly: what was passed in the second scan counts in the third."""
    q_lens, kv_lens = [0] * 2100, [0] * 2100
    for at, q_len, kv_len in ((0, 1, 40), (700, 20, 30), (1030, 1, 70), (2060, 1, 33), (2099, 18, 18)):
        q_lens[at], kv_lens[at] = q_len, kv_len
    attend(kernel, device, q_lens=q_lens, kv_lens=kv_lens, kv_heads=1)


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_more_tiles_than_32_bits_count(kernel: str, device: str) -> None:
    """The table is so wide that a full one would hold 2^31 tiles."""
    s = build(3, **LENS, page_size=4096, device=device)
    table = torch.full((3, 5_000_000), -1, dtype=torch.int32, device=device)
    table[:, : s.batch.page_table.shape[1]] = s.batch.page_table
    s.batch.page_table = table
    check(kernel, s, *run(kernel, s, platform=card(device, 2)))


@pytest.mark.parametrize("kernel", ["decode", "mixed", pytest.param("gluon", marks=needs_hopper)])
def test_pages_beyond_2_to_31_elements(kernel: str, device: str) -> None:
    """Pages far apart, in memory that is never touched in between."""
    s = build(4, [1, 20], [17, 40], format="e4m3fn", q_dtype="bf16", device=device)
    apart, pages = 2**29, s.cache.pages
    assert pages >= 6
    memory = torch.empty(apart * (pages - 1) + 2**20, dtype=torch.uint8, device=device)
    moved = []
    for part, begin in ((s.cache.k, 0), (s.cache.v, 2**19)):
        view = memory[begin:].as_strided(part.shape, (apart, *part.stride()[1:]))
        view.copy_(part.view(torch.uint8))
        moved.append(view.view(torch.float8_e4m3fn))
    cache = KVCache.wrap(*moved, layout="nhd", k_scale=s.cache.k_scale, v_scale=s.cache.v_scale)
    far = replace(s, cache=cache)
    check(kernel, far, *run(kernel, far))


def test_strides(device: str) -> None:
    """Every tensor of a call as a part of a larger one."""
    s = build(
        5, **LENS, form="context", sinks=True, alibi=True, mask=True, window=60, index=(torch.int32, torch.int64, torch.int32),
        head_dim=16, v_head_dim=12, device=device,
    )  # fmt: skip
    assert s.new is not None

    def inside(t: torch.Tensor) -> torch.Tensor:
        """The same values, every axis a step of 2 or more in a larger tensor of poison."""
        big = torch.full([2 * size + 1 for size in t.shape], -9 if t.dtype is not torch.bool else 1, dtype=t.dtype, device=t.device)
        view = big[tuple(slice(1, None, 2) for _ in t.shape)]
        view.copy_(t)
        return view

    given = {name: getattr(s.options, name) for name in s.options.__dataclass_fields__}
    options = type(s.options)(**{n: inside(v) if isinstance(v, torch.Tensor) else v for n, v in given.items()})
    batch = Batch(inside(s.batch.page_table), inside(s.batch.kv_lens), inside(s.batch.q_starts))
    strided = replace(s, q=inside(s.q), options=options, batch=batch, new=(inside(s.new[0]), inside(s.new[1])))
    for kernel in ("decode", "mixed"):
        check(kernel, strided, *run(kernel, strided))


def test_strided_output(device: str) -> None:
    s = build(6, **LENS, device=device)
    shape = (s.q.shape[0], s.q.shape[1], s.cache.v_head_dim)
    big = torch.full((shape[0] + 2, shape[1] + 2, 2 * shape[2] + 1), 7.0, device=device)
    out = big[1:-1, 1:-1, 1::2]
    check("mixed", s, *run("mixed", s, out=out))
    out.fill_(7.0)
    assert (big == 7.0).all()


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_nothing_to_do(kernel: str, device: str) -> None:
    attend(kernel, device, q_lens=[], kv_lens=[])
    attend(kernel, device, q_lens=[0, 0], kv_lens=[3, 0], padding=3)
    attend(kernel, device, q_lens=[0, 0], kv_lens=[3, 0])
