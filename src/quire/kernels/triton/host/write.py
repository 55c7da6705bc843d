"""Launches cache writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quire.cache.format import FORMATS
from quire.kernels.triton.device.write import NewTokens, PageTensors, WriteConstants, write_kernel
from quire.kernels.triton.host.launcher import NO_SHARD, At, Launch, Launcher, platform_of
from quire.kernels.triton.host.program import Program
from quire.kernels.triton.host.tuning import WRITE, WorkPerProgram
from quire.platform import Platform
from quire.problem import Extent, Problem, power_of_two


class WriteLauncher(Launcher):
    """Launches writes."""

    def __init__(self, problem: Problem, platform: Platform, work: WorkPerProgram = WRITE):
        super().__init__(problem, platform)
        self.work = work
        k, v = problem.k_pages, problem.v_pages
        assert k is not None and v is not None
        constants = WriteConstants(
            ROWS=work.size,
            KV_HEADS=problem.kv_heads,
            HEAD_DIM=problem.head_dim,
            V_DIM=problem.v_head_dim,
            K_WIDTH=power_of_two(problem.head_dim),
            V_WIDTH=power_of_two(problem.v_head_dim),
            PAGE_SIZE=problem.page_size,
            K_STEPS=k.strides,
            K_SLOTS=k.slot_part,
            K_DIMS=k.dim_part,
            V_STEPS=v.strides,
            V_SLOTS=v.slot_part,
            V_DIMS=v.dim_part,
            K_FORMAT=problem.format,
            K_PACK=FORMATS[problem.format].pack,
            K_LARGEST=FORMATS[problem.format].largest,
            V_FORMAT=problem.v_format,
            V_PACK=FORMATS[problem.v_format].pack,
            V_LARGEST=FORMATS[problem.v_format].largest,
            HARDWARE=platform.encodes_fp8,
            K_SCALE_STEPS=problem.k_scale_strides or None,
            V_SCALE_STEPS=problem.v_scale_strides or None,
            PER_TOKEN=problem.scales == "token",
        )
        self.program = Program(write_kernel, (PageTensors, NewTokens), (constants,), self.units, work.warps)

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
        grid = (-(-extent.tokens * self.problem.kv_heads // self.work.size), 1, 1)
        yield self.program, grid, ((at(cache.k), at(cache.v), *scales, cache.pages), tokens), False


def as_words(slots: torch.Tensor) -> torch.Tensor:
    """Slots as 32-bit words, over the same memory."""
    if slots.dtype is torch.int32 or not slots.numel():
        return slots.to(torch.int32)
    words = torch.empty(0, dtype=torch.int32, device=slots.device)
    first, step = 2 * slots.storage_offset(), 2 * slots.stride(0)
    return words.set_(slots.untyped_storage(), first, (slots.shape[0], 2), (step, 1))


def launcher(problem: Problem, platform: Platform) -> WriteLauncher:
    """Stores k and v at the slots given, by default where the batch's table and lengths say."""
    return WriteLauncher(problem, platform_of(problem, platform))
