"""The operator on the GPU's kernels against float64: every two values of all factors meet, then the extremes one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quire
from gpu.calls import DEVICE, attend, attend_and_check, check, every, fresh_out, needs_hopper
from gpu.pairs import Case, cover, name_of
from support.scenario import LARGEST, TYPES, Scenario, build

I32, I64 = torch.int32, torch.int64

KERNELS = ["triton-decode", "triton-mixed"]
"""Those without limits."""
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "window_both_sides": {"window": (30, 3), "causal": False},
    "window_alibi": {"window": 33, "alibi": True},
    "softcap_negative_scale": {"softcap": 4.0, "scale": -0.3},
    "sinks": {"sinks": True},
    "causal_by_row_window": {"causal": "mixed", "window": (25, 4)},
    "tree": {"mask": True},
    "tree_window_alibi": {"mask": True, "window": 25, "alibi": True},
    "invariant": {"batch_invariant": True, "window": 90, "sinks": True},
    "images_alibi": {"spans": "images", "alibi": True},
    "chunks": {"spans": "chunks"},
    "shard_window": {"shard": (1, 3, 5), "window": 60},
}
FORMS = ["full", "context"]
NUMBERS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"format": "fp16", "q_dtype": "fp16"},
    "bf16": {"format": "bf16", "q_dtype": "bf16"},
    "bf16_over_e4m3fn": {"format": "e4m3fn", "q_dtype": "bf16"},
    "fp16_over_e4m3fn_bytes_by_head": {"format": "e4m3fn", "q_dtype": "fp16", "scales": "head", "storage": "bytes"},
    "bf16_over_e4m3fnuz_by_token": {"format": "e4m3fnuz", "q_dtype": "bf16", "scales": "token"},
    "bf16_over_e5m2_by_head": {"format": "e5m2", "q_dtype": "bf16", "scales": "head"},
    "bf16_over_int8_by_token": {"format": "int8", "q_dtype": "bf16", "scales": "token"},
    "e4m3fn_over_e4m3fn": {"format": "e4m3fn", "q_dtype": "e4m3fn", "q_scale": 0.03},
    "e5m2_over_int8_bytes": {"format": "int8", "q_dtype": "e5m2", "q_scale": 0.03, "storage": "bytes"},
}
LAYOUTS = ["nhd", "hnd", "vllm_x", "vllm_joint", "aiter"]
PAGES = ["page1", "page5", "page16", "page33", "page64", "page544"]
HEADS = ["16", "24x40", "64", "80", "96x64", "128", "192x128", "256"]
GROUPS = ["group1", "group2", "group3", "group8", "group16", "group40"]
INDEX = {"i32": (I32, I32, I32), "i64": (I64, I64, I64), "i64_i32_i64": (I64, I32, I64), "i32_i64_i32": (I32, I64, I32)}
LENS: dict[str, dict[str, Any]] = {
    "rows_of_all_kinds": {"q_lens": [1, 40, 3, 0, 20], "kv_lens": [5, 40, 100, 7, 90], "padding": 3},
    "decodes": {"q_lens": [1, 1, 2, 1], "kv_lens": [300, 17, 64, 700]},
    "drafts": {"q_lens": [4, 4, 5, 0, 4], "kv_lens": [60, 4, 333, 9, 128], "padding": 1},
    "prompts": {"q_lens": [130, 70], "kv_lens": [130, 200]},
}
LONG_PROMPTS: dict[str, Any] = {"q_lens": [300, 1, 150, 2], "kv_lens": [900, 1500, 150, 40], "padding": 3}
GAPS = ["dense", "padded"]


def allowed(case: Case) -> bool:
    """Whether the values of a case, or of a part of one, can meet."""
    numbers = NUMBERS.get(case.get("numbers", ""), {})
    if case.get("gap") == "padded" and numbers.get("storage") == "bytes":
        return False  # one or the other
    # With a quantised cache the forms differ: then bits cannot be invariant.
    return not (case.get("feature") == "invariant" and case.get("form") == "context" and numbers.get("format") in LARGEST)


CASES = cover(
    {
        "kernel": KERNELS,
        "feature": list(FEATURES),
        "form": FORMS,
        "numbers": list(NUMBERS),
        "layout": LAYOUTS,
        "page": PAGES,
        "head": HEADS,
        "group": GROUPS,
        "index": list(INDEX),
        "lens": list(LENS),
        "gap": GAPS,
    },
    allowed,
)


def build_case(case: Case, **more: Any) -> Scenario:
    page_size = int(case["page"].removeprefix("page"))
    head_dim, _, v_head_dim = case["head"].partition("x")
    splits = (int(head_dim), page_size if case["layout"] == "aiter" else 0)
    values: dict[str, Any] = {
        "group": int(case["group"].removeprefix("group")),
        "kv_heads": 1 if case["group"] in ("group40", "group160") else 2,
        "head_dim": int(head_dim),
        "v_head_dim": int(v_head_dim or head_dim),
        "page_size": page_size,
        "layout": case["layout"],
        "x": next(x for x in (16, 8, 4, 1) if all(n % x == 0 for n in splits)),
        "index": INDEX[case["index"]],
        "form": case["form"],
        "storage": {"dense": "native", "padded": "padded"}[case["gap"]],
        "device": DEVICE,
    }
    values |= FEATURES[case["feature"]] | NUMBERS[case["numbers"]] | LENS.get(case["lens"], LONG_PROMPTS) | more
    return build(1, **values)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_pairs(case: Case) -> None:
    attend_and_check(build_case(case), case["kernel"])


def on_hopper(case: Case) -> bool:
    """Whether Gluon's kernels take it."""
    return allowed(case) and not (case.get("form") == "context" and "over" in case.get("numbers", ""))


@needs_hopper
@pytest.mark.parametrize(
    "case",
    cover(
        {
            "feature": [name for name in FEATURES if not name.startswith(("tree", "invariant"))],
            "form": FORMS,
            "numbers": ["fp16", "bf16", "bf16_over_e4m3fn", "fp16_over_e4m3fn_bytes_by_head", "bf16_over_e5m2_by_head"],
            "layout": ["nhd", "hnd", "vllm_joint"],
            "page": ["page5", "page16", "page544"],
            "head": ["34x40", "96x64", "128"],
            "group": ["group1", "group3", "group8", "group160"],
            "index": list(INDEX),
            "lens": ["rows_of_all_kinds", "decodes", "long_prompts"],
            "gap": GAPS,
        },
        on_hopper,
    ),
    ids=name_of,
)
def test_pairs_on_hopper(case: Case) -> None:
    attend_and_check(build_case(case), "gluon-mixed")


MIXED = LENS["rows_of_all_kinds"]
EXTREMES: dict[str, dict[str, Any]] = {
    "group-160": {**MIXED, "kv_heads": 1, "group": 160, "format": "bf16", "q_dtype": "bf16"},
    "fp32-over-bf16": {**MIXED, "format": "bf16", "head_dim": 64},
    "fp16-over-bf16": {**MIXED, "format": "bf16", "q_dtype": "fp16", "head_dim": 64},
    "non-causal": {**MIXED, "format": "bf16", "q_dtype": "bf16", "causal": False, "form": "context"},
    "many-heads": {**MIXED, "kv_heads": 20, "group": 5, "head_dim": 32},
    "head-1": {**MIXED, "head_dim": 1, "v_head_dim": 1},
    "head-7-by-33": {**MIXED, "head_dim": 7, "v_head_dim": 33, "format": "fp16", "q_dtype": "fp16"},
    "head-320-by-512": {**MIXED, "head_dim": 320, "v_head_dim": 512, "format": "bf16", "q_dtype": "bf16"},
    "head-512": {**MIXED, "head_dim": 512, "format": "e4m3fn", "q_dtype": "bf16"},
    "head-512-fp32": {**MIXED, "head_dim": 512, "kv_heads": 1},
    "keys-narrower-than-values": {**MIXED, "head_dim": 16, "v_head_dim": 256, "format": "bf16", "q_dtype": "bf16"},
    "window-of-one": {**MIXED, "window": 1},
    "right-only": {**MIXED, "window": (None, 3), "causal": False},
    "everything": {**MIXED, "window": 21, "softcap": 3.0, "alibi": True, "sinks": True, "scale": 0.4, "form": "context"},
    "no-scale": {**MIXED, "scale": 0.0, "sinks": True},
    "large-logits": {**MIXED, "scale": 300.0, "softcap": 1e4},
    "no-keys": {"q_lens": [5, 3, 4], "kv_lens": [2, 0, 9], "causal": False, "padding": 2},
    "no-keys-but-sinks": {"q_lens": [5, 3, 4], "kv_lens": [2, 0, 9], "causal": False, "sinks": True},
    "no-queries": {"q_lens": [0, 0, 0], "kv_lens": [2, 0, 9], "padding": 5},
    "long-keys": {"q_lens": [1, 2, 1], "kv_lens": [9000, 4001, 1], "format": "bf16", "q_dtype": "bf16", "head_dim": 64},
    "prompt-and-decodes": {"q_lens": [300, 1, 1, 17], "kv_lens": [600, 2000, 40, 17], "format": "bf16", "q_dtype": "bf16"},
}


IN_BOTH = ("group-160", "head-512", "window-of-one", "no-keys", "long-keys", "prompt-and-decodes")
"""Others take turns: each is compiled anew, and that takes a while."""


@pytest.mark.parametrize(
    ("name", "kernel"),
    [(name, kernel) for at, name in enumerate(EXTREMES) for kernel in (KERNELS if name in IN_BOTH else [KERNELS[at % 2]])],
)
def test_extreme(name: str, kernel: str) -> None:
    attend_and_check(build(2, **EXTREMES[name], device=DEVICE), kernel)


@every
@pytest.mark.parametrize("form", FORMS)
def test_more_rows_than_are_scanned_at_once(form: str, kernel: str) -> None:
    q_lens = [(1, 0, 2, 1, 0)[i % 5] for i in range(1500)]
    kv_lens = [q_len + i % 23 for i, q_len in enumerate(q_lens)]
    q_lens[1200], kv_lens[1200] = 70, 90
    s = build(3, q_lens, kv_lens, kv_heads=1, head_dim=64, format="bf16", q_dtype="bf16", form=form, padding=9, device=DEVICE)
    attend_and_check(s, kernel)


@every
@pytest.mark.parametrize(
    ("out_type", "given"), [("e4m3fn", "number"), ("e4m3fn", "tensor"), ("e4m3fnuz", "tensor"), ("e5m2", "number")]
)
def test_fp8_output_saturates(out_type: str, given: str, kernel: str) -> None:
    scale = 0.004
    out_scale = scale if given == "number" else torch.tensor(scale, device=DEVICE)
    s = build(5, **MIXED, format="bf16", q_dtype="bf16", head_dim=64, out_scale=scale, device=DEVICE)
    s.options = quire.Options(out_scale=out_scale)
    out, lse = attend(s, kernel, out_dtype=TYPES[out_type])
    got, largest = out[: s.live].double(), torch.finfo(out.dtype).max
    wanted = (s.expected / scale).clamp(-largest, largest)
    assert out_type == "e5m2" or (wanted.abs() == largest).any(), "no element of this case saturates"
    eps = torch.finfo(out.dtype).eps
    lost = torch.finfo(torch.bfloat16).eps * s.weighted / scale
    assert ((got - wanted).abs() <= eps / 2 * (wanted.abs() + lost) + lost + 1e-3).all()
    s.check(s.expected.to(torch.float32), lse)


@every
@pytest.mark.parametrize("q_dtype", ["e4m3fn", "e4m3fnuz", "e5m2"])
def test_fp8_queries_and_outputs(q_dtype: str, kernel: str) -> None:
    s = build(6, **MIXED, q_dtype=q_dtype, format="e4m3fn", q_scale=torch.tensor(0.03), out_scale=0.02, device=DEVICE)
    out, lse = attend(s, kernel, out=fresh_out(s))
    assert out.dtype == s.q.dtype
    check(s, out, lse, 0.02)


@every
def test_a_default_output(kernel: str) -> None:
    """Zeros in padding rows, of the output and of the LSE."""
    s = build(7, **MIXED, format="bf16", q_dtype="bf16", head_dim=64, device=DEVICE)
    s.batch.max_q_len = 16
    for _ in range(2):
        out, lse = quire.attend(s.q, s.cache, s.batch, s.options, lse=True, kernel=kernel)
        s.check(out, lse, factors=torch.bfloat16)
        assert (out[s.live :] == 0).all() and (lse[s.live :] == 0).all()
        alone = quire.attend(s.q, s.cache, s.batch, s.options, kernel=kernel)
        assert torch.equal(alone, out)


@every
def test_no_sequences(kernel: str) -> None:
    s = build(8, [], [], padding=3, format="bf16", q_dtype="bf16", head_dim=64, device=DEVICE)
    out, lse = quire.attend(s.q, s.cache, s.batch, lse=True, kernel=kernel)
    assert (out == 0).all() and (lse == 0).all()
    assert quire.attend(s.q[:0], s.cache, s.batch, kernel=kernel).shape == (0, 4, 64)


def test_every_pair_is_there() -> None:
    """The array holds what it promises: a value that nothing meets would not be noticed otherwise."""
    for name, values in (("feature", FEATURES), ("numbers", NUMBERS), ("kernel", KERNELS)):
        for value in values:
            met = [case for case in CASES if case[name] == value]
            assert {case["layout"] for case in met} == set(LAYOUTS)
            assert {case["page"] for case in met} == set(PAGES)
            assert {case["head"] for case in met} == set(HEADS)
