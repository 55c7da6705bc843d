"""A stand-in for vLLM's mixed-batch operator, which runs two kernels for one output, and for its ROCm decode kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.case import Case
from quire.conformance.faults.injected import compute
from quire.conformance.runner.target import Target
from rocm_story.batch import DECODE, HEAD_DIM, PAGE_SIZE, SEQS, TestBatch

PARTITION = 256
"""Keys that one workgroup of the ROCm kernel processes."""


@dataclass(frozen=True)
class CallArguments:
    """How the operator is called. The default is the call of the test after its index tensors were created as int32; the other
    values are what a proposed fix, or another fault, would change."""

    token_in_cache: bool = False
    """Whether the cache holds the decoding token."""
    starts: torch.Tensor | None = None
    """`q_starts`, if not the test's."""
    index: torch.dtype = torch.int32
    """The type of the page table and of the lengths."""
    kv_cache_dtype: str = "auto"
    length: str = "kv_lens"
    """What the decode kernel uses as the length of a sequence: 'kv_lens' or, as one fix proposes, 'contexts'."""
    reads_own_type: bool = False
    """Whether the decode kernel reads `q_starts` in the tensor's own type."""
    seqs: int = SEQS
    """How many sequences the decode kernel is launched for."""


def mixed_operator(batch: TestBatch, arguments: CallArguments, memory: torch.Tensor) -> torch.Tensor:
    """The output of the operator: prefilling sequences by one kernel, decoding sequences by the other. `memory` is what the
    output's memory holds before the call."""
    out = memory.clone()
    out[: batch.decode_row] = batch.prefill
    k, v = batch.pages
    starts = batch.q_starts(torch.int32) if arguments.starts is None else arguments.starts
    lens = torch.tensor(batch.kv_lens if arguments.length == "kv_lens" else batch.contexts, dtype=arguments.index)
    position = batch.contexts[DECODE]
    slot = batch.page_table[DECODE, position // PAGE_SIZE], position % PAGE_SIZE
    if arguments.token_in_cache:
        k[slot], v[slot] = batch.k[DECODE][-1], batch.v[DECODE][-1]
    try:
        rocm_decode(out, batch.q, k, v, batch.page_table.to(arguments.index), lens, starts, arguments)
    finally:
        k[slot] = v[slot] = 0.0
    return out


def rocm_decode(
    out: torch.Tensor,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    q_starts: torch.Tensor,
    arguments: CallArguments,
) -> None:
    """What vLLM's `paged_attention_rocm` does with its arguments, including its arithmetic: partitions of 256 keys whose weights
    and partial results are rounded to 16 bits. It skips sequences with more than one new token: those belong to the prefill
    kernel."""
    if arguments.kv_cache_dtype not in ("auto", "fp8", "fp8_e4m3"):
        raise RuntimeError(f"Unsupported KV cache dtype: {arguments.kv_cache_dtype}")
    # The C++ code obtains these two pointers with data_ptr<int>(), which checks the type ...
    for index in (page_table, kv_lens):
        if index.dtype is not torch.int32:
            raise RuntimeError("expected scalar type Int but found Long")
    # ... and casts this one, which checks nothing.
    starts = q_starts if arguments.reads_own_type else q_starts.view(torch.int32)
    for seq in range(arguments.seqs):
        start, end = int(starts[seq]), int(starts[seq + 1])
        if end - start == 1:
            out[start] = decode_in_partitions(q[start], k_pages, v_pages, page_table[seq], int(kv_lens[seq]))


def decode_in_partitions(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, page_ids: torch.Tensor, length: int
) -> torch.Tensor:
    """One query [heads, head_dim] over the first `length` slots of these pages."""
    ids = page_ids[: -(-length // PAGE_SIZE)].long()
    k, v = (pages[ids].flatten(0, 1)[:length].float() for pages in (k_pages, v_pages))
    logits = torch.einsum("hd,khd->hk", q.float(), k) * HEAD_DIM**-0.5
    partials = []
    for scores, values in zip(logits.split(PARTITION, 1), v.split(PARTITION)):
        maximum = scores.amax(1, keepdim=True)
        weights = (scores - maximum).exp()
        total = weights.sum(1, keepdim=True)
        rounded = (weights / (total + 1e-6)).half().float()
        partials.append((maximum, total, torch.einsum("hk,khd->hd", rounded, values).half().float()))
    top = torch.stack([maximum for maximum, _, _ in partials]).amax(0)
    factors = [total * (maximum - top).exp() for maximum, total, _ in partials]
    return (sum(factor * out for factor, (_, _, out) in zip(factors, partials)) / (sum(factors) + 1e-6)).half()


SMALL_CASE = Case(
    "rocm-story-small",
    q_lens=(55, 26, 50, 58, 28, 4, 18, 63, 34, 1),
    kv_lens=(82, 86, 101, 112, 48, 67, 49, 87, 72, 58),
    kv_heads=2,
    group=1,
    page_size=PAGE_SIZE,
    index=("int32", "int32", "int64"),
)
"""The batch with lengths divided by 16 and the conformance kit's own values: enough to diagnose a kernel."""


def conformance_target(name: str, *, reads_own_type: bool = False, skipped: int = 0) -> Target:
    """The operator as a target of the conformance kit. Sequences with more than one new token are correct. The others come from a
    kernel that may read q_starts as int32, or may be launched for `skipped` sequences too few."""

    def run(call: KernelCall) -> None:
        scratch = replace(call, out=call.out.clone(), checksums={}, memo={})
        compute(scratch)
        starts = call.q_starts
        read = starts if reads_own_type or starts.dtype is torch.int32 else starts.view(torch.int32)
        rows = [(int(starts[i]), int(starts[i + 1])) for i in range(call.seqs) if starts[i + 1] - starts[i] > 1]
        rows += [(int(read[i]), int(read[i]) + 1) for i in range(call.seqs - skipped) if read[i + 1] - read[i] == 1]
        for first, end in rows:
            call.out[first:end] = scratch.out[first:end]

    return Target(name, run)
