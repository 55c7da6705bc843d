"""Exchanges of partial results: how the output and LSE of every rank over its own keys become the result over all keys.

    GatherExchange    one all-gather of everything; every rank merges everything. Least latency.
    DividedExchange   each rank merges some of the rows for all (all-to-all), and the merged rows are gathered. Least traffic, when
                      every rank needs every head.
    OwnHeadsExchange  each rank merges its own heads (all-to-all), and needs no others.

An exchange has buffers for the partial result of this rank, `out` and `lse`. `start` sends them, `finish` merges what arrived: in
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
    """The next multiple of 16 bytes: a tensor that begins there is aligned."""
    return -(-size // 16) * 16


class Finish(Protocol):
    """The last step: fp32 outputs to the type of the result."""

    def __call__(self, out: torch.Tensor) -> torch.Tensor: ...


class GatherExchange:
    """Every rank gets the partial results of all."""

    def __init__(self, group: RankGroup, shape: PartialShape, header: torch.Tensor, finish: Finish):
        self._group, self._shape, self._finish = group, shape, finish
        self._begin = header.numel() * 8
        self._message = torch.empty(self._begin + shape.bytes, dtype=torch.uint8, device=shape.device)
        self._message[: self._begin].view(torch.int64).copy_(header)
        self.out, self.lse = (view[0] for view in shape.views(self._message[None, self._begin :]))

    def start(self) -> None:
        self._pending = self._group.all_gather(self._message)

    def finish(self) -> tuple[Merged, torch.Tensor]:
        """The merged result, and the headers of the ranks."""
        messages = self._pending.wait()
        outs, lses = self._shape.views(messages[:, self._begin :])
        out, lse = merge([part.float() for part in outs], list(lses))
        return (self._finish(out), lse), messages[:, : self._begin].view(torch.int64)


class DividedExchange:
    """Every rank merges `tokens / ranks` rows, rounded up, and gets the others merged."""

    def __init__(self, group: RankGroup, shape: PartialShape, header: torch.Tensor, finish: Finish):
        self._group, self._shape, self._finish = group, shape, finish
        self._each = -(-shape.tokens // group.size)
        rows = self._each * group.size
        self._outs = torch.empty(rows, shape.heads, shape.dim, dtype=shape.dtype, device=shape.device)
        # LSEs are a small part: every rank gets them all, and with them the headers.
        self._begin = header.numel() * 2
        self._message = torch.full((self._begin + rows * shape.heads,), -torch.inf, device=shape.device)
        self._message[: self._begin].view(torch.int64).copy_(header)
        self.out = self._outs[: shape.tokens]
        self.lse = self._lses(self._message)[: shape.tokens]

    def _lses(self, message: torch.Tensor) -> torch.Tensor:
        return message[self._begin :].view(-1, self._shape.heads)

    def start(self) -> None:
        self._pending_lses = self._group.all_gather(self._message)
        self._pending = self._group.all_to_all(self._outs.view(self._group.size, self._each, *self._outs.shape[1:]))

    def finish(self) -> tuple[Merged, torch.Tensor]:
        """The merged result, and the headers of the ranks."""
        messages = self._pending_lses.wait()
        lses = [self._lses(message) for message in messages]
        mine = slice(self._group.rank * self._each, (self._group.rank + 1) * self._each)
        out, _ = merge([part.float() for part in self._pending.wait()], [lse[mine] for lse in lses])
        merged = self._group.all_gather(self._finish(out)).wait()
        lse = torch.logsumexp(torch.stack(lses), dim=0)
        tokens = self._shape.tokens
        return (merged.flatten(0, 1)[:tokens], lse[:tokens]), messages[:, : self._begin].view(torch.int64)


class OwnHeadsExchange:
    """Every rank gets the partial results of its own heads. The headers went with the queries."""

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

    def finish(self) -> tuple[Merged, None]:
        """The merged result of this rank's heads."""
        outs, lses = self._own.views(self._pending.wait())
        out, lse = merge([part.float() for part in outs], list(lses))
        return (self._finish(out), lse), None
