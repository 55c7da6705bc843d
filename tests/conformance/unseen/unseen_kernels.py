"""Faulty kernels, each a few lines away from the correct one: what real kernels get wrong.

For each, `names` are the catalogue's faults that are true of it, and `words` are what a contrast must contain to describe it: the
condition under which the fault shows. An entry without words shows under no special condition.

    quire conform tests/conformance/unseen/unseen_kernels.py:page_by_shift
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from attention import SPLIT, TILE, Attention, State, correct

__all__ = ["KERNELS", "Faulty", "correct"]


@dataclass
class Faulty:
    """A kernel and what is true of it."""

    kernel: Attention
    names: tuple[str, ...]
    words: tuple[str, ...]


KERNELS: dict[str, Faulty] = {}


def unseen(names: str = "", words: str = "") -> Callable[[type[Attention]], type[Attention]]:
    """Registers a kernel: true names, separated by spaces; words of a contrast that describes it, separated by bars."""

    def register(kind: type[Attention]) -> type[Attention]:
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in kind.__name__).lstrip("_")
        KERNELS[name] = Faulty(kind(), tuple(names.split()), tuple(word for word in words.split("|") if word))
        globals()[name] = KERNELS[name].kernel
        return kind

    return register


# Pages and addresses.


@unseen(words="page size that is no power of two")
class PageByShift(Attention):
    """The page is found by a shift, whatever the page size."""

    def page_of(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bits = self.size.bit_length() - 1
        return self.table()[(keys >> bits).clamp(max=self.a.page_table.shape[1] - 1)].long(), keys & ((1 << bits) - 1)


@unseen(names="offset-wrapped-at-2^31", words="element offsets")
class OffsetsInInt32(Attention):
    """Element offsets are computed in int32 and wrap."""

    def numbers(self, part: str, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        stride = getattr(self.a, f"{part}_pages").stride(0)
        wrapped = (page * stride).to(torch.int32).long().clamp(min=0) // max(stride, 1)
        return super().numbers(part, wrapped, slot)


@unseen(names="table-strides-ignored", words="views of wider tensors")
class TableOfItsWidth(Attention):
    """Rows of the page table are taken to be as far apart as the table is wide."""

    def table(self) -> torch.Tensor:
        table = self.a.page_table
        dense = table.as_strided((table.shape[0], table.shape[1]), (table.shape[1], 1))
        return dense[self.seq].clamp(0, self.a.k_pages.shape[0] - 1)


@unseen(words="end within a page")
class StaleLastValue(Attention):
    """The value of the newest token is not yet in the last page, unless that page is full."""

    def cached(self, part: str, keys: torch.Tensor) -> torch.Tensor:
        if part == "v" and self.n % self.size and self.a.new_v is None:
            keys = torch.where(keys == self.n - 1, (keys - 1).clamp(min=0), keys)
        return super().cached(part, keys)


@unseen(words="sequences share|window")
class SharedPrefixTooLong(Attention):
    """Sequences with a common first page are taken to share one page more than they do."""

    def table(self) -> torch.Tensor:
        row, first = self.a.page_table[self.seq].clone(), self.a.page_table[0]
        if self.seq and int(row[0]) == int(first[0]):
            common = int((row == first).long().cumprod(0).sum())
            row[: common + 1] = first[: common + 1]
        return row


@unseen(words="number of sequences")
class SequenceInInt8(Attention):
    """The number of the sequence is kept in eight bits."""

    def table(self) -> torch.Tensor:
        return self.a.page_table[self.seq & 127]


# Formats and scales.


@unseen(names="head-scales-in-wrong-order", words="scales per head")
class KeyScaleByQueryHead(Attention):
    """The scale of a kv head is taken by the number of the query head."""

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scale = self.a.k_scale
        if scale is not None and scale.dim() == 1:
            heads = torch.arange(self.q_heads)
            k = k * (scale[heads % self.kv_heads] / scale[heads // self.group])[:, None, None]
        return super().scores(q, k)


@unseen(words="scales per token")
class TokenScaleOfNextSlot(Attention):
    """A token's value scale is that of the slot behind it."""

    def factor(self, part: str, page: torch.Tensor, slot: torch.Tensor) -> Any:
        scale = self.a.v_scale
        if part == "v" and scale is not None and scale.dim() == 3:
            slot = torch.where(slot + 1 < self.size, slot + 1, slot - 1).clamp(min=0)
        return super().factor(part, page, slot)


@unseen(words="format int8")
class SignLost(Attention):
    """int8 is read as unsigned."""

    def numbers(self, part: str, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        numbers = super().numbers(part, page, slot)
        return numbers % 256 if self.a.format == "int8" else numbers


@unseen(words="format e5m2")
class SubnormalsFlushed(Attention):
    """The conversion of e5m2 flushes small numbers to zero."""

    def numbers(self, part: str, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        numbers = super().numbers(part, page, slot)
        return torch.where(numbers.abs() < 0.5, 0.0, numbers) if self.a.format == "e5m2" else numbers


# Heads and dims.


@unseen(names="kv-head-wrong", words="odd group")
class OddGroup(Attention):
    """Heads of a group are taken in pairs; the last of an odd group goes with the next kv head."""

    def kv_head(self) -> torch.Tensor:
        heads = super().kv_head()
        if self.group % 2 and self.group > 1:
            heads[self.group - 1 :: self.group] += 1
        return heads % self.kv_heads


@unseen(words="from group")
class WideGroup(Attention):
    """A tile has room for eight heads of a group; the others take the query of the eighth."""

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        within = torch.arange(self.q_heads) % self.group
        return super().scores(q[torch.arange(self.q_heads) - (within - 7).clamp(min=0)], k)


@unseen(names="dims-cut", words="head_dim that is no power of two|from head_dim")
class DimsInThirtyTwos(Attention):
    """Products run over whole blocks of 32 dims."""

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        dims = max(q.shape[2] // 32 * 32, 32)
        return super().scores(q[..., :dims], k[..., :dims])


@unseen(names="dims-moved", words="values of another head_dim")
class ValuesAsWideAsKeys(Attention):
    """Where values are narrower than keys, their last dims are stored one further on."""

    def store(self, value: torch.Tensor, lse: torch.Tensor) -> None:
        super().store(value.roll(1, -1) if value.shape[2] != self.a.q.shape[2] else value, lse)


# Visibility.


@unseen(names="window-left-off", words="context form")
class WindowOfContextForm(Attention):
    """The window is one key too wide where new tokens are passed beside the cache."""

    def left_of_window(self, q_at: torch.Tensor, k_at: torch.Tensor, left: int) -> torch.Tensor:
        return k_at >= q_at - left - int(self.a.new_k is not None)


@unseen(names="causal-off-by-one", words="more new tokens than a page|from q_len")
class CausalOfLongPrefill(Attention):
    """Queries of a prefill longer than a page see one key ahead."""

    def causal(self, q_at: torch.Tensor, k_at: torch.Tensor) -> torch.Tensor:
        return k_at <= q_at + int(self.q_len > self.size)


@unseen(words="from q_len")
class CausalOfSecondQueryTile(Attention):
    """From the second tile of 64 queries on, the causal limit is that of the tile's first query."""

    def causal(self, q_at: torch.Tensor, k_at: torch.Tensor) -> torch.Tensor:
        number = q_at - self.context
        return k_at <= torch.where(number >= 64, self.context + number // 64 * 64, q_at)


@unseen(words="tree mask")
class MaskBitsReversed(Attention):
    """Bits of the tree mask are read from the wrong end of each byte."""

    def tree(self) -> torch.Tensor:
        tree = super().tree()
        order = torch.arange(tree.shape[1]).view(-1, 1)
        flipped = (order // 8 * 8 + 7 - order % 8).flatten().clamp(max=tree.shape[1] - 1)
        return tree[:, flipped]


@unseen(words="with a window")
class WindowSkipsByLastQuery(Attention):
    """Tiles left of the window of the last query are skipped for all queries of a prefill."""

    def tile(self, state: State, keys: torch.Tensor) -> State:
        left = self.a.window[0]
        if left is not None and int(keys[-1]) < self.n - 1 - left:
            return state
        return super().tile(state, keys)


@unseen(words="causal=mixed")
class CausalOfFirstSequence(Attention):
    """The first sequence's causality is that of all."""

    def is_causal(self) -> bool:
        causal = self.a.causal
        return bool(causal[0]) if isinstance(causal, torch.Tensor) else causal


@unseen(words="context is a multiple of the page size|fill their last page")
class NewTokenOpensPage(Attention):
    """A decoded token that is the first of its page is not seen."""

    def visible(self, q_at: torch.Tensor, k_at: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        seen = super().visible(q_at, k_at, keys)
        if self.q_len == 1 and self.context and self.context % self.size == 0:
            seen &= keys != self.n - 1
        return seen


@unseen(words="context form")
class FirstNewTokenSkipped(Attention):
    """In context form the first new token is skipped where the context ends with a page."""

    def visible(self, q_at: torch.Tensor, k_at: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        seen = super().visible(q_at, k_at, keys)
        if self.a.new_k is not None and self.context and self.context % self.size == 0 and self.q_len > 1:
            seen &= keys != self.context
        return seen


@unseen(names="window-right-ignored", words="causal=no|right side of the window")
class RightSideForgotten(Attention):
    """A window has only a left side."""

    def visible(self, q_at: torch.Tensor, k_at: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        kept, self.a.window = self.a.window, (self.a.window[0], None)
        seen = super().visible(q_at, k_at, keys)
        self.a.window = kept
        return seen


# Options.


@unseen(names="softcap-after-mask", words="softcap")
class CapAfterMask(Attention):
    """Hidden scores are capped too, and become -cap."""

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def hide(self, logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return super().cap(super().hide(logits, seen))


@unseen(names="softcap-missing", words="softcap")
class CapOfSecondSplit(Attention):
    """The cap is only applied in the first split."""

    def tile(self, state: State, keys: torch.Tensor) -> State:
        kept, self.a.softcap = self.a.softcap, self.a.softcap if int(keys[0]) < SPLIT else None
        state = super().tile(state, keys)
        self.a.softcap = kept
        return state


@unseen(words="softcap")
class CapInFp16(Attention):
    """tanh is computed in bf16."""

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.a.softcap
        return logits if cap is None else cap * torch.tanh((logits / cap).bfloat16()).float()


@unseen(words="ALiBi")
class AlibiInFirstTile(Attention):
    """ALiBi is added in the first tile of keys only."""

    def bias(self, q_at: torch.Tensor, k_at: torch.Tensor) -> Any:
        return super().bias(q_at, k_at) if int(k_at.flatten()[0]) < TILE else 0.0


@unseen(words="ALiBi")
class AlibiOfRowNumbers(Attention):
    """Under a tree ALiBi takes the key's depth and the query's row."""

    def bias(self, q_at: torch.Tensor, k_at: torch.Tensor) -> Any:
        return super().bias(torch.arange(self.context, self.n)[:, None], k_at)


@unseen(names="sink-of-another-head", words="sinks")
class OneSink(Attention):
    """All heads have the first head's sink."""

    def sink_logits(self) -> torch.Tensor:
        return super().sink_logits()[:1].expand(self.q_heads, 1, 1)


@unseen(names="sink-missing", words="sinks")
class SinkOfDecodeOnly(Attention):
    """Only the kernel for single queries knows sinks."""

    def sink(self, state: State) -> State:
        return super().sink(state) if self.q_len == 1 else state


@unseen(names="sink-in-every-split", words="sinks")
class SinkPerSplit(Attention):
    """Each split adds the sink."""

    def merge(self, parts: list[State]) -> State:
        return super().merge([super(SinkPerSplit, self).sink(part) for part in parts])

    def sink(self, state: State) -> State:
        return state if self.n else super().sink(state)


# Online softmax and splits.


@unseen(names="accumulator-not-rescaled", words="kv_len|in sequences")
class AccumulatorNotRescaled(Attention):
    """The sum follows a new maximum, the accumulator does not."""

    def update(self, state: State, logits: torch.Tensor, v: torch.Tensor) -> State:
        new, total, _ = super().update(state, logits, v)
        safe = torch.where(new == -math.inf, 0.0, new)
        return new, total, state[2] + torch.exp(logits - safe) @ v


@unseen(names="sum-not-rescaled accumulator-not-rescaled", words="kv_len|in sequences")
class SumNotRescaled(Attention):
    """The accumulator follows a new maximum, the sum does not."""

    def update(self, state: State, logits: torch.Tensor, v: torch.Tensor) -> State:
        new, _, acc = super().update(state, logits, v)
        safe = torch.where(new == -math.inf, 0.0, new)
        return new, state[1] + torch.exp(logits - safe).sum(-1, keepdim=True), acc


@unseen(words="with a window|causal|in sequences|q_len|kv_len|tree mask")
class HiddenTileIsNan(Attention):
    """A tile of which a query sees nothing, before any that it sees, gives exp(-inf + inf)."""

    def update(self, state: State, logits: torch.Tensor, v: torch.Tensor) -> State:
        m, total, acc = state
        new = torch.maximum(m, logits.amax(-1, keepdim=True))
        p, alpha = torch.exp(logits - new), torch.exp(m - new)
        return new, total * alpha + p.sum(-1, keepdim=True), acc * alpha + p @ v


@unseen(names="split-merged-in-another-base", words="from kv_len")
class MergedInBaseTwo(Attention):
    """Splits are weighed with exp2 of natural maxima."""

    def merge(self, parts: list[State]) -> State:
        m = torch.stack([part[0] for part in parts]).amax(0)
        safe = torch.where(m == -math.inf, 0.0, m)
        weights = [torch.exp2(part[0] - safe) for part in parts]
        total = sum((w * part[1] for w, part in zip(weights, parts)), torch.zeros(()))
        return m, total, sum((w * part[2] for w, part in zip(weights, parts)), torch.zeros(()))


@unseen(names="split-dropped", words="from kv_len|from a context of")
class FourSplits(Attention):
    """The merge has room for four splits."""

    def merge(self, parts: list[State]) -> State:
        return super().merge(parts[:4])


@unseen(names="split-dropped", words="from kv_len|from a context of")
class ShortSplitDropped(Attention):
    """A last split of less than a tile is dropped."""

    def merge(self, parts: list[State]) -> State:
        return super().merge(parts[:-1] if len(parts) > 1 and self.n % SPLIT < TILE and self.n % SPLIT else parts)


@unseen(names="accumulated-in-16-bits", words="kv_len|from a context of")
class PartialResultsInFp16(Attention):
    """Partial results are stored in bf16 before they are merged."""

    def merge(self, parts: list[State]) -> State:
        if len(parts) == 1:
            return super().merge(parts)
        return super().merge([(m, total, acc.bfloat16().float()) for m, total, acc in parts])


@unseen(words="extreme data|data")
class MaximumClamped(Attention):
    """Logits are clamped to 80 against overflow."""

    def hide(self, logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return super().hide(logits.clamp(-80, 80), seen)


# LSE and the output.


@unseen(names="lse-in-base-2", words="LSE")
class LseHalfInBaseTwo(Attention):
    """The maximum is natural, the logarithm of the sum is in base 2."""

    def log_sum(self, m: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return torch.where(total > 0, m + total.log2(), -math.inf)


@unseen(words="LSE")
class LseOfNothingIsZero(Attention):
    """A row that sees no key has an LSE of 0."""

    def log_sum(self, m: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return torch.where(total > 0, super().log_sum(m, total), 0.0)


@unseen(names="lse-without-sink", words="LSE|sinks")
class LseBeforeSink(Attention):
    """The LSE is taken before the sink is added."""

    def sink(self, state: State) -> State:
        self.before = super().log_sum(*state[:2])
        return super().sink(state)

    def log_sum(self, m: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return self.before


@unseen(words="without queries")
class EmptySequenceShifts(Attention):
    """Sequences without queries are left out of the list, and the page table is indexed by the place in it."""

    def table(self) -> torch.Tensor:
        empty = (self.a.q_starts.diff()[: self.seq] == 0).sum()
        return self.a.page_table[self.seq - int(empty)].clamp(0, self.a.k_pages.shape[0] - 1)


@unseen(names="writes-padding-rows", words="padding")
class PaddingZeroed(Attention):
    """Padding rows are set to zero."""

    def finish(self) -> None:
        self.a.out[int(self.a.q_starts[-1]) :] = 0


@unseen(words="several new tokens|several tokens|from q_len|more new tokens")
class LastRowOfPrefill(Attention):
    """The last row of a prefill of an odd number of tokens is not stored."""

    def store(self, value: torch.Tensor, lse: torch.Tensor) -> None:
        self.q_len -= self.q_len > 1 and self.q_len % 2
        super().store(value[:, : self.q_len], lse[:, : self.q_len])


@unseen(names="two-runs-differ")
class OrderOfArrival(Attention):
    """Splits are merged in the order in which they happen to finish, in bf16."""

    calls = 0

    def merge(self, parts: list[State]) -> State:
        OrderOfArrival.calls += 1
        m, total, acc = super().merge(parts)
        return m, total, acc * (1 + 2**-6 * (OrderOfArrival.calls % 2))


# Two faults at once.


@unseen(names="last-token-missing softcap-missing")
class LastKeyAndNoCap(Attention):
    """The newest key is not seen, and the cap is not applied."""

    def visible(self, q_at: torch.Tensor, k_at: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return super().visible(q_at, k_at, keys) & (keys != self.n - 1)

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return logits
