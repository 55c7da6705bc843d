"""Launches the check of a ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quire.kernels.triton.device.arguments import BatchTensors, Number, Pointer
from quire.kernels.triton.device.audit import AuditConstants, LedgerTensors, TreePositions, audit_kernel
from quire.kernels.triton.host.launcher import (
    NO_PREFIXES,
    NO_SELECT,
    NO_SHARD,
    NO_SPANS,
    At,
    Launch,
    Launcher,
    platform_of,
    selection_of,
)
from quire.kernels.triton.host.program import Program
from quire.kernels.triton.host.tuning import AUDIT, WorkPerProgram
from quire.platform import Platform
from quire.problem import ANY, Extent, Problem


class AuditLauncher(Launcher):
    """Launches the check of a ledger."""

    def __init__(self, problem: Problem, platform: Platform, work: WorkPerProgram = AUDIT):
        super().__init__(problem, platform)
        # Its tensors are read number by number: one kernel serves any memory.
        self.units, self.work = None, work
        left, right = problem.window
        # Which new tokens are visible depends on the tree mask, which this kernel does not read: new tokens are not audited.
        context_from = 0 if problem.mask else ANY if problem.form == "full" else problem.context_from
        needs = AuditConstants(
            POSITIONS=work.size,
            PAGE_SIZE=problem.page_size,
            LEFT=None if left is None else min(left, ANY),
            CONTEXT_FROM=context_from,
            MIN_Q_LEN=problem.only[0],
            MAX_Q_LEN=problem.only[1],
            **({} if problem.select == "none" else _of_selection(problem, right)),
        )
        self.program = Program(
            audit_kernel, (Pointer, LedgerTensors, BatchTensors, TreePositions, Number), (needs,), None, work.warps
        )

    def launches(self, call: Any, extent: Extent, at: At) -> Iterator[Launch]:
        cache, batch, ledger, positions = call.cache, call.batch, call.cache.ledger, call.options.positions
        table, kv_lens, q_starts = batch.page_table, batch.kv_lens, batch.q_starts
        chunks = -(-table.shape[1] * cache.page_size // self.work.size)
        programs = extent.seqs * chunks
        if not extent.tokens or not programs:
            return
        marks = (at(ledger.position), at(ledger.issue), at(ledger.current), cache.pages)
        causal, select = call.options.causal, batch.select
        by_sequence = self.problem.select == "positions" and isinstance(causal, torch.Tensor)
        rows = (
            at(table), *table.stride(), table.shape[1], at(kv_lens), *kv_lens.stride(), at(q_starts), *q_starts.stride(),
            *((at(causal), causal.stride(0)) if by_sequence else (None, None)),
            extent.seqs, extent.tokens, ANY, *(batch.shard or NO_SHARD),
            *(NO_SPANS if batch.spans is None else (at(batch.spans), *batch.spans.stride())),
            *(NO_SELECT if select is None else selection_of(select, at)), *NO_PREFIXES,
        )  # fmt: skip
        tree = (None, None) if positions is None else (at(positions), positions.stride(0))
        found = at(ledger.violations)
        yield self.program, (programs, 1, 1), (found, marks, rows, tree, chunks), False
        yield self.program, (1, 1, 1), (found, marks, rows, tree, 0), False


def _of_selection(problem: Problem, right: int | None) -> dict[str, Any]:
    """The constants of an audit of selected keys."""
    found: dict[str, Any] = {"SELECT": problem.select, "KV_HEADS": problem.kv_heads}
    if problem.select == "positions":
        found["RIGHT"] = None if right is None else min(right, ANY)
        found["CAUSAL"] = {"yes": True, "no": False}.get(problem.causal)
    return found


def launcher(problem: Problem, platform: Platform) -> AuditLauncher:
    """Counts the tokens that an attend needs from the cache and that are not there into the ledger's `violations`."""
    return AuditLauncher(problem, platform_of(problem, platform))
