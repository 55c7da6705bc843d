"""The operator against float64, feature by feature and in random combinations. Caches are poisoned wherever nothing may read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire.problem import default_out_dtype
from quire.reference import attention
from support.kernels import each_kernel, on_every_kernel  # noqa: F401
from support.scenario import LARGEST, Scenario, build

MIXED = {"q_lens": [1, 9, 0, 1, 33, 4], "kv_lens": [1, 40, 7, 130, 33, 20]}


def attend(s: Scenario) -> None:
    """Runs a scenario on every kernel, into a poisoned output, and checks every live row, the LSE, and that padding rows stay as
    they were. A 16-bit output may come of 16-bit factors, an fp32 one never."""

    def run() -> None:
        for dtype, factors in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
            out = torch.full((s.q.shape[0], s.q.shape[1], s.cache.v_head_dim), torch.nan, dtype=dtype, device=s.q.device)
            got, lse = quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, out=out, lse=True)
            assert got is out
            s.check(got, lse, factors=factors)
            assert got[s.live :].isnan().all()

    on_every_kernel(run)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.31},
    "window-1": {"window": 1},
    "window-17": {"window": 17},
    "window-left-5": {"window": (5, 0)},
    "window-wide": {"window": 4096},
    "softcap": {"softcap": 1.5},
    "softcap-tiny": {"softcap": 0.01},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "non-causal": {"causal": False},
    "non-causal-window": {"causal": False, "window": 6},
    "non-causal-right-only": {"causal": False, "window": (None, 3)},
    "non-causal-left-only": {"causal": False, "window": (3, None)},
    "causal-per-sequence": {"causal": "mixed"},
    "causal-per-sequence-window-alibi": {"causal": "mixed", "window": 9, "alibi": True},
    "tree": {"mask": True},
    "tree-window": {"mask": True, "window": 12},
    "tree-alibi-sinks": {"mask": True, "alibi": True, "sinks": True},
    "everything": {"window": 21, "softcap": 3.0, "alibi": True, "sinks": True, "scale": 0.4},
}


@pytest.mark.parametrize("form", ["full", "context"])
@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, form: str) -> None:
    attend(build(1, **MIXED, form=form, padding=2, **FEATURES[name]))


@pytest.mark.parametrize("form", ["full", "context"])
@pytest.mark.parametrize("storage", ["native", "bytes"])
@pytest.mark.parametrize(
    "format, scales", [(f, s) for f in LARGEST for s in ("tensor", "head", "token") if f != "int4_zp" or s == "token"]
)
def test_quantised_format(format: str, storage: str, scales: str, form: str) -> None:
    dim = 64 if format == "nvfp4_swizzled" else 16
    attend(build(2, **MIXED, format=format, storage=storage, scales=scales, form=form, q_dtype="bf16", head_dim=dim))


@pytest.mark.parametrize("q_dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("format", ["fp32", "fp16", "bf16"])
def test_types_of_query_and_cache(format: str, q_dtype: str) -> None:
    attend(build(3, **MIXED, format=format, q_dtype=q_dtype))


@pytest.mark.parametrize("q_dtype", ["e4m3fn", "e4m3fnuz", "e5m2"])
def test_fp8_queries(q_dtype: str) -> None:
    attend(build(4, **MIXED, q_dtype=q_dtype, q_scale=0.03, format="e4m3fn"))


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("out_type", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2])
def test_fp8_output_saturates(out_type: torch.dtype) -> None:
    scale = 0.004
    s = build(5, **MIXED, out_scale=scale)
    out = torch.zeros(s.q.shape, dtype=out_type)
    quire.attend(s.q, s.cache, s.batch, s.options, out=out)
    largest = torch.finfo(out_type).max
    wanted = (s.expected / scale).clamp(-largest, largest)
    assert out_type is torch.float8_e5m2 or (wanted.abs() == largest).any(), "no element of this case saturates"
    assert (out.double() - wanted).abs().le(torch.finfo(out_type).eps * wanted.abs() + 0.02).all()


@pytest.mark.parametrize("storage", ["native", "padded"])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm_x", "vllm_joint", "aiter"])
@pytest.mark.parametrize("page_size", [8, 16, 80])
def test_layout(layout: str, storage: str, page_size: int) -> None:
    attend(build(6, **MIXED, layout=layout, storage=storage, page_size=page_size, v_head_dim=24, format="bf16"))


@pytest.mark.parametrize("x", [1, 2, 3, 6, 24])
def test_any_x_that_divides(x: int) -> None:
    attend(build(7, **MIXED, layout="vllm_x", x=x, head_dim=24))


@pytest.mark.parametrize("page_size", [1, 7, 16, 32, 63, 64, 528, 544, 784])
def test_page_size(page_size: int) -> None:
    attend(build(8, [1, 5, 40], [700, 1100, 530], page_size=page_size, window=650))


@pytest.mark.parametrize("head_dim", [1, 2, 24, 64, 80, 96, 128, 192, 256, 512])
def test_head_dim(head_dim: int) -> None:
    attend(build(9, [1, 3, 12], [30, 3, 40], head_dim=head_dim))


@pytest.mark.parametrize("v_head_dim", [1, 7, 48])
def test_v_head_dim(v_head_dim: int) -> None:
    attend(build(10, **MIXED, v_head_dim=v_head_dim, form="context"))


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 1), (2, 3), (1, 5), (2, 7), (4, 8), (1, 64)])
def test_group(kv_heads: int, group: int) -> None:
    attend(build(11, [1, 6, 20], [50, 6, 70], kv_heads=kv_heads, group=group, alibi=True, sinks=True))


@pytest.mark.parametrize("q_starts", [torch.int32, torch.int64])
@pytest.mark.parametrize("kv_lens", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_table", [torch.int32, torch.int64])
def test_index_types_are_read_as_they_are(page_table: torch.dtype, kv_lens: torch.dtype, q_starts: torch.dtype) -> None:
    attend(build(12, **MIXED, index=(page_table, kv_lens, q_starts)))


@pytest.mark.parametrize("form", ["full", "context"])
def test_long_prefill_crosses_every_tile(form: str) -> None:
    attend(build(13, [700, 1, 300], [900, 1500, 300], kv_heads=2, group=1, head_dim=8, page_size=16, window=(600, 0), form=form))


def test_non_causal_rows_may_have_fewer_keys_than_queries_or_none() -> None:
    attend(build(14, [5, 3, 4], [2, 0, 9], causal=False))
    attend(build(15, [5, 3, 4], [2, 0, 9], causal=False, sinks=True))


@pytest.mark.usefixtures("each_kernel")
def test_a_row_without_keys_is_zero_and_its_lse_is_the_sink() -> None:
    s = build(16, [2], [0], causal=False)
    out, lse = quire.attend(s.q, s.cache, s.batch, s.options, lse=True)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out, lse = quire.attend(s.q, s.cache, s.batch, quire.Options(causal=False, sinks=sinks), lse=True)
    assert (out == 0).all()
    assert torch.allclose(lse, sinks.expand(2, 4))


@pytest.mark.usefixtures("each_kernel")
def test_empty_batch() -> None:
    s = build(17, [], [], padding=3)
    out = quire.attend(s.q, s.cache, s.batch)
    assert out.shape == s.q.shape
    assert (out == 0).all()
    assert quire.attend(s.q[:0], s.cache, s.batch).shape == (0, 4, 16)


@pytest.mark.usefixtures("each_kernel")
def test_q_and_out_may_be_strided() -> None:
    s = build(18, **MIXED)
    fused = torch.full((s.q.shape[0], 9, 40), torch.nan)
    fused[:, 2:6, 3:35:2] = s.q
    out = torch.full((s.q.shape[0], 16, 4), torch.nan).transpose(1, 2)
    quire.attend(fused[:, 2:6, 3:35:2], s.cache, s.batch, out=out)
    s.check(out)


@pytest.mark.parametrize(
    ("q_dtype", "options", "wanted"),
    [
        ("fp16", {}, torch.float16),
        ("e5m2", {"q_scale": 0.1}, torch.bfloat16),
        ("bf16", {"out_scale": 0.1}, torch.float8_e4m3fn),
        ("e5m2", {"q_scale": 0.1, "out_scale": 0.1}, torch.float8_e5m2),
    ],
)
def test_type_of_the_default_output(q_dtype: str, options: dict[str, float], wanted: torch.dtype) -> None:
    s = build(19, [3], [9], q_dtype=q_dtype, **options)
    assert quire.attend(s.q, s.cache, s.batch, s.options).dtype is wanted


def test_large_logits_do_not_overflow() -> None:
    s = build(20, **MIXED, scale=300.0)
    attend(s)
    attend(build(20, **MIXED, scale=300.0, softcap=30.0))


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("size", [1e4, 3e4, 1e6, 1e9])
def test_huge_logits_choose_the_largest(size: float, q_len: int) -> None:
    """Logits so large that the remainder of their rounding is beyond what an exponential takes."""
    g = torch.Generator().manual_seed(3)
    q, k = (torch.randn(shape, generator=g) * size for shape in ((q_len, 4, 64), (16, 16, 1, 64)))
    v = torch.randn(16, 16, 1, 64, generator=g)
    cache = quire.KVCache.wrap(k, v, layout="nhd")
    batch = quire.Batch(*(torch.tensor(x, dtype=torch.int32) for x in ([list(range(16))], [200], [0, q_len])))
    for scale in (0.125, -0.125):
        out, lse = quire.attend(q, cache, batch, quire.Options(scale=scale), lse=True)
        right, right_lse = attention(q, *(pages.flatten(0, 1)[:200] for pages in (k, v)), scale=scale)
        assert torch.allclose(out.double(), right, atol=1e-4) and torch.allclose(lse.double(), right_lse, rtol=1e-6)


@pytest.mark.usefixtures("each_kernel")
def test_an_infinite_sink_takes_everything() -> None:
    s = build(23, [2, 1], [9, 30])
    sinks = torch.tensor([torch.inf, 0.0, 0.0, 0.0])
    out, lse = quire.attend(s.q, s.cache, s.batch, quire.Options(sinks=sinks), lse=True)
    assert (out[:, 0] == 0).all() and (lse[:, 0] == torch.inf).all() and out.isfinite().all()


@pytest.mark.usefixtures("each_kernel")
def test_the_smallest_softcap_is_one() -> None:
    s = build(24, [2, 1], [9, 30])
    outs = [quire.attend(s.q, s.cache, s.batch, quire.Options(softcap=cap)) for cap in (2.0**-100, 1e-20)]
    assert torch.allclose(outs[0], outs[1], atol=1e-6)


QUERIES = {"fp32": {}, "bf16": {}, "e4m3fn": {"q_scale": 0.05}, "e4m3fnuz": {"q_scale": 0.05}, "e5m2": {"q_scale": 0.05}}


@pytest.mark.parametrize("q_dtype", QUERIES)
def test_the_documented_type_of_the_default_output(q_dtype: str) -> None:
    s = build(28, [2, 1], [9, 30], q_dtype=q_dtype, **QUERIES[q_dtype])
    fp8 = s.q.dtype.itemsize == 1
    assert quire.attend(s.q, s.cache, s.batch, s.options).dtype is (torch.bfloat16 if fp8 else s.q.dtype)
    scaled = quire.Options(**QUERIES[q_dtype], out_scale=0.5)
    assert quire.attend(s.q, s.cache, s.batch, scaled).dtype is (s.q.dtype if fp8 else torch.float8_e4m3fn)
    documented = [" ".join(str(function.__doc__).split()) for function in (quire.attend, default_out_dtype)]
    assert "of q's type (bf16 for fp8 queries); with `Options(out_scale=...)` of q's fp8 type, or OCP fp8" in documented[0]
    assert "With an `out_scale`: fp8 queries' own type, `OCP_FP8` for others. Without: the queries' type, bf16 for" in documented[1]


LIMITS: dict[str, dict[str, Any]] = {
    "largest softcap": {"softcap": 2.0**100},
    "large softcap over a small scale": {"softcap": 2.0**100, "scale": 1e-3},
    "smallest softcap over a large scale": {"softcap": 2.0**-100, "scale": 2.0**20},
    "largest scale under a softcap": {"softcap": 30.0, "scale": 2.0**100},
    "smallest scale": {"scale": -(2.0**-100)},
    "steepest slopes": {"alibi": torch.tensor([2.0**64, 1e10, 0.0, 0.5])},
    "steepest slopes in a tree": {"alibi": torch.tensor([2.0**64, 1e10, 0.0, 0.5]), "mask": True},
    "largest sinks": {"sinks": torch.tensor([2.0**100, -(2.0**100), 0.0, -torch.inf])},
}


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("name", LIMITS)
def test_options_at_their_limits_are_computed(name: str) -> None:
    attend(build(25, [2, 1], [9, 30], **LIMITS[name]))


BEYOND: dict[str, dict[str, Any]] = {
    "alibi[1]": {"alibi": torch.tensor([1.0, 3e38, 0.0, 0.0])},
    "alibi[2]": {"alibi": torch.tensor([1.0, 0.0, -1e20, 0.0])},
    "alibi[3]": {"alibi": torch.tensor([1.0, 0.0, 0.0, torch.nan])},
    "sinks[0]": {"sinks": torch.tensor([3e38, 0.0, 0.0, 0.0])},
    "sinks[1]": {"sinks": torch.tensor([0.0, torch.nan, 0.0, 0.0])},
    "out_scale": {"out_scale": torch.tensor(1e-35)},
}


@pytest.mark.parametrize("argument", BEYOND)
def test_options_in_tensors_that_leave_fp32_are_refused(argument: str) -> None:
    s = build(26, [2, 1], [9, 30])
    options = quire.Options(**BEYOND[argument])
    with pytest.raises(quire.ContractError) as caught:
        quire.attend(s.q, s.cache, s.batch, options)
    (found,) = caught.value.violations
    assert (found.rule, found.argument) == ("numbers", argument)


def test_a_query_scale_in_a_tensor_that_leaves_fp32_is_refused() -> None:
    s = build(27, [2, 1], [9, 30], q_dtype="e4m3fn", q_scale=torch.tensor(0.5), format="e4m3fn")
    for scale, others in ((1e35, {}), (1e20, {"scale": 1e20}), (1e20, {"scale": 1e10, "softcap": 1e-20})):
        options = quire.Options(q_scale=torch.tensor(scale), **others)
        with pytest.raises(quire.ContractError, match=r"\[numbers\]"):
            quire.attend(s.q, s.cache, s.batch, options)


def test_low_hints_are_reported_and_do_not_truncate() -> None:
    s = build(21, **MIXED)
    s.batch.max_q_len, s.batch.max_kv_len = 2, 3
    attend(s)
    found = quire.check(s.q, s.cache, s.batch)
    assert [(v.rule, v.argument, v.harmless) for v in found] == [("lengths", "max_q_len", True), ("lengths", "max_kv_len", True)]


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Any combination that means something."""
    q_lens = draw(st.lists(st.sampled_from([0, 1, 1, 2, 5, 16, 31]), min_size=0, max_size=5))
    spec: dict[str, Any] = {
        "q_lens": q_lens,
        "kv_lens": [n + draw(st.sampled_from([0, 1, 15, 16, 17, 70])) for n in q_lens],
        "kv_heads": draw(st.sampled_from([1, 2, 3])),
        "group": draw(st.sampled_from([1, 3, 4])),
        "head_dim": draw(st.sampled_from([4, 20, 48])),
        "v_head_dim": draw(st.sampled_from([None, 12])),
        "page_size": draw(st.sampled_from([4, 12, 16, 64])),
        "layout": draw(st.sampled_from(["nhd", "hnd", "vllm_x", "vllm_joint", "aiter"])),
        "x": draw(st.sampled_from([1, 2, 4])),
        "format": draw(st.sampled_from(["fp32", "fp16", "bf16", "e4m3fn", "e4m3fnuz", "e5m2", "int8", "int4", "int4_zp"])),
        "v_format": draw(st.sampled_from([None, None, "fp16", "e5m2", "int8", "int4", "int4_zp"])),
        "scales": draw(st.sampled_from(["tensor", "head", "token"])),
        "q_dtype": draw(st.sampled_from(["fp32", "fp16", "bf16", "e4m3fn"])),
        "form": draw(st.sampled_from(["full", "context"])),
        "padding": draw(st.sampled_from([0, 3])),
        "index": tuple(draw(st.sampled_from([torch.int32, torch.int64])) for _ in range(3)),
        "window": draw(st.sampled_from([None, None, 1, 5, (7, 2), (None, 0), (3, None)])),
        "softcap": draw(st.sampled_from([None, 2.0])),
        "alibi": draw(st.sampled_from([None, True])),
        "sinks": draw(st.sampled_from([None, True])),
    }
    if spec["layout"] == "vllm_joint":
        spec["v_format"] = None
    if "int4_zp" in (spec["format"], spec["v_format"]):
        spec["scales"] = "token"
    if {"int4", "int4_zp"} & {spec["format"], spec["v_format"]} and spec["layout"] != "nhd":
        spec["x"] = min(spec["x"], 2)  # 4 dims are 2 bytes
    grouped = draw(st.sampled_from([None] * 5 + [("nvfp4", None), ("nvfp4", "nvfp4_swizzled"), ("bf16", "nvfp4")]))
    if grouped is not None:
        spec |= dict(zip(("format", "v_format"), grouped)) | {"head_dim": 48, "v_head_dim": 64}
        spec["layout"] = "hnd" if spec["layout"] == "hnd" else "nhd"
    in_bytes = {spec["format"], spec["v_format"] or spec["format"]} <= set(LARGEST)
    storages = ["native", "padded"] + (["bytes"] if in_bytes else [])
    spec["storage"] = draw(st.sampled_from(storages))
    if draw(st.booleans()):
        spec["mask"] = True
    else:
        spec["causal"] = draw(st.sampled_from([True, False, "mixed"]))
    if spec["q_dtype"] == "e4m3fn":
        spec["q_scale"] = 0.05
    return spec


@settings(max_examples=120)
@given(spec=calls(), seed=st.integers(0, 2**16))
def test_any_combination(spec: dict[str, Any], seed: int) -> None:
    attend(build(seed, **spec))


@pytest.mark.parametrize("check", [None, False, 0, "none"])
def test_checks_cannot_be_switched_off(check: object) -> None:
    pool = quire.PagePool(4, 8)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8)
    batch = pool.step({pool.sequence(): 3})
    q, k = torch.zeros(3, 1, 8, dtype=torch.bfloat16), torch.zeros(3, 1, 8, dtype=torch.bfloat16)
    for run in (
        lambda: quire.attend(q, cache, batch, check=check),  # type: ignore[call-overload]
        lambda: quire.write(k, k, cache, batch, check=check),  # type: ignore[arg-type]
        lambda: quire.step(q, k, k, cache, batch, check=check),  # type: ignore[call-overload]
    ):
        with pytest.raises(quire.ArgumentError, match="check"):
            run()


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e5m2fnuz], ids=str)
def test_an_output_of_an_fp8_type_that_no_kernel_knows_is_refused(dtype: torch.dtype) -> None:
    pool = quire.PagePool(4, 8)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8)
    batch = pool.step({pool.sequence(): 3})
    q = torch.zeros(3, 1, 8, dtype=torch.bfloat16)
    quire.write(q, q, cache, batch)
    with pytest.raises(quire.ContractError, match="out"):
        quire.attend(q, cache, batch, quire.Options(out_scale=1.0), out=torch.empty(3, 1, 8, dtype=dtype))
