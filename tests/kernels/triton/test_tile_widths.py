"""How wide tiles are on Hopper, and how many rows they have. Seeds 23002, 25008, 31023 and 31030 of the random calls were wrong on
an H200 with tiles of other shapes. These tests pin the shapes; only a GPU can show that the results are correct."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from quire import Platform, Problem
from quire.kernels.triton.host.launcher import AttendLauncher


def launcher(arch: str, dtype: str, head_dim: int, v_head_dim: int, kernel: str = "mixed", **fields: object) -> AttendLauncher:
    given = {"q_heads": 2, "kv_heads": 1, "page_size": 16, "q_dtype": dtype, "format": dtype, **fields}
    problem = Problem(head_dim=head_dim, v_head_dim=v_head_dim, **given)  # type: ignore[arg-type]
    return AttendLauncher(kernel, problem, Platform.named(arch))


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
@pytest.mark.parametrize(
    "head_dim, v_head_dim, width", [(29, 16, 32), (64, 8, 64), (128, 16, 64), (128, 33, 64), (16, 8, 16), (16, 128, 128)]
)
def test_values_fill_the_arrangement_of_the_keys_on_hopper(kernel: str, head_dim: int, v_head_dim: int, width: int) -> None:
    assert launcher("sm90", "bf16", head_dim, v_head_dim, kernel).constants.V_WIDTH == width


@pytest.mark.parametrize("arch", ["sm80", "sm100", "gfx942"])
def test_other_gpus_use_the_width_of_the_values(arch: str) -> None:
    assert launcher(arch, "bf16", 128, 16).constants.V_WIDTH == 16


@pytest.mark.parametrize("head_dim, rows", [(16, 64), (64, 32), (128, 16), (512, 16)])
def test_products_in_fp32_hold_few_queries(head_dim: int, rows: int) -> None:
    """Their queries stay in registers: what does not fit is kept in memory, slowly, thousands of bytes a thread."""
    for kernel in ("decode", "mixed"):
        tiles = launcher("sm90", "fp32", head_dim, head_dim, kernel, q_heads=64).tiles.short.values()
        assert {tile.ROWS for tile in tiles} == {rows}
    invariant = launcher("sm90", "fp32", head_dim, head_dim, batch_invariant=True)
    assert invariant.tiles.short[1, 1].ROWS == rows


@pytest.mark.parametrize(
    "format, group, rows", [("bf16", 4, {16, 64}), ("bf16", 8, {16, 64}), ("bf16", 2, {16, 32}), ("e4m3fn", 8, {16, 32})]
)
@pytest.mark.parametrize("prefixes", [False, True])
def test_a_layer_of_hopper_has_two_heights_of_decode_tiles(format: str, group: int, rows: set[int], prefixes: bool) -> None:
    """With the kernels of gluon, and one for shared prefixes, these are twelve kernels. Prefixes add no tile."""
    tiles = launcher("sm90", format, 128, 128, "decode", q_heads=8 * group, kv_heads=8, prefixes=prefixes).tiles.short.values()
    assert {tile.ROWS for tile in tiles} == rows
