"""Cache writes. One program takes a few (token, head) rows: finds their slots, quantises, stores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.cache.format import FORMATS
from quire.kernels.triton.formats import encode
from quire.kernels.triton.launcher import At, Launch, Launcher, platform_of
from quire.kernels.triton.program import Program
from quire.kernels.triton.tuning import WRITE, Portion
from quire.platform import Platform
from quire.problem import Extent, Problem, power_of_two


class Tokens(NamedTuple):
    """New keys and values `[tokens, kv_heads, dim]`, and where they go: `slots`, or what the batch says."""

    k: Any
    k_token: Any
    k_head: Any
    k_dim: Any
    v: Any
    v_token: Any
    v_head: Any
    v_dim: Any
    slots: Any
    slots_step: Any
    slot_words: Any
    """32-bit words of a slot, 1 or 2; 0 if no slots are given: what stands there is then not read."""
    page_table: Any
    table_row: Any
    table_step: Any
    table_width: Any
    kv_lens: Any
    kv_lens_step: Any
    q_starts: Any
    q_starts_step: Any
    seqs: Any
    tokens: Any
    search: Any
    """Halvings that find a token's sequence among all of them."""


class Pages(NamedTuple):
    """Where they go to."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    pages: Any


class Store(NamedTuple):
    """What the kernel is compiled for."""

    ROWS: int
    KV_HEADS: int
    HEAD_DIM: int
    V_DIM: int
    K_WIDTH: int
    V_WIDTH: int
    PAGE_SIZE: int
    K_STEPS: tuple[int, ...]
    K_SLOTS: int
    K_DIMS: int
    V_STEPS: tuple[int, ...]
    V_SLOTS: int
    V_DIMS: int
    FORMAT: str
    HARDWARE: bool
    LARGEST: float | None
    K_SCALE_STEPS: tuple[int, ...] | None
    V_SCALE_STEPS: tuple[int, ...] | None
    PER_TOKEN: bool
    """Whether scales are computed here, one a token and head."""


@triton.jit
def write_kernel(pages, tokens, S: tl.constexpr):
    index = tl.program_id(0) * S.ROWS + tl.arange(0, S.ROWS)
    token = index // S.KV_HEADS
    head = index % S.KV_HEADS
    page, slot, live = slot_of(pages, tokens, token, S)

    dim = tl.arange(0, S.K_WIDTH)
    mask = live[:, None] & (dim < S.HEAD_DIM)[None, :]
    at = token.to(tl.int64)[:, None] * tokens.k_token + head[:, None] * tokens.k_head + dim[None, :] * tokens.k_dim
    k = tl.load(tokens.k + at, mask=mask, other=0.0)
    if S.LARGEST is not None:
        scale = pages.k_scale + page * S.K_SCALE_STEPS[0] + slot * S.K_SCALE_STEPS[1] + head * S.K_SCALE_STEPS[2]
        k = quantised(k, scale, live, S)
    place = page * S.K_STEPS[0] + head * S.K_STEPS[1] + (slot // S.K_SLOTS) * S.K_STEPS[2] + (slot % S.K_SLOTS) * S.K_STEPS[3]
    at = place[:, None] + ((dim // S.K_DIMS) * S.K_STEPS[4] + (dim % S.K_DIMS) * S.K_STEPS[5])[None, :]
    tl.store(pages.k + at, k.to(pages.k.dtype.element_ty), mask=mask)

    dim = tl.arange(0, S.V_WIDTH)
    mask = live[:, None] & (dim < S.V_DIM)[None, :]
    at = token.to(tl.int64)[:, None] * tokens.v_token + head[:, None] * tokens.v_head + dim[None, :] * tokens.v_dim
    v = tl.load(tokens.v + at, mask=mask, other=0.0)
    if S.LARGEST is not None:
        scale = pages.v_scale + page * S.V_SCALE_STEPS[0] + slot * S.V_SCALE_STEPS[1] + head * S.V_SCALE_STEPS[2]
        v = quantised(v, scale, live, S)
    place = page * S.V_STEPS[0] + head * S.V_STEPS[1] + (slot // S.V_SLOTS) * S.V_STEPS[2] + (slot % S.V_SLOTS) * S.V_STEPS[3]
    at = place[:, None] + ((dim // S.V_DIMS) * S.V_STEPS[4] + (dim % S.V_DIMS) * S.V_STEPS[5])[None, :]
    tl.store(pages.v + at, v.to(pages.v.dtype.element_ty), mask=mask)


@triton.jit
def slot_of(pages, tokens, token, S: tl.constexpr):
    """The page and the slot in it of each token, and whether it is written: not padding, not skipped, its page existing."""
    end = tl.load(tokens.q_starts + tokens.seqs * tokens.q_starts_step)
    live = (token < tokens.tokens) & (token < end)
    page = tl.zeros(token.shape, tl.int64) - 1
    slot = tl.zeros(token.shape, tl.int64)
    if tokens.slot_words != 0:
        # Slots of either type are read word by word, so that both take the same kernel.
        at = token.to(tl.int64) * tokens.slots_step
        found = tl.load(tokens.slots + at, mask=live, other=-1).to(tl.int64)
        upper = tl.load(tokens.slots + at + 1, mask=live & (tokens.slot_words == 2), other=0).to(tl.int64)
        found = tl.where(tokens.slot_words == 2, (upper << 32) | (found & 0xFFFFFFFF), found)
        live &= found >= 0
        page = found // S.PAGE_SIZE
        slot = found % S.PAGE_SIZE
    else:
        # The sequence whose tokens end behind this one: `low` sequences end before it or at it.
        low = token * 0
        high = token * 0 + tokens.seqs
        for _ in range(tokens.search):
            middle = (low + high) // 2
            stop = tl.load(tokens.q_starts + (middle + 1) * tokens.q_starts_step, mask=live & (low < high), other=0)
            passed = (stop <= token) & (low < high)
            low = tl.where(passed, middle + 1, low)
            high = tl.where(passed, high, tl.minimum(middle, high))
        row = tl.minimum(low, tokens.seqs - 1)
        stop = tl.load(tokens.q_starts + (row + 1) * tokens.q_starts_step, mask=live, other=0).to(tl.int64)
        position = token - stop + tl.load(tokens.kv_lens + row * tokens.kv_lens_step, mask=live, other=0).to(tl.int64)
        live &= (position >= 0) & (position // S.PAGE_SIZE < tokens.table_width)
        column = position // S.PAGE_SIZE
        slot = position % S.PAGE_SIZE
        at = row.to(tl.int64) * tokens.table_row + column * tokens.table_step
        page = tl.load(tokens.page_table + at, mask=live, other=-1).to(tl.int64)
    live &= (page >= 0) & (page < pages.pages)
    return tl.where(live, page, 0), tl.where(live, slot, 0), live


@triton.jit
def quantised(x, scale, live, S: tl.constexpr):
    """Rows in the cache's format, divided by their scales, which are read or, one a token and head, made here."""
    x = x.to(tl.float32)
    if S.PER_TOKEN:
        largest = tl.max(tl.abs(x), 1)
        # A maximum passes a NaN by; its row must not.
        largest = tl.where(tl.max((x != x).to(tl.int32), 1) > 0, float("nan"), largest)
        factor = tl.div_rn(largest, tl.full(largest.shape, S.LARGEST, tl.float32))
        factor = tl.where(factor == 0.0, 1.0, factor)
        tl.store(scale, factor, mask=live)
    else:
        factor = tl.load(scale, mask=live, other=1.0)
    return encode(tl.div_rn(x, tl.broadcast_to(factor[:, None], x.shape)), tl.constexpr(S.FORMAT), S.HARDWARE)


class WriteLauncher(Launcher):
    """Launches writes."""

    def __init__(self, problem: Problem, platform: Platform, portion: Portion = WRITE):
        super().__init__(problem, platform)
        self.portion = portion
        k, v = problem.k_pages, problem.v_pages
        assert k is not None and v is not None
        constants = Store(
            ROWS=portion.size,
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
            FORMAT=problem.format,
            HARDWARE=platform.encodes_fp8,
            LARGEST=FORMATS[problem.format].largest,
            K_SCALE_STEPS=problem.k_scale_strides or None,
            V_SCALE_STEPS=problem.v_scale_strides or None,
            PER_TOKEN=problem.scales == "token",
        )
        self.program = Program(write_kernel, (Pages, Tokens), (constants,), self.units, portion.warps)

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
        scales = (None, None) if cache.k_scale is None else (at(cache.k_scale), at(cache.v_scale))
        table, kv_lens, q_starts = batch.page_table, batch.kv_lens, batch.q_starts
        tokens = (
            at(k), *k.stride(), at(v), *v.stride(), at(slots), step, words,
            at(table), *table.stride(), table.shape[1], at(kv_lens), *kv_lens.stride(), at(q_starts), *q_starts.stride(),
            extent.seqs, extent.tokens, extent.seqs.bit_length(),
        )  # fmt: skip
        grid = (-(-extent.tokens * self.problem.kv_heads // self.portion.size), 1, 1)
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
