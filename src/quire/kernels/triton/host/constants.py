"""The constants of the attention kernels. They follow from the problem, the platform and an entry of the tuning table."""

from __future__ import annotations

from typing import Any

from quire.cache.format import FORMATS
from quire.kernels.triton.device.arguments import AttendConstants, TritonTile
from quire.kernels.triton.host.tuning import Tuning
from quire.platform import Platform
from quire.problem import Problem, power_of_two

FAR = 2**30
"""Larger than any distance of keys: windows are limited to it, so that they fit into 32 bits."""
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
WGMMA_WIDTH = 64
"""Elements of 16 bits that Hopper's matrix unit takes from one row of shared memory, in its widest arrangement."""
LEAST_UNITS = 16
"""Units of a tile's row: a product takes no fewer elements."""


def dot_type(problem: Problem) -> tuple[str, bool]:
    """The type of the products, and whether queries are balanced for it.

    Every format that is stored in bytes, except for latents, fits into fp16 and into bf16, and hardware converts to fp16 faster.
    Two different 16-bit types are multiplied in fp32."""
    floats = problem.float_types
    in_bytes = all(FORMATS[name].itemsize == 1 for name in problem.formats)
    latent = any(FORMATS[name].latent for name in problem.formats)
    if floats == {"bf16"} and in_bytes and not latent and problem.form == "full" and problem.scales != "token":
        return "fp16", True
    if problem.in_fp32:
        return "fp32", False
    return next(iter(floats), "fp16"), False


def has_one_kernel(problem: Problem) -> bool:
    """Whether one compiled kernel serves all batches: those with spans or a selection, since a layer may have other batches too,
    with kernels of their own. Batch-invariant calls have few kernels in any case."""
    return (problem.spans != "none" or problem.select != "none") and not problem.batch_invariant


def parts_of(problem: Problem) -> tuple[int, int | None]:
    """The elements of a key that are loaded as one tile, and those of a second one: if V is a part of K, V and the others, None if
    there are no others."""
    return (problem.v_head_dim, problem.head_dim - problem.v_head_dim or None) if problem.v_in_k else (problem.head_dim, None)


def width_of(dim: int) -> int:
    """The width of a tile for so many elements."""
    return max(16, power_of_two(dim))


def widths_of(problem: Problem, platform: Platform) -> tuple[int, int]:
    """The widths of tiles of keys and values: head_dim and v_head_dim rounded up to powers of two, at least 16.

    Hopper's matrix unit reads keys and values from shared memory in one of three arrangements, by the width of a row. Of the
    random calls that an H200 computed wrong with Triton 3.6, all that used this unit had rows of values narrower than the
    arrangement of their keys (widths 32/16, 64/16 and 128/16), and no call that was right is known to have had such widths. The
    cause is not known: the PTX computes the right result. Values are as wide as that arrangement until it is."""
    k_width, v_width = (width_of(dim) for dim in (parts_of(problem)[0], problem.v_head_dim))
    if platform.arch == "sm90" and dot_type(problem)[0] != "fp32":
        v_width = max(v_width, min(k_width, WGMMA_WIDTH))
    return k_width, v_width


def cache_constants(problem: Problem, words: bool = False, few_rows: bool = False) -> dict[str, Any]:
    """The constants of kernels that follow from the cache alone. With `words`, elements of 4 bits are read in units of 2 or 4 bytes
    where strides allow it: eight elements are converted by fewer instructions than four times two. Without `few_rows`, for kernels
    with tiles of many rows too, only formats with scales of groups: such tiles put elements in order, and int4 spills more."""
    constants: dict[str, Any] = {
        "KV_HEADS": problem.kv_heads,
        "HEAD_DIM": parts_of(problem)[0],
        "V_DIM": problem.v_head_dim,
        "PAGE_SIZE": problem.page_size,
        "K_SCALE_STEPS": problem.k_scale_strides or None,
        "V_SCALE_STEPS": problem.v_scale_strides or None,
    }
    for part, name in zip("kv", problem.formats):
        (steps, slots, dims), format = getattr(problem, f"{part}_pages"), FORMATS[name]
        groups, size = problem.group_places(f"{part}_pages"), 1
        if words and format.pack > 1 and (few_rows or groups is not None) and not problem.v_in_k and steps[-1] == 1:
            dim = problem.head_dim if part == "k" else problem.v_head_dim
            size = next((size for size in (4, 2) if _has_units(size, (*steps[:-1], dims, dim // format.pack), dim)), 1)
        pages = {"STEPS": (*(step // size for step in steps[:-1]), steps[-1]), "SLOTS": slots, "DIMS": dims // size}
        pages |= {"GROUPS": groups, "FORMAT": format.codec, "PACK": format.pack * size}
        constants |= {f"{part.upper()}_{field}": value for field, value in pages.items()}
    return constants


def _has_units(size: int, places: tuple[int, ...], dim: int) -> bool:
    """Whether elements of 4 bits are read in units of so many bytes: if all strides and lengths allow it, and if enough are in a
    row for the products."""
    return width_of(dim) >= 2 * size * LEAST_UNITS and not any(place % size for place in places)


def place_of_balance(problem: Problem, merged: bool, long: TritonTile | None) -> str:
    """Where queries are divided by a power of two, in calls that need it: `AttendConstants.BALANCE`."""
    whole_keys = parts_of(problem)[1] is None
    return "here" if merged or problem.memory == "generic" or (long is None and whole_keys) else "before"


def constants_of(problem: Problem, platform: Platform, row: Tuning, short: TritonTile, long: TritonTile | None) -> AttendConstants:
    """What a kernel with these tiles is compiled for. In generic memory work is counted in 64 bits: batches with too much work for
    32 bits are launched as generic ones. Triton's kernels of spans and selections count all work in 64 bits: they have no other
    variant."""
    (dot, balance), generic = dot_type(problem), problem.memory == "generic"
    merged = has_one_kernel(problem) and row.kernel != "gluon"
    (k_width, v_width), (_, rest) = widths_of(problem, platform), parts_of(problem)
    left, right = problem.window
    q_format, out_format = (name if FORMATS[name].itemsize == 1 else "float" for name in (problem.q_dtype, problem.out_dtype))
    return AttendConstants(
        **cache_constants(problem, words=not generic, few_rows=long is None),
        GROUP=problem.group,
        K_WIDTH=k_width,
        V_WIDTH=v_width,
        V_IN_K=problem.v_in_k,
        REST_DIM=rest,
        REST_WIDTH=None if rest is None else width_of(rest),
        FAR=problem.far,
        BYTES=any(FORMATS[name].itemsize == 1 for name in problem.formats),
        HARDWARE=platform.decodes_fp8,
        PER_KEY=problem.scales == "token" or (problem.scales != "none" and problem.form == "context"),
        DOT=dot,
        BALANCE=place_of_balance(problem, merged, long) if balance else None,
        NEGATE=problem.negative_scale,
        CAUSAL={"yes": True, "no": False}.get(problem.causal),
        NEW=problem.form == "context",
        TREE=problem.mask,
        SPANS=problem.spans != "none",
        SELECT=None if problem.select == "none" else problem.select,
        LEFT=None if left is None else min(left, FAR),
        RIGHT=None if right is None else min(right, FAR),
        CONTEXT_FROM=problem.context_from,
        MIN_Q_LEN=problem.only[0],
        MAX_Q_LEN=problem.only[1],
        SHORT=short.TOKENS,
        # A piece of a batch-invariant call is work enough for a program, and starting a unit costs less than one.
        MIN_WORK=1 if problem.batch_invariant else row.least,
        UNIT_OVERHEAD=0 if problem.batch_invariant else row.unit_overhead,
        TAIL=row.many is not None and long is None and not problem.batch_invariant,
        INVARIANT=problem.batch_invariant,
        Q_FORMAT=q_format,
        OUT=out_format,
        OUT_NUMBER=problem.out_scale != "tensor",
        SCAN=row.scan,
        WIDE=generic or merged,
        UNIFORM=platform.vendor == "nvidia" and not generic,
        NVIDIA=platform.vendor == "nvidia",
        PDL=platform.launches_dependents,
    )
