"""Exchanges of partial results: how the output and LSE of every rank over its own keys become the result over all keys.

    GatherExchange    one all-gather of everything; every rank merges everything. Least latency.
    DividedExchange   each rank merges some of the rows for all (all-to-all), and the merged rows are gathered. Least traffic, when
                      every rank needs every head.
    OwnHeadsExchange  each rank merges its own heads (all-to-all), and needs no others.

An exchange has buffers for the partial result of this rank, `out` and `lse`. `start` sends them, `finish` waits and merges: in
fp32, in the order of the ranks, row by row. All exchanges therefore give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from quire.distributed.group import RankGroup
from quire.merge import merge

Merged = tuple[torch.Tensor, torch.Tensor]
"""The output in its final type, and the LSE."""


class PartialShape(NamedTuple):
    """The partial result of one rank."""

    tokens: int
    heads: int
    dim: int
    dtype: torch.dtype
    """In which outputs are exchanged."""
    device: torch.device

    @property
    def lse_bytes(self) -> int:
        """Of the LSE, up to where the output is aligned."""
        return padded(self.tokens * self.heads * 4)

    @property
    def bytes(self) -> int:
        """Of the LSE and the output."""
        return self.lse_bytes + padded(self.tokens * self.heads * self.dim * self.dtype.itemsize)

    def views(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and LSEs within messages of bytes, `[ranks, bytes]`: `[ranks, tokens, heads, ...]`."""
        rows, ranks = self.tokens * self.heads, messages.shape[0]
        lses = messages[:, : rows * 4].view(torch.float32).view(ranks, self.tokens, self.heads)
        outs = messages[:, self.lse_bytes :][:, : rows * self.dim * self.dtype.itemsize].view(self.dtype)
        return outs.view(ranks, self.tokens, self.heads, self.dim), lses


def padded(size: int) -> int:
    """The next multiple of 16 bytes, at least 16: a tensor that begins there is aligned."""
    return max(1, -(-size // 16)) * 16


class Finish(Protocol):
    """The last step: fp32 outputs to the type of the result."""

    def __call__(self, out: torch.Tensor) -> torch.Tensor: ...


class GatherExchange:
    """Every rank gets the partial results of all."""

    def __init__(self, group: RankGroup, shape: PartialShape, finish: Finish):
        self._group, self._shape, self._finish = group, shape, finish
        self._message = torch.empty(shape.bytes, dtype=torch.uint8, device=shape.device)
        self.out, self.lse = (view[0] for view in shape.views(self._message[None]))

    def start(self) -> None:
        self._pending = self._group.all_gather(self._message)

    def finish(self) -> Merged:
        outs, lses = self._shape.views(self._pending.wait())
        out, lse = merge([part.float() for part in outs], list(lses))
        return self._finish(out), lse


class DividedExchange:
    """Every rank merges `tokens / ranks` rows, rounded up, and gets the others merged."""

    def __init__(self, group: RankGroup, shape: PartialShape, finish: Finish):
        self._group, self._shape, self._finish = group, shape, finish
        self._each = -(-shape.tokens // group.size)
        rows = self._each * group.size
        self._outs = torch.empty(rows, shape.heads, shape.dim, dtype=shape.dtype, device=shape.device)
        # LSEs are a small part: every rank gets them all.
        self._lses = torch.full((rows, shape.heads), -torch.inf, device=shape.device)
        self.out, self.lse = self._outs[: shape.tokens], self._lses[: shape.tokens]

    def start(self) -> None:
        self._pending_lses = self._group.all_gather(self._lses)
        self._pending = self._group.all_to_all(self._outs.unflatten(0, (self._group.size, self._each)))

    def finish(self) -> Merged:
        lses, tokens = self._pending_lses.wait(), self._shape.tokens
        mine = slice(self._group.rank * self._each, (self._group.rank + 1) * self._each)
        out, _ = merge([part.float() for part in self._pending.wait()], list(lses[:, mine]))
        merged = self._group.all_gather(self._finish(out)).wait()
        return merged.flatten(0, 1)[:tokens], torch.logsumexp(lses, dim=0)[:tokens]


class OwnHeadsExchange:
    """Every rank gets the partial results of its own heads."""

    def __init__(self, group: RankGroup, shape: PartialShape, finish: Finish):
        self._group, self._shape, self._finish = group, shape, finish
        self._own = shape._replace(heads=shape.heads // group.size)
        self.out = torch.empty(shape.tokens, shape.heads, shape.dim, dtype=shape.dtype, device=shape.device)
        self.lse = torch.empty(shape.tokens, shape.heads, device=shape.device)

    def start(self) -> None:
        ranks = self._group.size
        messages = torch.empty(ranks, self._own.bytes, dtype=torch.uint8, device=self._shape.device)
        outs, lses = self._own.views(messages)
        outs.copy_(self.out.unflatten(1, (ranks, -1)).transpose(0, 1))
        lses.copy_(self.lse.unflatten(1, (ranks, -1)).transpose(0, 1))
        self._pending = self._group.all_to_all(messages)

    def finish(self) -> Merged:
        outs, lses = self._own.views(self._pending.wait())
        out, lse = merge([part.float() for part in outs], list(lses))
        return self._finish(out), lse


Exchange = GatherExchange | DividedExchange | OwnHeadsExchange
