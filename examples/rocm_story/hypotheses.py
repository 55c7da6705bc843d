"""Four proposed explanations, each with the largest error that it can cause in the failing row."""

from __future__ import annotations

from typing import Any

import torch

from rocm_story.batch import DECODE, HEAD_DIM, HEADS, MAX_VALUE, PAGE_SIZE, TOLERANCE, TestBatch
from rocm_story.mixed_operator import CallArguments, mixed_operator
from rocm_story.results import REPORTED, Hypothesis

FILL_VALUES = (1024.0, -0.5)
"""Two values that no correct output contains. Memory that keeps the one and then the other was never written."""


def hypotheses(batch: TestBatch) -> list[Hypothesis]:
    return [missing_token(batch), accuracy(batch), boundary(batch), index_type(batch)]


def missing_token(batch: TestBatch) -> Hypothesis:
    k, v, context = batch.k[DECODE], batch.v[DECODE], batch.contexts[DECODE]
    zero = _zero(batch)
    error, wrong = _effect(batch, batch.dense(DECODE, torch.cat((k[:-1], zero)), torch.cat((v[:-1], zero)))[0])
    needed = REPORTED["error"] * (context + 1)
    return Hypothesis(
        "missing cache token",
        "000, 001, 002, 003",
        f"The cache does not contain position {context} of the decoding sequence, and the kernel reads that slot.",
        error,
        wrong,
        explains=error >= REPORTED["error"] / 10,
        reason=f"The slot is zero and all {context + 1} keys have nearly the same weight, so one key changes the row by "
        f"{error:.1e}. For an error of {REPORTED['error']:.2f} the slot would have to hold {needed:.0f} in all "
        f"{HEADS * HEAD_DIM} elements.",
    )


def accuracy(batch: TestBatch) -> Hypothesis:
    row = batch.decode_row
    in_fp16 = _effect(batch, _decode_in_fp16(batch.q[row], batch.k[DECODE], batch.v[DECODE]))
    complete = CallArguments(token_in_cache=True, starts=batch.q_starts(torch.int32).int())
    own = _effect(batch, mixed_operator(batch, complete, torch.zeros_like(batch.q))[row])
    error, wrong = max(in_fp16, own)
    return Hypothesis(
        "accuracy",
        "004, title of 002",
        "The kernel's arithmetic is not precise enough in this configuration.",
        error,
        wrong,
        explains=error >= REPORTED["error"] / 10,
        reason=f"The kernel's 16-bit weights and partial results cost {own[0]:.1e}; fp16 in every step would cost "
        f"{in_fp16[0]:.1e}. A weighted average of values within {MAX_VALUE:g} stays within {MAX_VALUE:g}, however it is rounded.",
    )


def boundary(batch: TestBatch) -> Hypothesis:
    k, v = batch.k[DECODE], batch.v[DECODE]
    empty_slots = -len(k) % PAGE_SIZE
    zeros = _zero(batch).expand(empty_slots, -1, -1)
    last_page = _effect(batch, batch.dense(DECODE, torch.cat((k, zeros)), torch.cat((v, zeros)))[0])
    foreign_k, foreign_v = batch.k[0][:PAGE_SIZE], batch.v[0][:PAGE_SIZE]
    foreign_page = _effect(batch, batch.dense(DECODE, torch.cat((k, foreign_k)), torch.cat((v, foreign_v)))[0])
    error, wrong = max(last_page, foreign_page)
    return Hypothesis(
        "boundary",
        "002",
        "The kernel reads past the end of the sequence, which the Triton kernel does not.",
        error,
        wrong,
        explains=error >= REPORTED["error"] / 10,
        reason=f"Attending to the {empty_slots} empty slots of the last page costs {last_page[0]:.1e}, to a page of another "
        f"sequence {foreign_page[0]:.1e}. The values there are within {MAX_VALUE:g} too.",
    )


def index_type(batch: TestBatch) -> Hypothesis:
    lengths = read_as_int32(batch)["lengths"]
    row = mixed_operator(batch, CallArguments(), torch.full_like(batch.q, FILL_VALUES[0]))[batch.decode_row]
    return Hypothesis(
        "index type",
        "004, which considered it fixed",
        "torch.cumsum promoted int32 to int64, and the kernel reads the bytes as int32.",
        None,
        _effect(batch, row)[1],
        explains=1 not in lengths and bool((row == FILL_VALUES[0]).all()),
        reason=f"The kernel reads the sequence's number of new tokens as {lengths[DECODE]}. That is not 1, so it leaves the "
        "sequence to the prefill kernel, which skips it as a decode. The row keeps what its memory held before, of any size.",
    )


def read_as_int32(batch: TestBatch) -> dict[str, Any]:
    """q_starts as they are, and as a kernel sees them that reads the bytes as int32."""
    starts = batch.q_starts(torch.int32)
    as_int32 = starts.view(torch.int32)[: len(starts)]
    return {
        "dtype_before_cumsum": "int32",
        "dtype_after_cumsum": str(starts.dtype).removeprefix("torch."),
        "starts": starts.tolist(),
        "read_as_int32": as_int32.tolist(),
        "true_lengths": starts.diff().tolist(),
        "lengths": as_int32.diff().tolist(),
    }


def fill_test(batch: TestBatch, value: float) -> dict[str, Any]:
    """Fills the output's memory with a value that no correct output contains, and repeats the call."""
    out = mixed_operator(batch, CallArguments(), torch.full_like(batch.q, value))
    return {
        "value": value,
        "row": batch.decode_row,
        "row_keeps_it": bool((out[batch.decode_row] == value).all()),
        "rest_unchanged": torch.equal(out[: batch.decode_row], batch.prefill),
    }


def _effect(batch: TestBatch, row: torch.Tensor) -> tuple[float, int]:
    """The largest error of the row that decodes, and how many of its elements are outside the test's tolerance."""
    error = (row.float() - batch.dense(DECODE, batch.k[DECODE], batch.v[DECODE])[0]).abs()
    return float(error.max()), int((error > TOLERANCE).sum())


def _zero(batch: TestBatch) -> torch.Tensor:
    return batch.q.new_zeros(1, HEADS, HEAD_DIM)


def _decode_in_fp16(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Everything rounded to fp16 after every step, including the running sum of the output: worse than any real kernel."""
    logits = (q.float() * k.float()).half().float().sum(-1).T.half() * torch.tensor(HEAD_DIM**-0.5).half()
    weights = (logits - logits.amax(1, keepdim=True)).float().exp().half()
    total, out = torch.zeros(HEADS).half(), torch.zeros(HEADS, HEAD_DIM).half()
    for key in range(len(k)):
        total = total + weights[:, key]
        out = out + weights[:, key, None] * v[key]
    return (out / total[:, None]).float()
