"""Launches cache writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quire.cache.format import FORMATS
from quire.kernels.triton.device.rope import RopeConstants, Rotation
from quire.kernels.triton.device.write import NewTokens, PageTensors, WriteConstants, rope_kernel, write_kernel
from quire.kernels.triton.host.constants import cache_constants, parts_of
from quire.kernels.triton.host.launcher import NO_SHARD, At, Launch, Launcher, platform_of
from quire.kernels.triton.host.program import Program
from quire.kernels.triton.host.tuning import WRITE, WorkPerProgram
from quire.platform import Platform
from quire.problem import Extent, Problem, power_of_two

WRITE_ELEMENTS = 16 * 1024
"""Elements of heads that one program stores at a time: with more of them, threads spill."""
ROPE_ELEMENTS = 2048
"""Elements of heads that one program rotates at a time: a thread has about five fp32 numbers for each of its own."""


class WriteLauncher(Launcher):
    """Launches writes, and rotations with them."""

    def __init__(self, problem: Problem, platform: Platform, work: WorkPerProgram = WRITE):
        super().__init__(problem, platform)
        first, rest = parts_of(problem)
        k_width, rope = power_of_two(first), problem.rope
        self.rows = max(1, min(work.size, (WRITE_ELEMENTS if rope is None else ROPE_ELEMENTS) // k_width))
        of_cache = cache_constants(problem)
        if problem.v_in_k:
            # The two parts of keys are written to the pages of K.
            of_cache |= {"V_DIM": rest or 0} | {f"V_{name}": of_cache[f"K_{name}"] for name in ("STEPS", "SLOTS", "DIMS")}
        constants = WriteConstants(
            ROWS=self.rows,
            **of_cache,
            K_WIDTH=k_width,
            V_WIDTH=power_of_two(max(1, of_cache["V_DIM"])),
            K_LARGEST=largest_of(problem.format),
            V_LARGEST=largest_of(problem.v_format),
            HARDWARE=platform.encodes_fp8,
            PER_TOKEN=problem.scales == "token",
            V_AT=0 if rest is None else first // FORMATS[problem.format].pack,
            SHARED_SCALES=rest is not None and problem.scales == "token",
        )
        if rope is None:
            self.program = Program(write_kernel, (PageTensors, NewTokens), (constants,), self.units, work.warps)
            return
        turns = RopeConstants(
            HALF=rope.rotary_dim // 2,
            INTERLEAVED=rope.interleaved,
            SECTIONS=rope.sections or None,
            SPREAD=rope.spread,
            UNIT_OFFSET=rope.unit_offset,
            VECTORS=rope.vectors,
            Q_HEADS=problem.q_heads,
        )
        constants = constants._replace(ROPE=turns)
        self.program = Program(rope_kernel, (PageTensors, NewTokens, Rotation), (constants,), self.units, work.warps)

    def launches(self, call: Any, extent: Extent, at: At) -> Iterator[Launch]:
        if not extent.tokens or not extent.seqs:
            return
        k, v, cache, batch, slots = call.k, call.v, call.cache, call.batch, call.given_slots
        words, step = 0, 0
        if slots is None:
            slots = torch.empty(0, dtype=torch.int32, device=k.device)
        else:
            words = slots.element_size() // 4
            step = slots.stride(0) * words
            slots = as_words(slots)
        scales = (None if scale is None else at(scale) for scale in (cache.k_scale, cache.v_scale))
        table, kv_lens, q_starts = batch.page_table, batch.kv_lens, batch.q_starts
        tokens = (
            at(k), *k.stride(), at(v), *v.stride(), at(slots), step, words,
            at(table), *table.stride(), table.shape[1], at(kv_lens), *kv_lens.stride(), at(q_starts), *q_starts.stride(),
            extent.seqs, extent.tokens, extent.seqs.bit_length(), *(batch.shard or NO_SHARD),
        )  # fmt: skip
        pages, programs = (at(cache.k), at(cache.v), *scales, cache.pages), -(-extent.tokens * self.problem.kv_heads // self.rows)
        if self.problem.rope is None:
            yield self.program, (programs, 1, 1), (pages, tokens), False
            return
        q_programs = 0 if call.q_in is None else -(-extent.tokens * self.problem.q_heads // self.rows)
        yield self.program, (programs + q_programs, 1, 1), (pages, tokens, rotation_of(call, at, programs)), False


def largest_of(format: str) -> float | None:
    """The largest magnitude of elements that are divided by scales of the cache; None without such scales."""
    return FORMATS[format].largest if FORMATS[format].scaled else None


def rotation_of(call: Any, at: At, k_programs: int) -> tuple[Any, ...]:
    """The arguments of a rotation, `Rotation`, as a plain tuple."""
    rope, positions, q, out = call.rope, call.rope_positions, call.q_in, call.q_out
    words, axis, step = 0, 0, 0
    if positions is None:
        positions = torch.empty(0, dtype=torch.int32, device=rope.cos.device)
    else:
        words = positions.element_size() // 4
        axis, step = (words * stride for stride in (0, *positions.stride())[-2:])
        positions = as_words(positions)
    norms = (None if weight is None else at(weight) for weight in (None if q is None else rope.q_norm, rope.k_norm))
    queries = (None,) * 8 if q is None else (at(q), *q.stride(), at(out), *out.stride())
    in_place = q is not None and out.data_ptr() == q.data_ptr()
    return (
        *(at(rope.cos), at(rope.sin), rope.cos.stride(0), rope.cos.shape[0], at(positions), axis, step, words),
        *(*norms, float(rope.eps), *queries, int(call.zero_padding), int(in_place), k_programs),
    )


def as_words(numbers: torch.Tensor) -> torch.Tensor:
    """Slots or positions as 32-bit words, over the same memory."""
    if numbers.dtype is torch.int32 or not numbers.numel():
        return numbers.to(torch.int32)
    words = torch.empty(0, dtype=torch.int32, device=numbers.device)
    first, steps = 2 * numbers.storage_offset(), (2 * step for step in numbers.stride())
    return words.set_(numbers.untyped_storage(), first, (*numbers.shape, 2), (*steps, 1))


def launcher(problem: Problem, platform: Platform) -> WriteLauncher:
    """Stores k and v at the slots given, by default where the batch's table and lengths say."""
    return WriteLauncher(problem, platform_of(problem, platform))
