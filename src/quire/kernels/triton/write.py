"""Cache writes. One program takes a few (token, head) rows: finds their slots, quantises, stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.kernels.triton.bind import Bound
from quire.kernels.triton.formats import encode
from quire.kernels.triton.launch import Launch, as_bytes, page_steps, scale_steps
from quire.kernels.triton.target import Target, target_of
from quire.kernels.triton.tuning import WRITE, Portion
from quire.problem import power_of_two


class Tokens(NamedTuple):
    """New keys and values `[tokens, kv_heads, dim]`, and where they go: `slots`, or what the batch says."""

    k: Any
    k_token: Any
    k_head: Any
    v: Any
    v_token: Any
    v_head: Any
    slots: Any
    slots_step: Any
    page_table: Any
    table_row: Any
    table_width: Any
    kv_lens: Any
    kv_lens_step: Any
    q_starts: Any
    q_starts_step: Any
    seqs: Any
    tokens: Any


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
    K_DIM: int
    V_STEP: int
    PAGE_SIZE: int
    TABLE_STEP: int
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
    SEARCH: int
    """Halvings that find a token's sequence among all of them."""


@triton.jit
def write_kernel(pages, tokens, S: tl.constexpr):
    index = tl.program_id(0) * S.ROWS + tl.arange(0, S.ROWS)
    token = index // S.KV_HEADS
    head = index % S.KV_HEADS
    page, slot, live = slot_of(pages, tokens, token, S)

    dim = tl.arange(0, S.K_WIDTH)
    mask = live[:, None] & (dim < S.HEAD_DIM)[None, :]
    at = token.to(tl.int64)[:, None] * tokens.k_token + head[:, None] * tokens.k_head + dim[None, :] * S.K_DIM
    k = tl.load(tokens.k + at, mask=mask, other=0.0)
    if S.LARGEST is not None:
        scale = pages.k_scale + page * S.K_SCALE_STEPS[0] + slot * S.K_SCALE_STEPS[1] + head * S.K_SCALE_STEPS[2]
        k = quantised(k, scale, live, S)
    place = page * S.K_STEPS[0] + head * S.K_STEPS[1] + (slot // S.K_SLOTS) * S.K_STEPS[2] + (slot % S.K_SLOTS) * S.K_STEPS[3]
    at = place[:, None] + ((dim // S.K_DIMS) * S.K_STEPS[4] + (dim % S.K_DIMS) * S.K_STEPS[5])[None, :]
    tl.store(pages.k + at, k.to(pages.k.dtype.element_ty), mask=mask)

    dim = tl.arange(0, S.V_WIDTH)
    mask = live[:, None] & (dim < S.V_DIM)[None, :]
    at = token.to(tl.int64)[:, None] * tokens.v_token + head[:, None] * tokens.v_head + dim[None, :] * S.V_STEP
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
    if tokens.slots is not None:
        found = tl.load(tokens.slots + token.to(tl.int64) * tokens.slots_step, mask=live, other=-1).to(tl.int64)
        live &= found >= 0
        page = found // S.PAGE_SIZE
        slot = found % S.PAGE_SIZE
    else:
        # The sequence whose tokens end behind this one: `low` sequences end before it or at it.
        low = token * 0
        high = token * 0 + tokens.seqs
        for _ in range(S.SEARCH):
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
        page = tl.load(tokens.page_table + row.to(tl.int64) * tokens.table_row + column * S.TABLE_STEP, mask=live, other=-1).to(
            tl.int64
        )
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


class Plan:
    """What writes of a kind have in common."""

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        slots: torch.Tensor | None,
        *,
        target: Target | None = None,
        portion: Portion = WRITE,
    ):
        self.portion = portion
        self.constants = Store(
            ROWS=portion.size,
            KV_HEADS=cache.kv_heads,
            HEAD_DIM=cache.head_dim,
            V_DIM=cache.v_head_dim,
            K_WIDTH=power_of_two(cache.head_dim),
            V_WIDTH=power_of_two(cache.v_head_dim),
            K_DIM=k.stride(2),
            V_STEP=v.stride(2),
            PAGE_SIZE=cache.page_size,
            TABLE_STEP=batch.page_table.stride(1),
            K_STEPS=page_steps(cache.k_view),
            K_SLOTS=cache.k_view.shape[3],
            K_DIMS=cache.k_view.shape[5],
            V_STEPS=page_steps(cache.v_view),
            V_SLOTS=cache.v_view.shape[3],
            V_DIMS=cache.v_view.shape[5],
            FORMAT=cache.format.name,
            HARDWARE=(target or target_of(k.device)).hardware_encodes,
            LARGEST=cache.format.largest,
            K_SCALE_STEPS=scale_steps(cache.k_scale),
            V_SCALE_STEPS=scale_steps(cache.v_scale),
            PER_TOKEN=cache.scale_kind == "token",
            SEARCH=batch.seqs.bit_length(),
        )
        self.grid = (-(-k.shape[0] * cache.kv_heads // portion.size), 1, 1)
        self.empty = not k.shape[0] or not batch.seqs

    def settles(self, *call: Any) -> bool:
        return self.empty

    def tensors(
        self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, slots: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """The tensors of one write in the order of `arguments`."""
        slots = batch.given_slots if slots is None else slots
        found = [cache.k, cache.v]
        if cache.k_scale is not None and cache.v_scale is not None:
            found += (cache.k_scale, cache.v_scale)
        found += (k, v) if slots is None else (k, v, slots)
        return [*found, batch.page_table, batch.kv_lens, batch.q_starts]

    def arguments(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        slots: torch.Tensor | None,
        *,
        at: Callable[[torch.Tensor], Any],
    ) -> tuple[Any, ...]:
        """The arguments of one write; `at` says what stands for a tensor."""
        take = map(at, self.tensors(k, v, cache, batch, slots)).__next__
        slots = batch.given_slots if slots is None else slots
        table, kv_lens, q_starts = batch.page_table, batch.kv_lens, batch.q_starts
        k_pages, v_pages = take(), take()
        k_scale, v_scale = (None, None) if cache.k_scale is None else (take(), take())
        pages = Pages(k_pages, v_pages, k_scale, v_scale, cache.pages)
        tokens = Tokens(
            k=take(),
            k_token=k.stride(0),
            k_head=k.stride(1),
            v=take(),
            v_token=v.stride(0),
            v_head=v.stride(1),
            slots=None if slots is None else take(),
            slots_step=None if slots is None else slots.stride(0),
            page_table=take(),
            table_row=table.stride(0),
            table_width=table.shape[1],
            kv_lens=take(),
            kv_lens_step=kv_lens.stride(0),
            q_starts=take(),
            q_starts_step=q_starts.stride(0),
            seqs=batch.seqs,
            tokens=k.shape[0],
        )
        return pages, tokens

    def launches(self, arguments: tuple[Any, ...]) -> list[Launch]:
        return [Launch(write_kernel, arguments, (self.constants,), self.grid, self.portion.warps, 1)]


def launches(
    k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, slots: torch.Tensor | None, **how: Any
) -> list[Launch]:
    """The launch of a write, or none if there is nothing to store. No tensor is read."""
    plan = Plan(k, v, cache, batch, slots, **how)
    return [] if plan.empty else plan.launches(plan.arguments(k, v, cache, batch, slots, at=as_bytes))


def bind(k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, slots: torch.Tensor | None) -> Callable[..., None]:
    """A launcher for writes like this one."""
    return Bound(Plan(k, v, cache, batch, slots))


def launch(k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, slots: torch.Tensor | None, **how: Any) -> None:
    """Stores k and v at `slots`, by default the batch's, or where its table and lengths say."""
    for one in launches(k, v, cache, batch, slots, **how):
        one()
