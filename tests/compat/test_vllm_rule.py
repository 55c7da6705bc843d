"""What vLLM's own dispatch does with decode rows, under the rule of today and the one of November 2025."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.compat.vllm_rule import CONSEQUENCES, KERNELS, NOTES, RULES, VllmCall, explain_vllm
from quire.errors import ArgumentError
from quire.platform import Platform

CDNA = ("gfx90a", "gfx942", "gfx950")
RDNA = ("gfx1100", "gfx1201")
BOTH = ("today", "2025-11")


def call(arch: str, **changes: Any) -> VllmCall:
    """A call that the custom kernel takes wherever it is compiled."""
    fits = {"q_heads": 64, "kv_heads": 8, "head_size": 128, "block_size": 16}
    return VllmCall(Platform.named(arch), **{**fits, **changes})


def of_the_test(arch: str, queries_per_kv: int = 1, **changes: Any) -> VllmCall:
    """A call of test_prefix_prefill.py: 64 query heads, pages of 32, fp16, max_seq_len 1024."""
    return call(arch, kv_heads=64 // queries_per_kv, block_size=32, max_seq_len=1024, **changes)


# --- the configuration tables of the ROCm story ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize("arch", CDNA)
@pytest.mark.parametrize(
    "queries_per_kv, window, head_size, ratio, selected, refused",
    [
        (1, 0, 128, 1, "custom", []),
        (1, 16, 128, 1, "triton", ["sliding_window: given 16, allowed 0"]),
        (64, 0, 128, 64, "triton", ["gqa_ratio: given 64, allowed 1 to 16"]),
        (1, 0, 24, 1, "triton", ["head_size: given 24, allowed 64 or 128"]),
    ],
    ids=["one-query-head-per-kv-head", "window-16", "one-kv-head", "head-24"],
)
def test_seed_002_section_4(
    rule: str, arch: str, queries_per_kv: int, window: int, head_size: int, ratio: int, selected: str, refused: list[str]
) -> None:
    decision = explain_vllm(of_the_test(arch, queries_per_kv, sliding_window=window, head_size=head_size), rule)
    assert decision.call.gqa_ratio == ratio
    assert (decision.selected, decision.outcome) == (selected, "runs")
    assert [str(reason) for reason in decision.reasons if not reason.holds] == refused


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize("arch", CDNA)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e4m3"])
def test_seed_003_the_configuration_that_failed(rule: str, arch: str, kv_cache_dtype: str) -> None:
    """Seed 003 calls one query head per kv head "ratio 64"; it is ratio 1, and that is why the custom kernel takes it."""
    decision = explain_vllm(of_the_test(arch, queries_per_kv=1, kv_cache_dtype=kv_cache_dtype), rule)
    assert (decision.call.gqa_ratio, decision.selected, decision.outcome) == (1, "custom", "runs")


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize("arch", CDNA + RDNA)
def test_seed_004_section_1(rule: str, arch: str) -> None:
    """Seed 004 says that 64 query heads per kv head are "ratio 1" and too few for gfx11; they are ratio 64 and too many."""
    decision = explain_vllm(of_the_test(arch, queries_per_kv=64), rule)
    (ratio,) = (reason for reason in decision.reasons if reason.rule == "gqa_ratio")
    assert (decision.selected, ratio.given, ratio.holds) == ("triton", 64, False)
    assert ratio.allowed == ("1 to 16" if arch in CDNA else "3 to 16")
    one = explain_vllm(of_the_test(arch, queries_per_kv=1), rule)
    assert one.selected == ("custom" if arch in CDNA else "triton")


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize("arch", CDNA)
@pytest.mark.parametrize("kv_cache_dtype, window", [("fp8_e5m2", 0), ("fp8_e5m2", 16), ("auto", 16)])
def test_seed_004_sections_2_and_3(rule: str, arch: str, kv_cache_dtype: str, window: int) -> None:
    decision = explain_vllm(of_the_test(arch, kv_cache_dtype=kv_cache_dtype, sliding_window=window), rule)
    if window:
        assert (decision.selected, decision.outcome) == ("triton", "runs")
    else:
        assert (decision.selected, decision.outcome) == ("custom", "raises")
        assert decision.answer == "custom kernel selected by the rule, and it will raise: reads e4m3 only"


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize("arch", CDNA + RDNA)
@pytest.mark.parametrize("alibi", [False, True], ids=["plain", "alibi"])
def test_every_configuration_of_the_test(rule: str, arch: str, alibi: bool) -> None:
    """The test's whole grid: RDNA never gets the custom kernel with pages of 32; CDNA in one corner, where e5m2 raises."""
    for queries_per_kv in (1, 64):
        for head_size in (24, 128):
            for window in (0, 16, 2048):
                for kv_cache_dtype in ("auto", "fp8", "fp8_e5m2"):
                    one = of_the_test(
                        arch, queries_per_kv, head_size=head_size, sliding_window=window, kv_cache_dtype=kv_cache_dtype, alibi=alibi
                    )
                    corner = arch in CDNA and (queries_per_kv, head_size, window) == (1, 128, 0)
                    decision = explain_vllm(one, rule)
                    assert decision.selected == ("custom" if corner else "triton"), one
                    assert decision.outcome == ("raises" if corner and kv_cache_dtype == "fp8_e5m2" else "runs"), one


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201"])
@pytest.mark.parametrize("ratio, selected", [(1, "triton"), (2, "triton"), (3, "custom"), (16, "custom"), (17, "triton")])
def test_ratios_on_rdna(rule: str, arch: str, ratio: int, selected: str) -> None:
    assert explain_vllm(call(arch, q_heads=ratio, kv_heads=1), rule).selected == selected


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize("arch", CDNA)
@pytest.mark.parametrize("ratio, selected", [(1, "custom"), (4, "custom"), (16, "custom"), (17, "triton")])
def test_ratios_on_cdna(rule: str, arch: str, ratio: int, selected: str) -> None:
    assert explain_vllm(call(arch, q_heads=ratio, kv_heads=1), rule).selected == selected


# --- where the two rules differ ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["gfx900", "gfx906", "gfx908"])
def test_old_gfx9(arch: str) -> None:
    today, earlier = (explain_vllm(call(arch), rule) for rule in BOTH)
    assert (today.selected, today.outcome) == ("custom", "asserts")
    assert "assert(false)" in today.answer
    assert (earlier.selected, earlier.outcome) == ("triton", "runs")
    assert [reason.rule for reason in earlier.reasons] == ["arch"]


@pytest.mark.parametrize("changes", [{}, {"kv_cache_dtype": "fp8"}, {"head_size": 64, "block_size": 32, "kv_heads": 64}])
def test_gfx1250_today(changes: dict[str, Any]) -> None:
    """It passes the CDNA rule and takes the RDNA launcher."""
    decision = explain_vllm(call("gfx1250", **changes))
    assert (decision.selected, decision.outcome) == ("custom", "traps")
    assert "__builtin_trap()" in decision.answer


def test_gfx1250_under_the_old_rule_is_one_more_gfx12() -> None:
    assert explain_vllm(call("gfx1250", block_size=32), "2025-11").selected == "triton"
    decision = explain_vllm(call("gfx1250"), "2025-11")
    assert (decision.selected, decision.outcome) == ("custom", "traps")


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize("arch", ["gfx1030", "sm80", "sm90", "sm120"])
def test_never_the_custom_kernel(rule: str, arch: str) -> None:
    decision = explain_vllm(call(arch), rule)
    assert (decision.selected, decision.outcome) == ("triton", "runs")
    assert [reason.rule for reason in decision.reasons] == ["arch"]


@pytest.mark.parametrize("rule", BOTH)
def test_not_on_a_cpu(rule: str) -> None:
    decision = explain_vllm(call("cpu"), rule)
    assert (decision.selected, decision.outcome) == ("triton", "raises")
    assert "needs a GPU" in decision.answer


# --- every limit, alone -----------------------------------------------------------------------------------------------------

# One fault each.
FAULTS: dict[str, dict[str, Any]] = {
    "sliding_window": {"sliding_window": 1},
    "q_dtype": {"q_dtype": "fp32"},
    "head_size": {"head_size": 256},
    "block_size": {"block_size": 64},
    "gqa_ratio": {"q_heads": 136},
    "max_seq_len": {"max_seq_len": 131073},
    "alibi": {"alibi": True},
    "kv_cache_dtype": {"kv_cache_dtype": "fp8"},
    "sinks": {"sinks": True},
    "custom_paged_attn": {"custom_paged_attn": False},
    "aiter_paged_attn": {"aiter_paged_attn": True},
    "block_size_is_power_of_two": {"block_size": 48},
    "native_strides": {"native_strides": False},
}
# Who does not ask about it.
UNASKED = {
    ("today", "gfx942"): {"alibi", "kv_cache_dtype", "custom_paged_attn", "aiter_paged_attn"},
    ("today", "gfx1100"): {"custom_paged_attn", "aiter_paged_attn"},
    ("2025-11", "gfx942"): {"alibi", "kv_cache_dtype", "block_size_is_power_of_two", "native_strides"},
    ("2025-11", "gfx1100"): {"aiter_paged_attn", "block_size_is_power_of_two", "native_strides"},
}


@pytest.mark.parametrize("rule, arch", UNASKED)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_limit_can_refuse(rule: str, arch: str, fault: str) -> None:
    asked = fault not in UNASKED[rule, arch]
    decision = explain_vllm(call(arch, **FAULTS[fault]), rule)
    refused = [reason.rule for reason in decision.reasons if not reason.holds]
    if fault == "block_size_is_power_of_two":  # such a page size is not one of the rule's either
        assert refused == (["block_size", fault] if asked else ["block_size"])
    else:
        assert refused == ([fault] if asked else [])
    assert decision.selected == ("triton" if refused else "custom")


def test_those_are_all_the_limits_there_are() -> None:
    assert {limit.rule for branches in RULES.values() for branch in branches for limit in branch.limits} == set(FAULTS)


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
@pytest.mark.parametrize("window, selected", [(0, "custom"), (-1, "custom"), (1, "triton")])
def test_a_window_of_zero_or_less_is_none(rule: str, arch: str, window: int, selected: str) -> None:
    assert explain_vllm(call(arch, sliding_window=window), rule).selected == selected


@pytest.mark.parametrize("arch, kv_cache_dtype, selected", [("gfx942", "fp8", "custom"), ("gfx1100", "fp8", "triton")])
def test_only_rdna_asks_about_the_cache(arch: str, kv_cache_dtype: str, selected: str) -> None:
    assert explain_vllm(call(arch, kv_cache_dtype=kv_cache_dtype)).selected == selected


# --- what then happens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arch, changes, selected, outcome, why",
    [
        ("gfx942", {"kv_cache_dtype": "fp8_e5m2"}, "custom", "raises", "reads e4m3 only"),
        ("gfx942", {"kv_cache_dtype": "float16"}, "custom", "raises", "auto, fp8 and fp8_e4m3 only"),
        ("gfx950", {"kv_cache_dtype": "bfloat16"}, "custom", "raises", "auto, fp8 and fp8_e4m3 only"),
        ("gfx942", {"kv_cache_dtype": "fp8_inc"}, "custom", "raises", "fp8, fp8_e4m3 and fp8_e5m2"),
        ("sm90", {"kv_cache_dtype": "fp8_inc"}, "triton", "raises", "fp8, fp8_e4m3 and fp8_e5m2"),
        ("gfx90a", {"output_scale": True}, "custom", "raises", "no fp8 output on gfx90a"),
        ("gfx942", {"output_scale": True}, "custom", "runs", None),
        ("gfx1250", {}, "custom", "traps", "__builtin_trap()"),
        ("gfx1250", {"kv_cache_dtype": "fp8_e5m2"}, "custom", "raises", "reads e4m3 only"),
        ("gfx906", {}, "custom", "asserts", "assert(false)"),
        ("cpu", {}, "triton", "raises", "needs a GPU"),
        ("sm80", {"kv_cache_dtype": "fp8"}, "triton", "raises", "no e4m3 below sm89"),
        ("sm86", {"kv_cache_dtype": "fp8_e4m3"}, "triton", "raises", "no e4m3 below sm89"),
        ("sm80", {"kv_cache_dtype": "fp8_e5m2"}, "triton", "runs", None),
        ("sm89", {"kv_cache_dtype": "fp8"}, "triton", "runs", None),
        ("gfx1100", {"kv_cache_dtype": "bfloat16"}, "triton", "runs", None),
    ],
)
def test_what_then_happens(arch: str, changes: dict[str, Any], selected: str, outcome: str, why: str | None) -> None:
    decision = explain_vllm(call(arch, **changes))
    assert (decision.selected, decision.outcome) == (selected, outcome)
    assert (decision.why is None) if why is None else (why in str(decision.why) and why in decision.answer)
    assert (decision.then is None) == (why is None)


def test_every_consequence_is_reported() -> None:
    """Each row of the data above is the reason for some answer: none is dead."""
    asked = [
        explain_vllm(call(arch, kv_cache_dtype=kv, output_scale=arch == "gfx90a"))
        for arch in ("gfx90a", "gfx906", "gfx942", "gfx1250", "sm80", "cpu")
        for kv in ("auto", "fp8", "fp8_e5m2", "bfloat16", "fp8_inc")
    ]
    assert {decision.why for decision in asked} == {None, *(consequence.why for consequence in CONSEQUENCES)}


@pytest.mark.parametrize(
    "arch, changes, part",
    [
        ("gfx942", {}, "query_start_loc must be int32"),
        ("gfx942", {}, "max_seq_len must bound every sequence"),
        ("gfx1100", {"output_scale": True}, "output_scale is ignored on RDNA"),
        ("sm90", {}, "no split KV"),
        ("gfx1100", {"kv_cache_dtype": "fp8_e5m2"}, "store as e4m3"),
    ],
)
def test_notes(arch: str, changes: dict[str, Any], part: str) -> None:
    assert any(part in note for note in explain_vllm(call(arch, **changes)).notes)


def test_notes_only_where_they_apply() -> None:
    assert not any("RDNA" in note for note in explain_vllm(call("gfx942", output_scale=True)).notes)
    assert not any("e5m2" in note for note in explain_vllm(call("sm90", kv_cache_dtype="fp8_e5m2")).notes)
    assert explain_vllm(call("gfx1250")).notes == ()
    assert {kernel for kernel, _, _ in NOTES} == set(KERNELS)


# --- how it is told ---------------------------------------------------------------------------------------------------------


def test_text() -> None:
    text = str(explain_vllm(of_the_test("gfx942", kv_cache_dtype="fp8_e5m2")))
    first, second, *rows = text.splitlines()
    assert first.endswith(": custom kernel selected by the rule, and it will raise: reads e4m3 only")
    assert "today" in first and second == "  paged_attention_rocm on gfx942, group ratio 1 (64 query heads / 64 kv heads)"
    assert any(row.split() == "holds gqa_ratio given 1, allowed 1 to 16".split() for row in rows)
    assert rows[-1].split() == "raises fp8_format given e5m2, allowed none or e4m3".split()


def test_text_of_a_refusal() -> None:
    decision = explain_vllm(of_the_test("gfx942", queries_per_kv=64), "2025-11")
    assert decision.answer == "Triton kernel selected by the rule (gqa_ratio: given 64, allowed 1 to 16), and it runs"
    assert "November 2025" in str(decision) and "  fails    gqa_ratio" in str(decision)


def test_json() -> None:
    found = json.loads(json.dumps(explain_vllm(of_the_test("gfx942", kv_cache_dtype="fp8_e5m2")).to_dict()))
    assert {key: found[key] for key in ("rule", "selected", "kernel", "outcome", "why", "gqa_ratio")} == {
        "rule": "today",
        "selected": "custom",
        "kernel": "paged_attention_rocm",
        "outcome": "raises",
        "why": "reads e4m3 only",
        "gqa_ratio": 1,
    }
    assert found["reasons"][0] == {"rule": "arch", "given": "gfx942", "allowed": "gfx9* or gfx1250*", "holds": True}
    assert found["then"] == {"rule": "fp8_format", "given": "e5m2", "allowed": "none or e4m3", "holds": False}
    assert (found["call"]["platform"], found["call"]["kv_cache_dtype"], found["notes"]) == ("gfx942", "fp8_e5m2", [])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kv_heads": 5}, "q_heads: given 64; allowed: a multiple of kv_heads = 5"),
        ({"head_size": 0}, "head_size: given 0; allowed: 1 or more"),
        ({"q_dtype": "float16"}, "q_dtype: given 'float16'; allowed: fp16, bf16 or fp32"),
    ],
)
def test_a_call_that_means_nothing(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call("gfx942", **changes)


def test_an_unknown_rule() -> None:
    with pytest.raises(ArgumentError, match="rule: given 'tomorrow'; allowed: today or 2025-11"):
        explain_vllm(call("gfx942"), "tomorrow")
