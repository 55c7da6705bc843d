"""Launches the check of a ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quire.kernels.triton.device.arguments import BatchTensors, Number, Pointer
from quire.kernels.triton.device.audit import AuditConstants, LedgerTensors, Narrowed, TreePositions, audit_kernel
from quire.kernels.triton.host.launcher import (
    NO_PREFIXES,
    NO_SHARD,
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
            KV_HEADS=problem.kv_heads,
            RIGHT=None if right is None else min(right, ANY),
            CAUSAL={"yes": True, "no": False}.get(problem.causal),
        )
        records = (Pointer, LedgerTensors, BatchTensors, TreePositions, Narrowed, Number)
        self.program = Program(audit_kernel, records, (needs,), None, work.warps)

    def launches(self, call: Any, extent: Extent, at: At) -> Iterator[Launch]:
        cache, batch, ledger, positions = call.cache, call.batch, call.cache.ledger, call.options.positions
        table, kv_lens, q_starts = batch.page_table, batch.kv_lens, batch.q_starts
        chunks = -(-table.shape[1] * cache.page_size // self.work.size)
        programs = extent.seqs * chunks
        if not extent.tokens or not programs:
            return
        marks = (at(ledger.position), at(ledger.issue), at(ledger.current), cache.pages)
        causal, spans, select = call.options.causal, batch.spans, batch.select
        # The page table stands for tensors that the batch does not have: all index tensors of a layer usually have one type.
        rows = (
            at(table), *table.stride(), table.shape[1], at(kv_lens), *kv_lens.stride(), at(q_starts), *q_starts.stride(),
            *((at(causal), causal.stride(0)) if isinstance(causal, torch.Tensor) else (None, None)),
            extent.seqs, extent.tokens, ANY, None, *(batch.shard or NO_SHARD),
            *((at(table), 0, 0) if spans is None else (at(spans), *spans.stride())),
            *((at(table), 0, 0, 0, 0) if select is None else selection_of(select, at)), *NO_PREFIXES,
        )  # fmt: skip
        tree = (None, None) if positions is None else (at(positions), positions.stride(0))
        found, kind = at(ledger.violations), None if select is None else select.kind
        narrowed = (int(spans is not None), int(kind == "positions"), int(kind == "columns"))
        yield self.program, (programs, 1, 1), (found, marks, rows, tree, narrowed, chunks), False
        yield self.program, (1, 1, 1), (found, marks, rows, tree, narrowed, 0), False


def launcher(problem: Problem, platform: Platform) -> AuditLauncher:
    """Counts the tokens that an attend needs from the cache and that are not there into the ledger's `violations`."""
    return AuditLauncher(problem, platform_of(problem, platform))
