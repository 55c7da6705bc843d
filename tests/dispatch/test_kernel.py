"""Limits as data: what each allows, and that each can refuse."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from quire.dispatch.catalogue import CATALOGUE
from quire.dispatch.choose import choose
from quire.dispatch.kernel import (
    AllOf,
    Except,
    IntRange,
    Kernel,
    Limit,
    LimitQuery,
    LimitResult,
    MultipleOf,
    OneOf,
    as_text,
    check_limits,
)
from quire.errors import KernelError
from quire.platform import Platform
from quire.problem import Extent, Problem

PROBLEM = Problem(q_heads=32, kv_heads=8, head_dim=128, page_size=16)
EXTENT = Extent(seqs=2, tokens=40, max_q_len=20, max_kv_len=4096, saved_keys=100)
CPU = replace(Platform.named("cpu"), cpu_features=("avx2",))


def kernel(**limits: Any) -> Kernel:
    return Kernel("special", "attend", "a kernel of this test", "nowhere:launch", **limits)


@pytest.mark.parametrize(
    "allowed, inside, outside, text",
    [
        (OneOf((16, 32)), 32, 24, "16 or 32"),
        (OneOf(("a", "b", "c")), "a", "d", "a, b or c"),
        (OneOf((False,)), False, True, "no"),
        (Except(("gfx1250",)), "gfx942", "gfx1250", "not gfx1250"),
        (IntRange(1, 512), 512, 513, "1 to 512"),
        (IntRange(1, 512), 1, 0, "1 to 512"),
        (IntRange(None, 16), 16, 17, "at most 16"),
        (IntRange(3, None), 3, 2, "at least 3"),
        (MultipleOf(16), 48, 40, "a multiple of 16"),
        (AllOf(("avx2", "fma")), ("fma", "avx2", "sse"), ("avx2",), "avx2 and fma"),
    ],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_allowed(allowed: Any, inside: Any, outside: Any, text: str) -> None:
    assert inside in allowed and outside not in allowed and str(allowed) == text


# rule: (a kernel whose limit holds, one whose limit does not, what is given, what it says is allowed, what to change)
REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], Any, str, str | None]] = {
    "vendor": ({"vendors": ("cpu",)}, {"vendors": ("nvidia", "amd")}, "cpu", "nvidia or amd", None),
    "family": ({"families": ("x86-64",)}, {"families": ("gfx9",)}, "x86-64", "gfx9", None),
    "arch": ({"arches": ("x86-64",)}, {"arches": ("sm90", "sm100")}, "x86-64", "sm90 or sm100", None),
    "cpu_features": ({"cpu_features": ("avx2",)}, {"cpu_features": ("avx2", "avx512f")}, ("avx2",), "avx2 and avx512f", None),
    "installed": (
        {"needs": ("torch",)},
        {"needs": ("torch", "nowhere_else")},
        ("torch",),
        "torch and nowhere_else",
        "install torch and nowhere_else",
    ),
    "built": (
        {"library": "kernels/native/kernels.cpp"},
        {"library": "kernels/native/nowhere.so"},
        False,
        "yes",
        "install a C++17 compiler (g++ or clang++), then reinstall Quire, which builds the native kernels",
    ),
    "q_dtype": ({"q_dtypes": ("bf16",)}, {"q_dtypes": ("fp16",)}, "bf16", "fp16", "pass q as fp16"),
    "types": (
        {"pairs": ("bf16 over bf16",)},
        {"pairs": ("fp16 over fp16",)},
        "bf16 over bf16",
        "fp16 over fp16",
        "use fp16 over fp16 (queries over cache)",
    ),
    "format": ({"formats": ("bf16",)}, {"formats": ("e5m2", "int8")}, "bf16", "e5m2 or int8", "store the cache as e5m2 or int8"),
    "scales": ({"scales": ("none",)}, {"scales": ("tensor",)}, "none", "tensor", "set scales to tensor"),
    "layout": ({"layouts": ("nhd",)}, {"layouts": ("hnd",)}, "nhd", "hnd", "set layout to hnd"),
    "memory": (
        {"memory": ("aligned",)},
        {"memory": ("generic",)},
        "aligned",
        "generic",
        "pass contiguous tensors that start at multiples of 16 bytes",
    ),
    "page_size": ({"page_size": MultipleOf(16)}, {"page_size": OneOf((32, 64))}, 16, "32 or 64", "set page_size to 32 or 64"),
    "head_dim": ({"head_dim": IntRange(1, 128)}, {"head_dim": IntRange(1, 127)}, 128, "1 to 127", "use a head_dim of 1 to 127"),
    "v_head_dim": ({"v_head_dim": OneOf((128,))}, {"v_head_dim": OneOf((64,))}, 128, "64", "use a v_head_dim of 64"),
    "latent_dim": ({"latent_dim": IntRange(1, 128)}, {"latent_dim": IntRange(1, 99)}, 128, "1 to 99", "use a head_dim of 1 to 99"),
    "latent_memory": (
        {"latent_memory": 100 * 1024},
        {"latent_memory": 256 * 1024},
        227 * 1024,
        f"at least {256 * 1024}",
        "store the cache in 16 bits, with queries of the same type",
    ),
    "group": ({"group": IntRange(1, 4)}, {"group": IntRange(5, 16)}, 4, "5 to 16", "use a group (q_heads / kv_heads) of 5 to 16"),
    "max_q_len": ({"max_q_len": 20}, {"max_q_len": 1}, 20, "at most 1", "pass at most 1 new tokens of a sequence in one call"),
    "long_rows": (
        {"long_rows": 1280},
        {"long_rows": 1000},
        1280,
        "at most 1000",
        "pass at most 16 new tokens of a sequence, or at most 1000 query rows, in one call",
    ),
    "max_kv_len": ({"max_kv_len": 4096}, {"max_kv_len": 2048}, 4096, "at most 2048", "keep at most 2048 tokens in a sequence"),
    "saved_keys": (
        {"shares": 100},
        {"shares": 200},
        100,
        "at least 200",
        "pass a batch with prefixes that save at least 200 reads of keys",
    ),
    "lse": ({"without": ("lse",)}, {"without": ("lse",)}, True, "no", "do not use lse"),
    "capturing": ({"capturable": False}, {"capturable": False}, True, "no", "launch it outside of a CUDA graph"),
}


OF_RULE = {
    "latent_dim": (PROBLEM.replace(v_in_k=True), CPU),
    "latent_memory": (
        Problem(q_heads=16, kv_heads=1, head_dim=576, v_head_dim=288, v_in_k=True, page_size=16, q_dtype="fp32"),
        Platform.named("sm90"),
    ),
}
"""The problem and the platform of rules that others do not apply to."""


@pytest.mark.parametrize("rule", REFUSALS)
def test_every_limit_can_refuse(rule: str) -> None:
    holds, refuses, given, allowed, change = REFUSALS[rule]
    problem, platform = OF_RULE.get(rule, (PROBLEM, CPU))
    (finding,) = check_limits(kernel(**holds).limits, LimitQuery(problem, EXTENT, platform))
    assert finding.rule == rule and finding.holds
    request = LimitQuery(problem.replace(lse=rule == "lse"), EXTENT, platform, capturing=rule == "capturing")
    assert check_limits(kernel(**refuses).limits, request) == (LimitResult(rule, given, allowed, False, change),)


def test_the_size_of_a_head_is_limited_by_whether_v_is_a_part_of_k() -> None:
    for v_in_k, limit, other in ((False, "head_dim", "latent_dim"), (True, "latent_dim", "head_dim")):
        request = LimitQuery(PROBLEM.replace(v_in_k=v_in_k), EXTENT, CPU)
        (refusal,) = check_limits(kernel(**{limit: IntRange(1, 64)}).limits, request)
        (other_limit,) = check_limits(kernel(**{other: IntRange(1, 64)}).limits, request)
        assert (refusal.holds, refusal.given) == (False, 128) and (other_limit.holds, other_limit.given) == (True, None)


@pytest.mark.parametrize("head_dim, v_in_k, types, arch, runs", [
    (576, 288, ("fp32", "fp32"), "sm89", False),
    (576, 288, ("bf16", "fp16"), "sm89", False),
    (576, 288, ("fp32", "fp32"), "sm80", True),
    (576, 288, ("bf16", "bf16"), "sm89", True),
    (576, 512, ("fp32", "fp32"), "sm89", True),
    (576, 544, ("fp32", "fp32"), "gfx942", True),
])  # fmt: skip
def test_wide_latents_in_fp32_need_memory(head_dim: int, v_in_k: int, types: tuple[str, str], arch: str, runs: bool) -> None:
    sizes = {"head_dim": head_dim, "v_head_dim": v_in_k, "v_in_k": True, "page_size": 16}
    problem = Problem(q_heads=16, kv_heads=1, **sizes, q_dtype=types[0], format=types[1])
    chosen = choose(problem, EXTENT, Platform.named(arch)).chosen
    assert (chosen is not None and chosen.name.startswith("triton")) == runs


def test_those_are_all_the_limits_there_are() -> None:
    everything: dict[str, Any] = {}
    for _, refuses, *_ in REFUSALS.values():
        everything |= refuses
    assert [limit.rule for limit in kernel(**everything).limits] == list(REFUSALS)
    fields = set(Kernel.__dataclass_fields__) - {"name", "operation", "summary", "launcher"}
    assert set(everything) == fields


@pytest.mark.parametrize(
    "feature", ["softcap", "alibi", "sinks", "mask", "lse", "batch_invariant", "window", "non-causal", "context-form"]
)
def test_a_kernel_may_lack_any_feature(feature: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        "window": {"window": (3, 0)},
        "non-causal": {"causal": "no"},
        "context-form": {"form": "context"},
    }
    problem = PROBLEM.replace(**changes.get(feature, {feature: True}))
    limits = kernel(without=(feature,)).limits
    assert [finding.holds for finding in check_limits(limits, LimitQuery(PROBLEM, EXTENT, CPU))] == [True]
    assert [str(finding) for finding in check_limits(limits, LimitQuery(problem, EXTENT, CPU)) if not finding.holds] == [
        f"{feature}: given yes, allowed no"
    ]


def test_no_limit_hides_a_later_one() -> None:
    limits = [Limit("first", lambda call: call, OneOf((1,))), Limit("second", lambda call: call, IntRange(5, None))]
    assert [finding.rule for finding in check_limits(limits, 3) if not finding.holds] == ["first", "second"]


def test_words() -> None:
    assert [as_text(value) for value in (True, False, (), ("a", 1), None, 16)] == ["yes", "no", "none", "a, 1", "None", "16"]


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda k: f"{k.operation}-{k.name}")
def test_every_launcher_of_the_catalogue_loads(entry: Kernel) -> None:
    if all(
        finding.holds for finding in check_limits(entry.limits, LimitQuery(PROBLEM, EXTENT, CPU)) if finding.rule == "installed"
    ):
        assert callable(entry.launcher_for(PROBLEM, Platform.named("sm90")))


@pytest.mark.parametrize("operation", ["attend", "write"])
def test_names_are_unique_and_the_last_kernel_is_the_one_that_is_always_there(operation: str) -> None:
    names = [entry.name for entry in CATALOGUE if entry.operation == operation]
    assert len(set(names)) == len(names) and names[-1] == "torch"


def test_a_launcher_that_is_not_there_is_named() -> None:
    with pytest.raises(
        KernelError, match="kernel 'special' cannot attend: nowhere:launch does not load: No module named 'nowhere'"
    ):
        kernel().launcher_for(PROBLEM, CPU)


def test_dispatch_loads_no_kernel() -> None:
    """Dispatch imports no kernel, and the native library is loaded at the first call only."""
    code = "import quire.dispatch.choose, quire.compat.vllm_rule, sys; print([m for m in sys.modules if m.startswith(%r)]);"
    code = code % (("triton", "quire.kernels."),) + "from quire.kernels.native.library import library;"
    code += "print(library.cache_info().currsize, 'libquire' in open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n0 False\n"
