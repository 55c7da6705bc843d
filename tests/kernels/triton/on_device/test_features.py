"""Every feature of `Options`, in both forms, through both kernels; lengths cross tiles and pages, and all that is not required is
poison."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kernels.triton.host.tuning import SMALL
from support.launched import attend, check, run
from support.scenario import build

# Long rows and short ones, one without new tokens, contexts of none, of less than a tile and of several.
LENS: dict[str, Any] = {"q_lens": [1, 40, 3, 0, 20], "kv_lens": [5, 40, 100, 7, 90], "padding": 2}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "window-both-sides": {"window": (30, 3), "causal": False},
    "window-right-only": {"window": (None, 5), "causal": False},
    "alibi": {"alibi": True, "window": (30, 3)},
    "softcap": {"softcap": 5.0},
    "softcap-alibi": {"softcap": 2.0, "alibi": True, "scale": 3.0},
    "sinks": {"sinks": True},
    "non-causal": {"causal": False},
    "causal-by-row": {"causal": "mixed"},
    "causal-by-row-window": {"causal": "mixed", "window": (15, 4)},
    "tree": {"mask": True},
    "tree-window-alibi": {"mask": True, "window": 25, "alibi": True},
    "tree-right": {"mask": True, "window": (40, 1)},
    "tree-left-only": {"mask": True, "window": (25, None)},
    "tree-right-only": {"mask": True, "window": (None, 1)},
    "negative-scale": {"scale": -0.3},
    "no-scale": {"scale": 0.0, "sinks": True},
}


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
@pytest.mark.parametrize("form", ["full", "context"])
@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, form: str, kernel: str, device: str) -> None:
    attend(kernel, device, **LENS, form=form, **FEATURES[name])


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_everything_at_once(kernel: str, device: str) -> None:
    attend(
        kernel, device, **LENS, form="context", format="int8", scales="token", q_dtype="bf16", layout="vllm_x", page_size=8,
        window=(33, 2), causal="mixed", softcap=20.0, alibi=True, sinks=True, group=3, head_dim=20, v_head_dim=12,
    )  # fmt: skip


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_rows_that_see_nothing(kernel: str, device: str) -> None:
    """Zeros and an LSE of -inf; with a sink, the sink."""
    for sinks in (None, True):
        attend(kernel, device, q_lens=[3, 1, 20], kv_lens=[0, 0, 20], causal=False, window=(0, 0), sinks=sinks)


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_no_lse(kernel: str, device: str) -> None:
    s = build(2, **LENS, device=device)
    out, lse = run(kernel, s, lse=False, zero_padding=False)
    assert lse is None
    check(kernel, s, out, None)


@pytest.mark.parametrize("form", ["full", "context"])
@pytest.mark.parametrize("name", ["plain", "causal-by-row-window", "tree-window-alibi"])
@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_smallest_tiles(kernel: str, name: str, form: str, device: str) -> None:
    attend(kernel, device, **LENS, form=form, format="bf16", q_dtype="bf16", how={"tuning": SMALL}, **FEATURES[name])


@pytest.mark.parametrize("name", ["window", "tree", "causal-by-row"])
def test_batch_invariant(name: str, device: str) -> None:
    attend("mixed", device, **LENS, batch_invariant=True, **FEATURES[name])


def test_softcap_cannot_overflow(device: str) -> None:
    attend("mixed", device, **LENS, softcap=30.0, scale=1e30)
    attend("mixed", device, **LENS, softcap=1e-30, scale=1.0)


SLOPES, SINKS = torch.tensor([2.0**64, 1e10, 0.0, 0.5]), torch.tensor([2.0**100, -(2.0**100), 0.0, -torch.inf])


@pytest.mark.parametrize(
    "given",
    [
        {"softcap": 2.0**100, "scale": 1e-3},
        {"softcap": 2.0**-100, "scale": 2.0**20},
        {"scale": -(2.0**-100)},
        {"alibi": SLOPES, "sinks": SINKS},
        {"alibi": SLOPES, "mask": True},
    ],
    ids=["large-softcap", "small-softcap", "small-scale", "slopes-sinks", "slopes-tree"],
)
def test_options_at_their_limits(given: dict[str, Any], device: str) -> None:
    attend("mixed", device, q_lens=[1, 3, 20], kv_lens=[5, 30, 90], **given)


@pytest.mark.parametrize("q_scale", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
@pytest.mark.parametrize("q_dtype", ["e4m3fn", "e4m3fnuz", "e5m2"])
def test_fp8_queries(q_dtype: str, q_scale: Any, device: str) -> None:
    attend("mixed", device, **LENS, q_dtype=q_dtype, format="e4m3fn", q_scale=q_scale)


@pytest.mark.parametrize("out_scale", [0.02, torch.tensor(0.02)], ids=["number", "tensor"])
@pytest.mark.parametrize("out_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2], ids=str)
def test_fp8_output(out_dtype: torch.dtype, out_scale: Any, device: str) -> None:
    s = build(3, **LENS, format="bf16", q_dtype="bf16", out_scale=out_scale, device=device)
    out, lse = run("mixed", s, out_dtype=out_dtype)
    check("mixed", s, out, lse, scale=0.02)


def test_fp8_output_saturates(device: str) -> None:
    s = build(3, [1, 20], [40, 20], out_scale=1e-4, device=device)
    out, _ = run("mixed", s, out_dtype=torch.float8_e4m3fn)
    assert torch.equal(out.float().abs() == 448, s.expected.abs() > 432e-4)  # 432 is half-way between 416 and 448


@pytest.mark.parametrize("power", [-100, 60, 98])
def test_queries_far_from_one(power: int, device: str) -> None:
    """bf16 holds more than the fp16 in which an eight-bit cache is multiplied."""
    s = build(4, **LENS, format="e4m3fn", q_dtype="bf16", scale=0.25 * 2.0**-power, device=device)
    small = build(4, **LENS, format="e4m3fn", q_dtype="bf16", scale=0.25, device=device)
    s.q[: s.live] = small.q[: s.live] * 2.0**power
    out, lse = run("mixed", s)
    check("mixed", small, out, lse)


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_query_of_zeros(softcap: float | None, kernel: str, device: str) -> None:
    s = build(5, [1, 2], [40, 2], format="e4m3fn", q_dtype="bf16", softcap=softcap, kv_heads=1, device=device)
    s.q[: s.live] = 0
    out, lse = run(kernel, s)
    assert lse is not None
    for row, keys in ((0, 40), (1, 1), (2, 2)):
        assert torch.allclose(lse[row].cpu(), torch.tensor(keys).log().expand(2))
    assert torch.isfinite(out.float()[: s.live]).all()
