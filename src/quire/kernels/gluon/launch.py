"""Launches for Hopper: long rows by Gluon's kernel, short rows by Triton's, side by side on the card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.kernels.gluon.prefill import FIRST, SECOND, prefill_kernel
from quire.kernels.gluon.units import FIELDS, HEADER, units_kernel
from quire.kernels.triton.bind import ALIGNED, Bound
from quire.kernels.triton.launch import Launch, Pair, Plan, launches_of
from quire.options import Options

REGISTERS = 504
"""What three groups of warps have together, a thread of each: a multiprocessor's, in steps of eight."""


class Workshop(NamedTuple):
    """How much one program computes at a time, as `Tile` says, and how its warps share the work."""

    ROWS: int
    KEYS: int
    STAGES: int
    TOGETHER: int
    STEP: int
    TOKENS: int
    HEADS: int
    FEW: bool
    COMPUTER: int
    """Registers of a thread that computes."""
    LOADER: int
    """Registers of a thread that loads."""
    PROGRAMS_BESIDE: int
    """Programs that run beside the short rows, if there are any."""
    COPIES: bool
    """Whether keys and values can be copied as they are, sixteen bytes at a time."""


class Hopper(Plan):
    """Five launches: cut long rows into units; take units; meanwhile short rows, on a part of the card; take units there, too, when
    these have ended; and combine what was shared of them."""

    def __init__(self, *call: Any, **how: Any):
        super().__init__("gluon", *call, **how)
        q, _, batch = call[:3]
        assert self.long is not None
        longest = min(batch.seqs, q.shape[0] // (self.short.TOKENS + 1))
        most = q.shape[0] // self.long.TOKENS + longest
        self.units = HEADER.value + FIELDS.value * most
        self.workers = max(1, min(self.multiprocessors, most * self.long.HEADS))
        self.grid = self.programs

    def launches(self, arguments: tuple[Any, ...]) -> Iterator[Launch]:
        before, arguments, constants = self.balanced(arguments)
        out, room, query, cache, rows, new, features = arguments
        shop = self._shop(arguments, constants)
        yield from before
        yield Launch(units_kernel, (room.units, rows, cache, features), (shop, constants), (rows.seqs, 1, 1), self.helpers, 1)
        long = Launch(
            prefill_kernel,
            (out, room.units, query, cache, rows, new, features, FIRST.value),
            (shop, constants),
            (self.workers, 1, 1),
            4,
            1,
        )
        yield long
        yield self.shared_out(arguments, constants)._replace(constants=(self.short, None, constants), early=True, registers=None)
        yield long._replace(arguments=(*long.arguments[:-1], SECOND.value), early=True)
        yield from self.combined(arguments, constants)

    def _shop(self, arguments: tuple[Any, ...], constants: Any) -> Workshop:
        _, _, query, cache, _, new, _ = arguments
        assert self.long is not None and self.row.registers is not None
        known = [(cache.k, constants.K_STEPS), (cache.v, constants.V_STEPS)]
        given = [(query.at, constants.Q_DIM, query.token, query.head)]
        if constants.NEW:
            given += [(new.k, constants.NEW_K_DIM, new.k_token, new.k_head), (new.v, constants.NEW_V_DIM, new.v_token, new.v_head)]
        copies = not constants.BYTES and all(
            # Of a stride that is given at run time the compiler knows only whether it is a multiple of 16.
            _is_aligned(at) and step == 1 and token % 16 == 0 and head % 16 == 0
            for at, step, token, head in given
        )
        copies &= all(_is_aligned(at) and steps[5] == 1 and not any(step % 8 for step in steps[:4]) for at, steps in known)
        return Workshop(
            *self.long,
            COMPUTER=self.row.registers,
            LOADER=REGISTERS - 2 * self.row.registers,
            PROGRAMS_BESIDE=self.workers // 2,
            COPIES=copies,
        )


def _is_aligned(at: Any) -> bool:
    """Whether memory begins where sixteen bytes can be copied at a time. What stands for a tensor in calls that are bound does, or
    they were not bound."""
    return not isinstance(at, torch.Tensor) or at.device.type == "meta" or at.data_ptr() % ALIGNED == 0


def bind(
    q: torch.Tensor, cache: KVCache, batch: Batch, options: Options, new: Pair, out: torch.Tensor, **how: Any
) -> Callable[..., None]:
    """A launcher for calls like this one."""
    return Bound(Hopper(q, cache, batch, options, new, out, **how))


def launch(
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options,
    new: Pair,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    **how: Any,
) -> None:
    """Short rows and long ones, side by side."""
    plan = Hopper(q, cache, batch, options, new, out, **how)
    for each in launches_of(plan, q, cache, batch, options, new, out, lse):
        each()
