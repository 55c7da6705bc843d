"""The division of a batch by the GPU scheduler itself: quire.kernels.triton.device.schedule, run in Triton's interpreter.

TRITON_INTERPRET=1 must be set before Triton is imported for the first time; `__main__.py` does it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import quire
from quire.contract.call import Call
from quire.kernels.triton.device.arguments import BatchTensors, Workspace
from quire.kernels.triton.device.schedule import plan_splits, short_totals, short_work, split_begin, split_of_program
from quire.kernels.triton.host.launcher import AttendLauncher
from quire.launch import described
from quire.platform import INTERPRETER


class Share(NamedTuple):
    """What one program computes: the pieces [begin, end) of the list of work."""

    begin: int
    end: int


class Division(NamedTuple):
    """The list of work of the short sequences of one key head, and how programs share it, in the order in which they start."""

    work: list[int]
    """Pieces of each sequence, 0 for long ones: its key tiles and `overhead` for each unit."""
    shares: list[Share]
    overhead: int
    tile: int
    """Keys of a tile."""
    long_tokens: int
    """Queries of a tile of a long sequence."""


@triton.jit
def division_kernel(shares, work, batch, workspace, T: tl.constexpr, C: tl.constexpr):
    """What `attend_kernel` computes before it loads anything: the share of each program. Program 0 also stores the list of work."""
    program = tl.program_id(0)
    one_head, units = short_totals(batch, T, C)
    splits = plan_splits(batch, one_head * T.HEADS, units, workspace, T, C)
    split = split_of_program(program, splits, T, C)
    tl.store(shares + 2 * program, split_begin(split, splits, T, C))
    tl.store(shares + 2 * program + 1, split_begin(split + 1, splits, T, C))
    if program == 0:
        for seq in range(batch.seqs):
            start = tl.load(batch.q_starts + seq)
            q_len = tl.load(batch.q_starts + seq + 1) - start
            tl.store(work + seq, short_work(batch, seq, start, q_len, tl.load(batch.kv_lens + seq), T, C))


def divided(kernel: str, lengths: list[tuple[int, int]], multiprocessors: int) -> Division:
    """How a kernel divides sequences of (new tokens, all tokens) on a GPU with so many multiprocessors, one program each."""
    pool = quire.PagePool(pages=sum(-(-kv_len // 32) for _, kv_len in lengths) + 1, page_size=32)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=16, dtype=torch.float32)
    sequences = [pool.sequence() for _ in lengths]
    pool.step({s: kv_len - q_len for s, (q_len, kv_len) in zip(sequences, lengths)})
    batch = pool.step({s: q_len for s, (q_len, _) in zip(sequences, lengths)})
    q = torch.zeros(sum(q_len for q_len, _ in lengths), 1, 16)
    call = Call(cache, batch, q, out=torch.empty_like(q))
    problem, extent = described("attend", call)
    launcher = AttendLauncher(kernel, problem, replace(INTERPRETER, multiprocessors=multiprocessors))
    (program, _, arguments, _), *_ = launcher.launches(call, extent, lambda tensor: tensor)
    tile, long, constants = program.constants
    workspace, sequences_ = Workspace(*arguments[1]), BatchTensors(*arguments[4])
    shares = torch.zeros(workspace.programs, 2, dtype=torch.int64)
    work = torch.zeros(len(lengths), dtype=torch.int64)
    division_kernel[(workspace.programs,)](shares, work, sequences_, workspace, tile, constants)
    taken = [Share(*pair) for pair in shares.tolist() if pair[0] < pair[1]]
    return Division(work.tolist(), taken, constants.UNIT_OVERHEAD, tile.STEP, long.TOKENS if long else 0)
