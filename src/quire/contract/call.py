"""One call: the arguments of `attend`, `write` or `step`, and the values of its index tensors, which are read on demand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.cache.shard import keys_of, positions_of
from quire.errors import ArgumentError, describe
from quire.options import PLAIN, TENSORS, Options
from quire.problem import ANY
from quire.rope import Rope


@dataclass
class Call:
    """The arguments of one operation. `q` is None in a write; `k` and `v` are what a write stores, the two parts of the keys if V
    is a part of K; `new` are the new keys and values of an attend in context form."""

    cache: KVCache
    batch: Batch
    q: torch.Tensor | None = None
    options: Options = PLAIN
    new: tuple[torch.Tensor, torch.Tensor] | None = None
    out: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    """The buffer for the LSE, fp32 `[tokens, q_heads]`, if one is given."""
    with_lse: bool = False
    """Whether the LSE is computed."""
    context_from: int = 1
    """Sequences with at least this number of new tokens read them from `new`; the others read them from the cache."""
    only: tuple[int, int] = (0, ANY)
    """The range of new tokens of a sequence; sequences with fewer or more are not computed."""
    positions_known: bool = True
    """False in a write with slots and without a batch."""
    extent: Any = None
    """The size of the batch, an `Extent`; set by the launch path."""
    zero_padding: bool = False
    """Whether rows of `out`, or of `q_out` in a write, that belong to no sequence (padding) are filled with zeros."""
    rope: Rope | None = None
    """How a write rotates `k` and `q_in`."""
    q_in: torch.Tensor | None = None
    """The queries that a write rotates; `q` too in a step, until its write has made `q_out`."""
    q_out: torch.Tensor | None = None
    """Where the rotated queries go; `q_in` itself if they are rotated in place."""
    rope_positions: torch.Tensor | None = None
    """The positions by which a write rotates, `[tokens]` or `[3, tokens]`; None if they follow from the batch."""

    def check_arguments(self) -> None:
        """Raises ArgumentError if an argument has the wrong class, and StaleBatch if the batch is stale."""
        # The rules assume dense tensors, so anything else is rejected before they run.
        for name, wanted in (("cache", KVCache), ("batch", Batch), ("options", Options)):
            if not isinstance(getattr(self, name), wanted):
                raise ArgumentError(name, describe(getattr(self, name)), f"a quire.{wanted.__name__}")
        self.batch.check_tensors()
        self.batch.check_current()
        if self.new is not None and not (isinstance(self.new, (tuple, list)) and len(self.new) == 2):
            raise ArgumentError("new", describe(self.new), "a pair (k, v), or None")
        if (self.k is None) != (self.v is None):
            raise ArgumentError("v" if self.v is None else "k", None, "both k and v, or neither")
        named = {"q": self.q, **self.rows, "out": self.out, "lse": self.lse, "slots": self.slots}
        named |= {} if self.new is None else {"new[0]": self.new[0], "new[1]": self.new[1]}
        named |= {"q": self.rotated_q, "q_out": self.q_out, "positions": self.rope_positions}
        self._check_rope()
        for name, tensor in named.items():
            if tensor is None and not name.startswith("new"):
                continue
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                raise ArgumentError(name, describe(tensor), "a dense (strided) tensor")
            if tensor.is_neg():
                # torch applies the sign when it reads such a view; a kernel would not.
                raise ArgumentError(name, "a tensor with the negative bit set", "a tensor without it: call tensor.resolve_neg()")

    def _check_rope(self) -> None:
        """Raises ArgumentError unless the arguments of a rotation are complete."""
        if self.rope is None:
            for name, given in (("q", self.q_in), ("q_out", self.q_out), ("positions", self.rope_positions)):
                if given is not None:
                    raise ArgumentError(name, describe(given), "None without rope=")
            return
        if not isinstance(self.rope, Rope):
            raise ArgumentError("rope", describe(self.rope), "a quire.Rope, or None")
        if self.q_out is not None and self.q_in is None:
            raise ArgumentError("q_out", describe(self.q_out), "None without q")
        if self.rope_positions is None and not self.positions_known:
            raise ArgumentError("positions", None, "the position of each token, or pass a batch: slots do not tell positions")

    @property
    def rotated_q(self) -> torch.Tensor | None:
        """The queries as they are given."""
        return self.q if self.q_in is None else self.q_in

    @property
    def may_share(self) -> bool:
        """Whether a kernel may read prefixes once: every query sees all keys before the new tokens."""
        batch, options = self.batch, self.options
        narrow = (batch.spans, batch.select, batch.shard, options.mask, options.window)
        return self.q is not None and batch.prefixes is not None and all(x is None for x in narrow)

    @property
    def rows(self) -> dict[str, torch.Tensor | None]:
        """What a write stores, by the name of its argument."""
        if getattr(self.cache, "v_in_k", None) is not None:
            return {"k[0]": self.k, "k[1]": self.v}
        return {"k": self.k, "v": self.v}

    @property
    def writes(self) -> bool:
        return self.k is not None or self.v is not None

    @property
    def given_slots(self) -> torch.Tensor | None:
        return self.batch.given_slots if self.slots is None else self.slots

    @property
    def tokens(self) -> int:
        """The rows of q, or of k in a write."""
        rows = self.q if self.q is not None else self.k
        return 0 if rows is None or rows.dim() < 1 else rows.shape[0]

    @property
    def index_tensors(self) -> dict[str, torch.Tensor]:
        """The integer tensors by the name of their argument."""
        named = {"page_table": self.batch.page_table, "kv_lens": self.batch.kv_lens, "q_starts": self.batch.q_starts}
        if self.writes and self.given_slots is not None:
            named["slots"] = self.given_slots
        if self.q is not None and self.options.positions is not None:
            named["positions"] = self.options.positions
        if self.rope_positions is not None and self.rope_positions is not self.options.positions:
            named = {name.replace("positions", "options.positions"): tensor for name, tensor in named.items()}
            named["positions"] = self.rope_positions
        if self.q is not None and self.batch.spans is not None:
            named["spans"] = self.batch.spans
        if self.q is not None and self.batch.select is not None:
            named[f"select.{self.batch.select.kind}"] = self.batch.select.entries
        if self.q is not None and self.batch.prefixes is not None:
            named |= self.batch.prefixes.tensors
        return named

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the call besides the cache's, by name."""
        named: dict[str, torch.Tensor | None] = {"q": self.q, **self.rows, "out": self.out, "lse": self.lse}
        named |= self.index_tensors
        if self.new is not None:
            named |= {"new[0]": self.new[0], "new[1]": self.new[1]}
        if self.rope is not None:
            named |= {"q": self.rotated_q, "q_out": self.q_out}
            named |= {f"rope.{name}": getattr(self.rope, name) for name in ("cos", "sin", "q_norm", "k_norm")}
        for name in (*TENSORS, "causal", "q_scale", "out_scale"):
            value = getattr(self.options, name)
            if self.q is not None and isinstance(value, torch.Tensor):
                named[name] = value
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    # Values of index tensors. Only value checks read them, after the static checks passed.

    @cached_property
    def page_table(self) -> torch.Tensor:
        return self.batch.page_table.cpu().long()

    @cached_property
    def kv_lens(self) -> torch.Tensor:
        return self.batch.kv_lens.cpu().long()

    @cached_property
    def q_starts(self) -> torch.Tensor:
        return self.batch.q_starts.cpu().long()

    @cached_property
    def spans(self) -> torch.Tensor:
        assert self.batch.spans is not None
        return self.batch.spans.cpu().long()

    @cached_property
    def q_lens(self) -> torch.Tensor:
        return self.q_starts.diff()

    @cached_property
    def context(self) -> torch.Tensor:
        return self.kv_lens - self.q_lens

    @cached_property
    def lengths_hold(self) -> bool:
        """Whether the lengths are valid, so that other checks can use them."""
        starts, lens = self.q_starts, self.q_lens
        if (
            starts[0] != 0
            or bool((starts[1:] < starts[:-1]).any())
            or int(starts[-1]) > self.tokens
            or bool(((self.kv_lens < 0) & self.taken).any())
        ):
            return False
        mask = self.options.mask
        if mask is not None and len(lens) and int(lens.max()) > mask.shape[1]:
            return False
        return not bool((self.lens_bound & (lens > self.kv_lens)).any())

    @cached_property
    def taken(self) -> torch.Tensor:
        """The sequences that are computed, bool `[seqs]`: those with new tokens, and a number of them that `only` includes."""
        return (self.q_lens >= max(self.only[0], 1)) & (self.q_lens <= self.only[1])

    @cached_property
    def takes_new(self) -> torch.Tensor:
        """The sequences whose new tokens come from `new`, bool `[seqs]`."""
        return self.q_lens >= self.context_from if self.new is not None else torch.zeros_like(self.taken)

    @cached_property
    def lens_bound(self) -> torch.Tensor:
        """The sequences for which `q_len <= kv_len` is required, bool `[seqs]`: all except those of non-causal calls and of
        calls with spans."""
        if self.writes or self.new is not None or self.options.mask is not None:
            return self.taken
        if self.batch.spans is not None:
            return torch.zeros_like(self.taken)
        if isinstance(self.options.causal, torch.Tensor):
            return self.taken & self.options.causal.cpu()
        return self.taken if self.options.causal else torch.zeros_like(self.taken)

    # Keys are those that are on this rank. Without a shard they are all keys, and a key is its position.

    def keys_before(self, positions: Any) -> Any:
        """The number of keys before each position."""
        return keys_of(self.batch.shard, positions)

    def positions_of(self, keys: torch.Tensor) -> torch.Tensor:
        """The position of each key."""
        return positions_of(self.batch.shard, keys)

    @cached_property
    def first_needed(self) -> torch.Tensor:
        """The first key of each sequence that one of its queries can see, `[seqs]`; without a tree mask or spans."""
        left, _ = self.options.sides
        if left is None:
            return torch.zeros_like(self.kv_lens)
        return self.keys_before(torch.minimum((self.context - left).clamp(min=0), self.context.clamp(min=0)))

    @cached_property
    def end_needed(self) -> torch.Tensor:
        """One past the last key of each sequence that an attend takes from the cache, `[seqs]`."""
        return self.keys_before(torch.where(self.taken, torch.where(self.takes_new, self.context, self.kv_lens), 0))

    @cached_property
    def reach(self) -> torch.Tensor:
        """One past the last key of each sequence that an attend needs from the cache, 0 if it needs none, `[seqs]`."""
        reach = torch.where(self.first_needed < self.end_needed, self.end_needed, 0)
        for seq, ranges in self.needed_ranges.items():
            reach[seq] = ranges[-1][1] if ranges else 0
        if self.batch.select is not None:
            seqs, keys = self.selected
            return torch.zeros_like(reach).scatter_reduce(0, seqs, keys + 1, "amax")
        return reach

    @cached_property
    def needed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Every token that an attend reads from the cache and that the page table has a column for: sequence and key, `[n]` each,
        in order."""
        capacity = self.page_table.shape[1] * self.cache.page_size
        if self.batch.select is not None:
            seq, key = self.selected
            return seq[key < capacity], key[key < capacity]
        if self.needs_ranges:
            parts = [
                (seq, low, min(high, capacity))
                for seq, ranges in self.needed_ranges.items()
                for low, high in ranges
                if low < capacity
            ]
            empty = torch.zeros(0, dtype=torch.int64, device="cpu")
            seqs = torch.cat([empty, *(torch.full((high - low,), seq, device="cpu") for seq, low, high in parts)])
            return seqs, torch.cat([empty, *(torch.arange(low, high, device="cpu") for _, low, high in parts)])
        end = self.end_needed.clamp(max=capacity)
        first = torch.minimum(self.first_needed, end)
        counts = end - first
        begin = counts.cumsum(0) - counts
        seq = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
        return seq, torch.arange(int(counts.sum()), device="cpu") - begin[seq] + first[seq]

    @property
    def needs_ranges(self) -> bool:
        """Whether an attend may need any keys of a sequence, and not one range of them: with a tree mask or spans."""
        return self.options.mask is not None or self.batch.spans is not None

    # With a selection.

    @cached_property
    def selecting(self) -> torch.Tensor:
        """The rows of the selection that are read, bool `[tokens or seqs]`: those of sequences that are computed."""
        select = self.batch.select
        assert select is not None
        if select.kind == "columns":
            return self.taken
        seq = self.sequence_of_rows(torch.arange(self.tokens, device="cpu"))
        return torch.cat((self.taken, torch.zeros(1, dtype=torch.bool, device="cpu")))[seq.clamp(max=len(self.taken))]

    @cached_property
    def entries(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows that are read: their entries `[rows, heads, n]`, their sequences, and one past their last possible entry."""
        select = self.batch.select
        assert select is not None
        row = self.selecting.nonzero().flatten()
        seq = self.sequence_of_rows(row) if select.kind == "positions" else row
        size = select.keys_per_entry(self.cache.page_size)
        return select.entries.cpu().long()[row], seq, (self.kv_lens[seq] + size - 1) // size

    @cached_property
    def selected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Every key that is selected and that some query of its row sees: sequence and position, each pair once, in order."""
        select = self.batch.select
        assert select is not None
        entries, seq, limit = self.entries
        row = self.selecting.nonzero().flatten()
        size = select.keys_per_entry(self.cache.page_size)
        inside = (entries >= 0) & (entries < limit[:, None, None])
        key = (entries * size)[..., None] + torch.arange(size, device="cpu")
        # The positions of the row's first query and of its last.
        first = row - self.q_starts[1:][seq] + self.kv_lens[seq] if select.kind == "positions" else self.context[seq]
        last = first if select.kind == "positions" else self.kv_lens[seq] - 1
        left, right = self.options.sides
        low, high = torch.zeros_like(first) if left is None else first - left, self.kv_lens[seq]
        if right is not None:
            high = torch.minimum(high, last + right + 1)
        causal = self.options.causal
        causal = causal.cpu()[seq] if isinstance(causal, torch.Tensor) else torch.full_like(seq, causal, dtype=torch.bool)
        high = torch.where(causal, torch.minimum(high, last + 1), high)
        low, high = (bound[:, None, None, None] for bound in (low, high))
        seen = inside[..., None] & (key >= low) & (key < high)
        span = int(self.kv_lens.clamp(min=0).max()) + 1 if len(self.kv_lens) else 1
        pair = (seq[:, None, None, None] * span + key)[seen].unique()
        return pair // span, pair % span

    @cached_property
    def needed_ranges(self) -> dict[int, list[tuple[int, int]]]:
        """With a tree mask or spans: the keys of each sequence that an attend needs from the cache, as ranges in order."""
        if not self.needs_ranges:
            return {}
        needed = self._tree_needed if self.batch.spans is None else self._spans_needed
        found = {seq: needed(seq) for seq in self.taken.nonzero().flatten().tolist()}
        if self.batch.shard is None:
            return found
        keys = {seq: [(self.keys_before(low), self.keys_before(high)) for low, high in ranges] for seq, ranges in found.items()}
        return {seq: [(low, high) for low, high in ranges if low < high] for seq, ranges in keys.items()}

    def _spans_needed(self, seq: int) -> list[tuple[int, int]]:
        """The positions that any query sees and that are in the cache: the union of the spans."""
        stop = int(self.context[seq] if self.takes_new[seq] else self.kv_lens[seq])
        spans = self.spans[int(self.q_starts[seq]) : int(self.q_starts[seq + 1])].clamp(0, stop)
        begin, order = spans[:, 0][spans[:, 0] < spans[:, 1]].sort()
        reached = spans[:, 1][spans[:, 0] < spans[:, 1]][order].cummax(0).values
        gap = begin[1:] > reached[:-1]
        first, last = torch.cat((begin[:1], begin[1:][gap])), torch.cat((reached[:-1][gap], reached[-1:]))
        return list(zip(first.tolist(), last.tolist()))

    def _tree_needed(self, seq: int) -> list[tuple[int, int]]:
        """The positions of the context within the window of any query, and of the new tokens that any query sees."""
        start, stop, context = int(self.q_starts[seq]), int(self.q_starts[seq + 1]), int(self.context[seq])
        left, right = self.options.sides
        found: list[tuple[int, int]] = [(0, context)] if context > 0 else []
        if self.options.positions is not None:
            found = []
            for at in sorted(self.options.positions[start:stop].cpu().tolist()):
                low = 0 if left is None else max(0, at - left)
                high = context if right is None else min(context, at + right + 1)
                if found and low <= found[-1][1]:
                    low, high = found[-1][0], max(high, found.pop()[1])
                if low < high:
                    found.append((low, high))
        if bool(self.takes_new[seq]):
            return found
        return [*found, *((context + j, context + j + 1) for j in self._tree_seen(seq).nonzero().flatten().tolist())]

    def _tree_seen(self, seq: int) -> torch.Tensor:
        """Which new tokens of a sequence are seen by any of its queries, bool `[q_len]`."""
        assert self.options.mask is not None
        start, stop = int(self.q_starts[seq]), int(self.q_starts[seq + 1])
        visible = self.options.mask[start:stop, : stop - start].cpu()
        left, right = self.options.sides
        if self.options.positions is not None:
            at = self.options.positions[start:stop].cpu().long()
            distance = at[:, None] - at
            visible = (
                visible & (distance <= left if left is not None else True) & (distance >= -right if right is not None else True)
            )
        return visible.any(0)

    @cached_property
    def stored(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Every token that a write stores: its index in k, its slot and its position, `[n]` each. The position is -1 for a token
        that is in no sequence."""
        given = self.given_slots
        slots = None if given is None else given.cpu()
        host = Batch(self.page_table, self.kv_lens, self.q_starts, slots=slots, shard=self.batch.shard)
        slot = host.slots_of_tokens(self.tokens, self.cache.page_size)
        row = (slot >= 0).nonzero().flatten()
        seq = self.sequence_of_rows(row)
        known = seq < host.seqs
        at = torch.full_like(row, -1)
        at[known] = row[known] - self.q_starts[1:][seq[known]] + self.kv_lens[seq[known]]
        return row, slot[row], at

    def sequence_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The sequence of each row of q or k; `seqs` for padding rows."""
        return torch.searchsorted(self.q_starts[1:].contiguous(), rows, right=True)
