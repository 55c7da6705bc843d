"""Calls that every version of Triton must compile, and what must be true of the compiled kernels."""

from __future__ import annotations

from typing import Any

from quire.kernels.triton.compiler.compiled import Compiled
from quire.kernels.triton.compiler.sample import KernelSample
from quire.platform import Platform

ARCHES = ("sm90", "gfx942", "sm80", "sm89", "sm100", "gfx1100", "gfx1201")

FP16: dict[str, Any] = {"format": "fp16", "q_dtype": "fp16", "out_dtype": "fp16"}
LATENT: dict[str, Any] = {"head_dim": 576, "q_heads": 128, "kv_heads": 1, "page_size": 64}
OF_K = {"v_in_k": True, "v_head_dim": 512}
ROPE = {"rope": [128, False, [], False, "bf16", "bf16"]}
ROPE_SECTIONS = {"rope": [64, True, [16, 8, 8], True, "none", "fp32", True, False, False]}
TREE = {"mask": True, "positions": "int32", "window": [50, 2], "alibi": True}
SHARD = {"shard": True, "window": [100, 0], "alibi": True}
TRITON = {
    f"{kernel}-{format}": KernelSample(kernel, format=format) for kernel in ("decode", "mixed") for format in ("bf16", "e4m3fn")
}
TRITON |= {f"write-{format}": KernelSample("write", format=format) for format in ("bf16", "e4m3fn", "int8")}
TRITON |= {
    "decode-fp16": KernelSample("decode", **FP16),
    "decode-int4": KernelSample("decode", format="int4", scales="token"),
    "mixed-int8-int4": KernelSample("mixed", 64, "int8", scales="token", problem={"v_format": "int4"}, small=True),
    "decode-nvfp4": KernelSample("decode", format="nvfp4"),
    "mixed-nvfp4-swizzled": KernelSample("mixed", 64, "nvfp4", problem={"v_format": "nvfp4_swizzled"}, small=True),
    "write-nvfp4": KernelSample("write", format="nvfp4"),
    "write-int4": KernelSample("write", format="int4", scales="token"),
    "decode-lse-window": KernelSample("decode", 64, lse=True, problem={"window": [100, 0]}, small=True),
    "mixed-new-softcap": KernelSample("mixed", 64, new=True, lse=True, problem={"softcap": True}, small=True),
    "mixed-tree": KernelSample("mixed", 64, "int8", scales="head", problem=TREE, small=True),
    "mixed-shard": KernelSample("mixed", 64, new=True, lse=True, problem=SHARD, small=True),
    "shared-new": KernelSample("shared", 64, new=True, lse=True, small=True),
    "mixed-latent": KernelSample("mixed", **LATENT, problem=OF_K),
    "write-latent": KernelSample("write", **LATENT | {"format": "int8"}, scales="token", problem=OF_K),
    "mixed-spans": KernelSample("mixed", 64, problem={"spans": "int64", "alibi": True}, small=True),
    "decode-select": KernelSample("decode", 64, problem={"select": "positions"}, small=True),
    "mixed-select": KernelSample("mixed", 64, problem={"select": "columns"}, small=True),
    "write-rope": KernelSample("write", format="e4m3fn", problem=ROPE),
    "write-rope-sections": KernelSample("write", problem=ROPE_SECTIONS),
    "audit": KernelSample("audit"),
    "shared": KernelSample("shared"),
    "mixed-invariant": KernelSample("mixed", problem={"batch_invariant": True}),
    "decode-latent": KernelSample("decode", 576, kv_heads=1, page_size=64, problem={"v_in_k": True, "v_head_dim": 512}),
    "mixed-nvfp4-new": KernelSample("mixed", 64, "nvfp4", new=True, small=True),
}
GLUON = {
    "gluon-bf16": KernelSample("gluon"),
    "gluon-fp16": KernelSample("gluon", **FP16),
    "gluon-e4m3fn": KernelSample("gluon", format="e4m3fn"),
    "gluon-int8-head": KernelSample("gluon", 80, "int8", scales="head", problem={"sinks": True}),
    "gluon-new": KernelSample("gluon", new=True, index="int64"),
    "gluon-spans": KernelSample("gluon", 256, problem={"spans": "int32"}),
    "gluon-shard-e4m3fn": KernelSample("gluon", format="e4m3fn", problem={"shard": True, "spans": "int64"}),
    "gluon-window-softcap-lse": KernelSample("gluon", lse=True, problem={"window": [100, 0], "softcap": True}),
}
"""For sm90 alone."""
BRIEF = {
    "gluon-small-new": KernelSample("gluon", 64, new=True, lse=True, small=True, problem={"spans": "int32", "shard": True}),
    "gluon-small-e4m3fn": KernelSample("gluon", 64, "e4m3fn", small=True),
    "shared-small": KernelSample("shared", 64, small=True),
    "write-small-nvfp4": KernelSample("write", 64, "nvfp4", small=True),
    "write-small-rope": KernelSample("write", small=True, problem=ROPE_SECTIONS),
    "audit-small": KernelSample("audit", small=True),
    "write-small": KernelSample("write", format="e4m3fn", small=True),
    "mixed-small-nvfp4-new": KernelSample("mixed", 64, "nvfp4", new=True, small=True),
}
"""For the normal suite: small tiles, and every name of Gluon and every kernel all the same."""


def samples_for(arch: str) -> dict[str, KernelSample]:
    return TRITON | GLUON if arch == "sm90" else TRITON


def faults(arch: str, sample: KernelSample, found: list[Compiled] | str) -> list[str]:
    """What is wrong with a compiled call; nothing, if all is well."""
    if isinstance(found, str):
        return [found]
    most = Platform.named(arch).program_memory
    wrong = [f"{kernel} needs too much shared memory" for kernel in found if kernel.shared_memory > most]
    for kernel in found:
        wanted = set()
        if kernel.kernel == "prefill_kernel":
            wanted = {"wgmma.mma_async", "cp.async.cg.shared.global", "cp.async.bulk.tensor"}
        wrong += [f"{kernel.kernel} lacks {name}" for name in sorted(wanted - set(kernel.instructions))]
        if kernel.kernel == "attend_kernel" and not kernel.matrix:
            wrong.append("the products of attend_kernel are not matrix instructions")
    return wrong
