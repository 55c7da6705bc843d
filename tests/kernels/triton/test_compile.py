"""The kernels compiled ahead of time for GPUs that are not present, and limits read from what the compiler made.

By default a choice that reaches every kernel, every row of the table and every GPU; `--full-compile` compiles all of it. This is
done in subprocesses: a compiler that aborts fails the tests of one sample.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from quire.kernels.triton.compiler import compiled
from quire.kernels.triton.compiler.compiled import ARCHES, Compiled, compile_in_subprocess
from quire.kernels.triton.compiler.sample import KernelSample
from quire.kernels.triton.device.arguments import Kind
from quire.kernels.triton.host.program import as_bytes
from quire.kernels.triton.host.recipe import Recipe, kind_of, kinds_of
from quire.kernels.triton.host.specimen import specimen
from quire.kernels.triton.host.tuning import TABLE
from quire.platform import Platform
from support.branches import CANNOT
from support.once import once
from support.versions import installed

KERNELS = ("decode", "mixed")
FORMATS = ("bf16", "e4m3fn", "e4m3fnuz", "e5m2", "int8")
WIDTHS = (64, 128, 256, 512)
FP32: dict[str, Any] = {"format": "fp32", "q_dtype": "fp32", "out_dtype": "fp32"}

PLAIN = {
    f"{kernel}-{width}-{format}": KernelSample(kernel, width, format)
    for kernel in KERNELS
    for width in WIDTHS
    for format in FORMATS
}
PLAIN |= {f"mixed-{width}-bf16-new": KernelSample("mixed", width, new=True) for width in (64, 128)}
PLAIN |= {f"{kernel}-{width}-fp32": KernelSample(kernel, width, **FP32) for kernel in KERNELS for width in (128, 512)}
PLAIN |= {"decode-128-int4": KernelSample("decode", format="int4", scales="token")}
PLAIN |= {"decode-128-nvfp4": KernelSample("decode", format="nvfp4")}
# Tiles as large as they get: many query heads of one key head, or one shape for all batches.
MANY_HEADS: dict[str, Any] = {"q_heads": 64, "kv_heads": 1}
PLAIN |= {f"decode-128-{format}-wide": KernelSample("decode", format=format, **MANY_HEADS) for format in ("bf16", "e4m3fn")}
PLAIN |= {f"{kernel}-512-fp32-wide": KernelSample(kernel, 512, **FP32, **MANY_HEADS) for kernel in KERNELS}
INVARIANT: dict[str, Any] = {"problem": {"batch_invariant": True}}
PLAIN |= {"decode-512-fp32-invariant": KernelSample("decode", 512, **FP32, **INVARIANT)}
PLAIN |= {f"mixed-128-{format}-invariant": KernelSample("mixed", format=format, **INVARIANT) for format in ("bf16", "e4m3fn")}
PLAIN |= {"mixed-256-bf16-invariant": KernelSample("mixed", 256, **INVARIANT)}
PLAIN |= {f"write-{format}": KernelSample("write", format=format) for format in FORMATS}
PLAIN |= {
    "write-token-scales": KernelSample("write", format="int8", scales="token", index="int64"),
    "write-int4": KernelSample("write", format="int4", scales="token"),
    "write-int4-zero-points": KernelSample("write", format="int4_zp", scales="token"),
    "write-nvfp4": KernelSample("write", format="nvfp4"),
    "write-generic": KernelSample("write", format="e4m3fn", problem={"memory": "generic"}),
    "write-rope": KernelSample("write", format="e4m3fn", problem={"rope": [128, False, [], False, "bf16", "bf16"]}),
    "write-rope-sections": KernelSample(
        "write", problem={"rope": [64, True, [16, 8, 8], True, "none", "fp32", True, False, False]}
    ),
    "audit": KernelSample("audit"),
    **{
        f"shared-{width}-{format}": KernelSample("shared", width, format)
        for width in (64, 128, 256)
        for format in ("bf16", "e4m3fn")
    },
    "shared-128-bf16-new": KernelSample("shared", new=True),
}
# V is a part of K: the sizes of DeepSeek's, and all that takes more memory.
LATENT: dict[str, Any] = {"head_dim": 576, "q_heads": 128, "kv_heads": 1, "page_size": 64}
OF_K: dict[str, Any] = {"v_in_k": True, "v_head_dim": 512}
PLAIN |= {
    f"{kernel}-latent-{format}": KernelSample(kernel, format=format, **LATENT, problem=OF_K)
    for kernel in KERNELS
    for format in ("bf16", "e4m3fn")
}
PLAIN |= {
    "decode-latent-16-heads": KernelSample("decode", **LATENT | {"q_heads": 16}, problem=OF_K),
    "mixed-latent-fp32": KernelSample("mixed", **LATENT, **FP32, problem=OF_K),
    "mixed-latent-new": KernelSample("mixed", new=True, **LATENT | {"format": "e4m3fn"}, problem=OF_K),
    "mixed-latent-generic": KernelSample("mixed", **LATENT, problem=OF_K | {"memory": "generic"}),
    "mixed-latent-invariant": KernelSample("mixed", **LATENT, problem=OF_K | {"batch_invariant": True}),
    "mixed-latent-64": KernelSample("mixed", **LATENT, problem={"v_in_k": True, "v_head_dim": 64}),
    "decode-latent-ds-mla": KernelSample("decode", **LATENT | {"format": "fp8_ds_mla"}, problem=OF_K),
    "mixed-latent-ds-mla": KernelSample("mixed", new=True, **LATENT | {"format": "fp8_ds_mla"}, problem=OF_K),
    "write-latent-ds-mla": KernelSample("write", **LATENT | {"format": "fp8_ds_mla"}, problem=OF_K),
    "write-latent": KernelSample("write", **LATENT | {"format": "int8"}, scales="token", problem=OF_K),
    "write-latent-rope": KernelSample(
        "write", **LATENT, format="e4m3fn", scales="token", problem=OF_K | {"rope": [64, True, [], False, "none", "bf16"]}
    ),
    "mixed-latent-all": KernelSample("mixed", **LATENT | {"head_dim": 512}, problem=OF_K),
}
# Parts that are together wider than 576.
WIDE: dict[str, Any] = {"v_in_k": True, "v_head_dim": 544}
PLAIN |= {f"{kernel}-latent-wide": KernelSample(kernel, **LATENT, problem=WIDE) for kernel in KERNELS}
PLAIN |= {
    "write-latent-wide": KernelSample(
        "write", **LATENT | {"format": "int8"}, scales="token", problem={"v_in_k": True, "v_head_dim": 576}
    ),
}
TREE = {"window": [100, 0], "mask": True, "positions": "int64"}
PLAIN |= {"audit-window": KernelSample("audit", new=True, index="int64", problem=TREE)}
MANY = "decode-128-bf16-many"
HOPPER = {
    f"gluon-{width}-{format}": KernelSample("gluon", width, format) for width in (64, 128, 256) for format in ("bf16", "e4m3fn")
}
HOPPER |= {
    "gluon-128-bf16-new": KernelSample("gluon", new=True, index="int64", lse=True),
    "gluon-96-window": KernelSample(
        "gluon", 96, problem={"window": [100, 7], "causal": "per-sequence", "softcap": True, "negative_scale": True}
    ),
    "gluon-80-int8-head": KernelSample(
        "gluon",
        80,
        format="int8",
        scales="head",
        out_dtype="e4m3fn",
        problem={"window": [100, 0], "alibi": True, "sinks": True, "out_scale": "tensor"},
    ),
    "gluon-256-spans-shard": KernelSample("gluon", 256, new=True, problem={"spans": "int32", "shard": True}),
    "gluon-far-pages": KernelSample("gluon", q_heads=160, kv_heads=1, problem={"far": True}),
    MANY: KernelSample("decode", seqs=1000),
}
"""For Hopper alone: no other GPU has these instructions or schedules units dynamically."""
LATER = ("gluon-64-bf16", "gluon-64-e4m3fn", "gluon-small")
"""Those with the tiles of others, and one that `tests/versions` compiles."""
SMALL = {f"{kernel}-small": KernelSample(kernel, small=True) for kernel in (*KERNELS, "shared", "write", "audit")}
SMALL |= {"decode-small-softcap": KernelSample("decode", small=True, problem={"softcap": True})}
HOPPER |= {"gluon-small": KernelSample("gluon", format="e4m3fn", small=True)}

# What only the compiler sees in each feature: types that differ between branches, what it cannot lower. Small tiles will do.
FEATURES: dict[str, dict[str, Any]] = {
    "new-window": {"new": True, "problem": {"window": [100, 0], "context_from": 2}},
    "new-tree": {"new": True, "problem": {"mask": True}},
    "new-token-scales": {"new": True, "format": "int8", "scales": "token"},
    "int4": {"format": "int4", "scales": "token"},
    "int8-int4": {"format": "int8", "scales": "token", "problem": {"v_format": "int4"}},
    "nvfp4": {"format": "nvfp4"},
    "nvfp4-new": {"new": True, "format": "nvfp4", "problem": {"v_format": "nvfp4_swizzled"}},
    "causal-by-row": {"problem": {"causal": "per-sequence", "window": [100, 7]}, "index": "int64"},
    "non-causal": {"problem": {"causal": "no", "window": [None, 7], "only": [2, 100]}, "lse": True},
    "tree-window-alibi": {"problem": {"mask": True, "positions": "int32", "window": [50, 2], "alibi": True}},
    "softcap-sinks": {"problem": {"softcap": True, "alibi": True, "sinks": True, "sinks_dtype": "bf16"}, "format": "e4m3fn"},
    "negative-scale": {"problem": {"negative_scale": True}, "format": "e5m2", "scales": "head"},
    "many-rows": {"seqs": 3000, "format": "e4m3fn", "scales": "token", "q_dtype": "fp16", "out_dtype": "fp16"},
    "generic": {
        "format": "e4m3fn",
        "q_dtype": "e4m3fn",
        "out_dtype": "e4m3fn",
        "problem": {"memory": "generic", "q_scale": "tensor", "out_scale": "tensor"},
    },
    "generic-new": {"new": True, "lse": True, "index": "int64+int32+int32", "problem": {"memory": "generic", "mask": True}},
    "far-pages": {"out_dtype": "e4m3fnuz", "problem": {"out_scale": "number", "far": True}},
    "batch-invariant": {"problem": {"batch_invariant": True}, "head_dim": 80, "page_size": 33},
    "large-group": {"q_heads": 160, "kv_heads": 2, **FP32},
    "spans": {"problem": {"spans": "int64", "alibi": True}},
    "new-spans": {"new": True, "problem": {"spans": "int32", "shard": True}},
    "int4-zero-points": {"format": "int4_zp", "scales": "token"},
}
FEATURED = {
    f"mixed-small-{name}": KernelSample("mixed", **{"head_dim": 64, **given}, small=True) for name, given in FEATURES.items()
}
SAMPLES = PLAIN | SMALL | FEATURED | HOPPER

EVERYWHERE = ["decode-128-bf16", "mixed-128-bf16"]
BYTES = [f"{kernel}-128-e4m3fn" for kernel in (*KERNELS, "shared")] + ["write-e4m3fn"]
EVERY_KERNEL = [*BYTES, "shared-128-bf16", "write-bf16", "audit", "decode-small-softcap", "write-small", "audit-small"]
"""For one GPU of each generation that differs most; the others compile the same source."""
CHOICE = {
    "sm80": [
        *EVERY_KERNEL,
        "mixed-latent-invariant",
        "decode-latent-wide",
        "write-latent-wide",
        "decode-latent-bf16",
        "mixed-latent-bf16",
        "decode-64-int8",
        "write-nvfp4",
        "decode-512-bf16",
        "mixed-512-fp32-wide",
        "write-token-scales",
        "write-generic",
    ],
    "sm89": [
        "decode-128-e4m3fn",
        "write-e4m3fn",
        "decode-latent-bf16",
        "mixed-latent-bf16",
        "mixed-latent-fp32",
        "mixed-latent-generic",
        "decode-128-e5m2",
        "mixed-256-bf16",
        "mixed-512-bf16",
        "decode-512-fp32-invariant",
        "mixed-512-fp32",
    ],
    "sm90": [
        *EVERY_KERNEL,
        "mixed-128-bf16-invariant",
        "decode-latent-bf16",
        "decode-latent-e4m3fn",
        "decode-latent-16-heads",
        "decode-128-int4",
        "decode-128-nvfp4",
        "decode-latent-ds-mla",
        "mixed-latent-ds-mla",
        "write-latent-ds-mla",
        "mixed-latent-bf16",
        "mixed-latent-all",
        "mixed-latent-wide",
        "write-latent",
        "write-latent-rope",
        "write-e5m2",
        "write-rope",
        "shared-128-bf16-new",
        "write-nvfp4",
        "decode-128-bf16-wide",
        "decode-128-e4m3fn-wide",
        "mixed-64-bf16",
        "mixed-256-e4m3fn",
        "write-int4-zero-points",
        *list(FEATURED)[::2],
    ],
    "sm100": ["decode-128-e4m3fn", "write-e4m3fn", "decode-64-bf16", "write-e5m2", "write-int8", "audit-window"],
    "gfx90a": ["decode-128-int8", "decode-256-bf16", "mixed-512-fp32"],
    "gfx942": [
        *EVERY_KERNEL,
        "mixed-128-bf16-invariant",
        "decode-latent-bf16",
        "mixed-latent-ds-mla",
        "write-latent-ds-mla",
        "mixed-latent-bf16",
        "mixed-latent-new",
        "decode-latent-wide",
        "mixed-latent-wide",
        "write-latent-rope",
        "write-rope",
        "write-rope-sections",
        "write-nvfp4",
        "decode-128-e4m3fnuz",
        "decode-512-fp32-wide",
        "mixed-128-bf16-new",
        "mixed-256-bf16",
        "mixed-512-bf16",
        "write-int4-zero-points",
        "mixed-small-int4-zero-points",
        *list(FEATURED)[1::2],
    ],
    "gfx950": ["decode-64-e5m2", "mixed-64-bf16", "write-e4m3fnuz", "write-token-scales", "audit-window"],
    "gfx1100": ["mixed-128-e4m3fn", "decode-latent-bf16", "mixed-latent-bf16", "decode-64-bf16", "decode-128-bf16-wide"],
    "gfx1201": ["decode-128-e5m2"],
}

SUBPROCESSES = (("sm90",), ("gfx942",), ("sm80", "sm89", "sm100"), ("gfx90a", "gfx950", "gfx1100", "gfx1201"))
"""The GPUs that each subprocess compiles for: to start one takes seconds."""


def names_for(arch: str, full: bool) -> list[str]:
    common = [*PLAIN, *SMALL, *FEATURED] if full else list(dict.fromkeys(EVERYWHERE + CHOICE[arch]))
    return [*common, *(name for name in HOPPER if full or name not in LATER)] if arch == "sm90" else common


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of a sample is a test for each GPU that the sample is compiled for."""
    if {"name", "results"} <= set(metafunc.fixturenames):
        full, wanted = metafunc.config.getoption("--full-compile"), metafunc.function.__doc__ or ""
        pairs = [(arch, name) for arch in ARCHES for name in names_for(arch, full) if "128" not in wanted or may_not_spill(name)]
        metafunc.parametrize("arch, name", pairs)


def may_not_spill(name: str) -> bool:
    found = (PLAIN | HOPPER).get(name)
    return found is not None and found.head_dim <= 128 and found.format != "fp32"


@pytest.fixture
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """`results(arch)` is what became of every sample there, by name: kernels, or the compiler's complaint."""

    full = request.config.getoption("--full-compile")

    def work(arches: tuple[str, ...]) -> list[Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TRITON_INTERPRET", raising=False)
            return compile_in_subprocess([(arch, SAMPLES[name]) for arch in arches for name in names_for(arch, full)])

    def get(arch: str) -> dict[str, Any]:
        (arches,) = (together for together in SUBPROCESSES if arch in together)
        found = iter(once(tmp_path_factory, f"compiled-{'-'.join(arches)}", lambda: work(arches)))
        by_arch = {one: {name: next(found) for name in names_for(one, full)} for one in arches}
        return {name: one if isinstance(one, str) else [Compiled(*k) for k in one] for name, one in by_arch[arch].items()}

    return get


def test_it_compiles_and_fits(arch: str, name: str, results: Callable[[str], dict[str, Any]]) -> None:
    kernels = results(arch)[name]
    assert not isinstance(kernels, str), kernels
    for kernel in kernels:
        assert kernel.shared_memory <= Platform.named(arch).program_memory, kernel
        assert kernel.warps == 1 or not SAMPLES[name].small or kernel.kernel == "prefill_kernel"
        if kernel.kernel == "attend_kernel":
            assert kernel.matrix or SAMPLES[name].q_dtype == "fp32", "its products are not matrix instructions"
    writer = "rope_kernel" if "rope" in SAMPLES[name].problem else "write_kernel"
    wanted = {"write": {writer}, "audit": {"audit_kernel"}}.get(SAMPLES[name].kernel, {"attend_kernel"})
    assert wanted <= {kernel.kernel for kernel in kernels}


SPILLS = {
    ("sm90", "mixed-128-bf16"): 256,
    ("sm90", "mixed-128-e4m3fn"): 384,
    ("sm90", "mixed-128-bf16-new"): 1600,
    ("gfx1100", "mixed-128-e4m3fn"): 320,
    ("gfx1100", "mixed-128-e4m3fnuz"): 32,
    ("gfx1100", "mixed-128-int8"): 96,
    ("sm90", "decode-128-e4m3fn-wide"): 1344,
    ("sm80", "decode-128-e4m3fn-wide"): 24,
    ("sm89", "decode-128-e4m3fn-wide"): 8,
    ("sm100", "decode-128-bf16-wide"): 56,
    ("sm100", "decode-128-e4m3fn-wide"): 256,
    ("gfx1100", "decode-128-bf16-wide"): 64,
    ("gfx1100", "decode-128-e4m3fn-wide"): 288,
    ("sm90", "decode-128-e4m3fn"): 8,
    ("sm90", "shared-128-bf16"): 384,
    ("sm90", "shared-128-e4m3fn"): 256,
    ("sm90", "shared-128-bf16-new"): 832,
    ("sm100", "shared-128-bf16"): 56,
    ("gfx1100", "shared-128-e4m3fn"): 576,
    ("gfx1201", "shared-128-e4m3fn"): 16,
    **{("sm90", name): 192 for name in HOPPER if name != MANY},
    ("sm80", "mixed-128-bf16-invariant"): 192,
    ("sm80", "mixed-128-e4m3fn-invariant"): 512,
    ("sm89", "mixed-128-bf16-invariant"): 112,
    ("sm89", "mixed-128-e4m3fn-invariant"): 448,
    ("sm90", "mixed-128-bf16-invariant"): 64,
    ("sm90", "mixed-128-e4m3fn-invariant"): 64,
    ("sm100", "mixed-128-bf16-invariant"): 1152,
    ("sm100", "mixed-128-e4m3fn-invariant"): 960,
    ("gfx1100", "mixed-128-bf16-invariant"): 1280,
    ("gfx1100", "mixed-128-e4m3fn-invariant"): 2176,
    ("gfx1201", "mixed-128-bf16-invariant"): 96,
    ("gfx1201", "mixed-128-e4m3fn-invariant"): 128,
}
"""Bytes that may be spilled although heads are of 128 at most. A tile of 128 x 64 takes every register of Hopper's, and is the
fastest there all the same: rows that spill nothing (32 keys, or 8 warps) are 13 to 30 % slower on an H200, see docs/performance.md.
Of Hopper's own kernel it is mostly the loader that has no registers left, for addresses it needs once a unit. On gfx1100, which
converts bytes by integer arithmetic, up to 264 bytes are left even with the smallest tiles. Wide are tiles of 64 query rows: one or
two warps, the fastest over bytes with 16 rows, have too few registers for those. (Four warps spill nothing there; whether they are
faster has not been measured.) The kernel for shared prefixes has the tiles of the mixed one, and the program for all other keys
beside them. Other tiles have not been measured. Batch-invariant kernels have two accumulators of such a tile, of which the second
is used once a piece; what it costs to spill it has not been measured."""
SPILLS_FROM_3_9 = {
    ("sm90", "decode-128-e4m3fn"): 96,
    ("sm90", "decode-128-bf16-wide"): 16,
    ("sm90", "decode-128-e4m3fn-wide"): 1600,
    ("sm90", "shared-128-bf16-new"): 1056,
    ("gfx1100", "shared-128-bf16"): 416,
    **{("sm90", name): 416 for name in HOPPER if name != MANY},
}
"""The same from Triton 3.9 on, which spills more: 88 bytes of the decode over e4m3fn, 8 and 1568 of the wide ones. Of Hopper's own
kernel it is 272 over bf16, where 3.6 to 3.8 spill 0 to 24, and up to 384 in the context form. Whether this costs time has not been
measured."""


def test_registers_are_enough(arch: str, name: str, results: Callable[[str], dict[str, Any]]) -> None:
    """With heads of 128 at most."""
    kernels = results(arch)[name]
    assert not isinstance(kernels, str), kernels
    known = SPILLS.get((arch, name), 0)
    if tuple(map(int, installed().split(".")[:2])) >= (3, 9):
        known = max(known, SPILLS_FROM_3_9.get((arch, name), 0))
    assert {kernel.kernel: kernel.spilled for kernel in kernels if kernel.spilled > known} == {}


@pytest.mark.parametrize("arch, most", [("sm90", 168), ("gfx942", 128)])
def test_combining_takes_few_registers(arch: str, most: int, results: Callable[[str], dict[str, Any]]) -> None:
    """It is one warp that loads 32 rows at once: if the compiler does not know how far apart these are, each takes an address."""
    (combine,) = (kernel for kernel in results(arch)["decode-128-bf16"] if kernel.kernel == "combine_kernel")
    assert combine.registers <= most and combine.spilled == 0


@pytest.mark.parametrize("instruction", [why.removeprefix("compiled: ") for why in CANNOT.values() if why.startswith("compiled: ")])
def test_what_the_interpreter_cannot_run_is_compiled(instruction: str, results: Callable[[str], dict[str, Any]]) -> None:
    """On GPUs that have it, and nowhere else."""
    name = "decode-small-softcap"
    assert instruction in instructions_of(results("sm90"), name)
    assert (instruction in instructions_of(results("sm80"), name)) == (instruction in ("redux.sync", "rcp.approx"))
    assert instruction not in instructions_of(results("gfx942"), name)


@pytest.mark.parametrize("arch, converts", [("sm80", False), ("sm89", True), ("sm90", True), ("gfx942", False)])
def test_e4m3fn_is_decoded_by_hardware_if_possible(arch: str, converts: bool, results: Callable[[str], dict[str, Any]]) -> None:
    assert ("cvt.rn.f16x2.e4m3x2" in instructions_of(results(arch), "decode-128-e4m3fn")) == converts
    assert "cvt.rn.f16x2.e4m3x2" not in instructions_of(results(arch), "decode-128-bf16")


@pytest.mark.parametrize("arch, format, by", [
    ("sm80", "e4m3fn", []),
    ("sm89", "e4m3fn", []),
    ("sm90", "e4m3fn", ["cvt.rn.satfinite.e4m3x2.f32"]),
    ("sm90", "e5m2", ["cvt.rn.satfinite.e5m2x2.f32"]),
    ("sm100", "e4m3fn", ["cvt.rn.satfinite.e4m3x2.f32"]),
    ("sm100", "e5m2", ["cvt.rn.satfinite.e5m2x2.f32"]),
])  # fmt: skip
def test_fp8_is_encoded_by_hardware_if_possible(
    arch: str, format: str, by: list[str], results: Callable[[str], dict[str, Any]]
) -> None:
    """From fp32 in one step. By way of fp16, as the compiler would have it on sm89, some numbers were rounded twice."""
    assert [name for name in instructions_of(results(arch), f"write-{format}") if name.startswith("cvt.rn.satfinite")] == by


@pytest.mark.parametrize("arch, instruction", [
    ("sm80", "mma.sync"), ("sm90", "wgmma.mma_async"), ("sm100", "tcgen05.mma"), ("gfx90a", "v_mfma"), ("gfx950", "v_mfma"),
    ("gfx1100", "v_wmma"), ("gfx1201", "v_wmma"),
])  # fmt: skip
def test_long_sequences_use_the_best_matrix_instruction(
    arch: str, instruction: str, results: Callable[[str], dict[str, Any]]
) -> None:
    assert any(name.startswith(instruction) for name in instructions_of(results(arch), "mixed-128-bf16"))


def test_hopper_prefill_copies_and_multiplies_asynchronously(results: Callable[[str], dict[str, Any]]) -> None:
    """Copies do not use registers, and products are asynchronous."""
    assert {"cp.async.cg.shared.global", "wgmma.mma_async", "griddepcontrol.wait"} <= instructions_of(
        results("sm90"), "gluon-128-bf16"
    )


@pytest.mark.parametrize(
    "sample",
    ["decode-128-bf16", "decode-128-e4m3fn", "decode-128-int4", "decode-128-nvfp4", "decode-latent-16-heads", MANY],
)
def test_decodes_are_pipelined(sample: str, results: Callable[[str], dict[str, Any]]) -> None:
    """A branch too many before the loop, and the compiler no longer does."""
    assert "cp.async.cg.shared.global" in instructions_of(results("sm90"), sample)


def instructions_of(found: dict[str, Any], name: str) -> set[str]:
    """The notable instructions of all kernels of a sample."""
    assert not isinstance(found[name], str), found[name]
    return {instruction for kernel in found[name] for instruction in kernel.instructions}


def test_the_choice_reaches_every_row_of_the_table() -> None:
    reached = set()
    for arch in ARCHES:
        for name in names_for(arch, False):
            recipes = {recipe.kernel.__name__: recipe for recipe in SAMPLES[name].recipes(arch)}
            if "attend_kernel" in recipes:
                warps = recipes["attend_kernel"].options["num_warps"]
                short, long, _ = constants_of(recipes["attend_kernel"])
                if "prefill_kernel" in recipes:
                    long, _ = constants_of(recipes["prefill_kernel"])
                reached.add((warps, short.KEYS, short.STAGES, *((0, 0) if long is None else (long.ROWS, long.KEYS))))
    rows = [row for row in TABLE if row.arches != ("interpreter",)]
    missed = [row for row in rows if (row.warps, row.keys, row.stages, row.long_rows, row.long_keys) not in reached]
    assert missed == []


def constants_of(recipe: Recipe) -> list[Any]:
    """The constants of a kernel in order."""
    return [value for path, value in recipe.constants.items() if len(path) == 1]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ["decode-128-bf16", "mixed-128-e4m3fn", "mixed-small", "write-token-scales", "audit-window"])
def test_recipes_need_no_device(name: str, arch: str) -> None:
    """Signature and constants of every kernel, made of tensors that have no memory."""
    for recipe in SAMPLES[name].recipes(arch):
        assert list(recipe.signature) == recipe.kernel.arg_names
        constants = [i for i, kind in enumerate(recipe.signature.values()) if kind == "constexpr"]
        assert constants and all((i,) in recipe.constants for i in constants)
        assert recipe.key(Platform.named(arch)).startswith(f"{recipe.kernel.__name__}-")


@pytest.mark.parametrize("name", ["decode-128-e4m3fn", "mixed-128-e4m3fn", "gluon-128-e4m3fn", "write-bf16", "audit"])
def test_every_argument_declares_what_the_compiler_may_assume(name: str) -> None:
    """Each member of a record, and each argument that is no record, has a `Kind`."""
    sample = SAMPLES[name]
    launcher = sample.launcher(Platform.named("sm90"))
    programs = {program for program, *_ in launcher.launches(specimen(launcher.problem, sample.extent), sample.extent, as_bytes)}
    for record in {record for program in programs for record in program.records}:
        kinds = kinds_of(record) if isinstance(record, type) else [kind_of(record)]
        assert all(isinstance(kind, Kind) for kind in kinds), record


WIDTHS_OF_ARGUMENTS = {"i32", "i64", "fp32", "constexpr", "*fp32", "*fp16", "*bf16", "*u8", "*i8", "*i32", "*i64"}


@pytest.mark.parametrize("name", ["decode-128-bf16", "mixed-small-generic-new", "gluon-128-bf16", "write-bf16", "audit-window"])
def test_no_number_becomes_a_constant_in_generic_memory(name: str) -> None:
    """Nor is anything promised about it: only heads' strides and pointers are, in aligned memory."""
    sample = SAMPLES[name]
    aligned = sample.kernel != "audit" and sample.problem.get("memory") != "generic"
    for recipe in sample.recipes("sm90"):
        types = list(flat(tuple(recipe.signature.values())))
        assert set(types) <= WIDTHS_OF_ARGUMENTS
        known = {value for path, value in recipe.constants.items() if len(path) > 1 and value is not None}
        assert known <= ({1} if aligned else set())
        assert aligned or {"tt.divisibility"} >= {words[0] for promised in recipe.attributes.values() for words in promised}


def flat(value: Any) -> Iterator[str]:
    for member in value:
        yield from flat(member) if isinstance(member, tuple) else (member,)


def test_an_error_of_the_compiler_is_the_result() -> None:
    good, bad = KernelSample("decode", 64, small=True), KernelSample("decode", 64, small=True, problem={"only": "nonsense"})
    first, second = compile_in_subprocess([("gfx942", bad), ("gfx942", good)])
    assert isinstance(first, str) and "Error" in first
    assert not isinstance(second, str)


def test_an_abort_is_the_result_of_its_own_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before it and those behind it keep their results."""
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "for arch, sample in json.load(sys.stdin):\n"
        "    if sample['head_dim'] == 13:\n"
        "        print('LLVM ERROR: Cannot select', file=sys.stderr, flush=True)\n"
        "        os.abort()\n"
        "    print('compiled:', json.dumps([['attend_kernel', 4, sample['head_dim'], 0, 0, []]]), flush=True)\n"
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(compiled.sys, "executable", os.fspath(python))
    plain = KernelSample("decode")
    results = compile_in_subprocess([("gfx90a", replace(plain, head_dim=width)) for width in (64, 13, 128, 256)])
    assert [r if isinstance(r, str) else r[0].shared_memory for r in results if not isinstance(r, str)] == [64, 128, 256]
    assert isinstance(results[1], str) and "LLVM ERROR" in results[1] and "-6" in results[1]
