"""What is measured: Quire's own kernels, what a user of torch would write without it, and, on a GPU, the peers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from quire.attend import attend
from quire.bench.bound import BoundImplementation, Implementation, Run
from quire.bench.case import Q_SCALE, BenchCase
from quire.bench.written import own_in_two_launches, own_rotation, stored_difference
from quire.write import write

__all__ = ["BoundImplementation", "Implementation", "Run"]


def own(case: BenchCase) -> BoundImplementation:
    """`quire.attend` or `quire.write`, every check that they always make included."""
    if case.workload.operation == "write":
        return _own_write(case)
    new = (case.k, case.v) if case.workload.form == "context" else None
    out = case.out()  # allocated beforehand, as for the peers
    return BoundImplementation(lambda: attend(case.q, case.cache, case.batch, case.options, new=new, out=out), case.workload.dtype)


def own_with_fp8_queries(case: BenchCase) -> BoundImplementation | None:
    """`quire.attend` with queries in the cache's 8-bit format, quantised beforehand: to compare with peers that need them."""
    format = case.cache.k_format
    is_fp8 = format.quantised and format.dtype.is_floating_point
    if case.workload.operation == "write" or not is_fp8 or case.workload.form == "context":
        return None
    q, out = case.query(format.name), case.out()
    options = replace(case.options, q_scale=Q_SCALE)
    return BoundImplementation(lambda: attend(q, case.cache, case.batch, options, out=out), format.name)


def own_without_prefixes(case: BenchCase) -> BoundImplementation | None:
    """`quire.attend`, not told which sequences begin with the same pages."""
    if case.batch.prefixes is None:
        return None
    batch, out = case.batch.with_prefixes(None), case.out()
    return BoundImplementation(lambda: attend(case.q, case.cache, batch, case.options, out=out), case.workload.dtype)


def _own_write(case: BenchCase) -> BoundImplementation:
    if case.rope is not None:
        return own_rotation(case)
    cache = case.cache

    def run() -> torch.Tensor:
        write(case.k, case.v, cache, case.batch)
        return cache.k

    return BoundImplementation(run, case.workload.dtype, partial(stored_difference, case))


def device_copy(case: BenchCase) -> BoundImplementation | None:
    """What a write is compared with: a copy of as many bytes within the device's memory."""
    if case.workload.operation != "write":
        return None
    given = torch.cat([x.flatten() for x in (case.k, case.v, *([case.q] if case.rope else []))])
    source = given[: case.workload.bytes // 2 // given.itemsize]
    target = torch.zeros_like(source)
    return BoundImplementation(lambda: target.copy_(source), case.workload.dtype, lambda: float((target != source).sum()))


def own_in_torch(case: BenchCase) -> BoundImplementation:
    """`quire.attend` by the kernel that needs no compiler."""
    out = case.out()
    return BoundImplementation(
        lambda: attend(case.q, case.cache, case.batch, case.options, out=out, kernel="torch"), case.workload.dtype
    )


def own_without_amx(case: BenchCase) -> BoundImplementation | None:
    """`quire.attend` by the native kernel, with the best instruction set below AMX. None on a CPU without AMX, where it would be
    the same."""
    from quire.kernels.native.library import FILE, forced, library

    if not FILE.exists() or "amx" not in library().levels:
        return None

    out = case.out()

    def run() -> torch.Tensor:
        with forced("avx512-bf16"):
            return attend(case.q, case.cache, case.batch, case.options, out=out, kernel="native")

    return BoundImplementation(run, case.workload.dtype)


def gather_sdpa(case: BenchCase) -> BoundImplementation | None:
    """For each sequence: gather its pages with index_select, pack the group as query rows, call torch's SDPA. Masks are made
    beforehand and not timed."""
    q, cache, batch = case.q, case.cache, case.batch
    if cache.quantised or case.workload.features or case.workload.window is not None:
        return None
    table, size, kv_heads, dim = batch.page_table.long(), cache.page_size, cache.kv_heads, cache.head_dim
    group = q.shape[1] // kv_heads
    rows = []
    starts = batch.q_starts.tolist()
    for i, kv_len in enumerate(batch.kv_lens.tolist()):
        q_len = starts[i + 1] - starts[i]
        seen = (
            torch.ones(q_len, kv_len, dtype=torch.bool, device="cpu").tril(kv_len - q_len).repeat(group, 1) if q_len > 1 else None
        )
        rows.append((slice(starts[i], starts[i + 1]), q_len, kv_len, table[i, : -(-kv_len // size)], seen))

    @torch.no_grad()
    def run() -> torch.Tensor:
        out = torch.empty_like(q)
        for tokens, q_len, kv_len, ids, seen in rows:
            k, v = (pages.index_select(0, ids).view(-1, kv_heads, dim)[:kv_len].transpose(0, 1) for pages in (cache.k, cache.v))
            packed = q[tokens].view(q_len, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * q_len, dim)
            o = torch.nn.functional.scaled_dot_product_attention(packed, k[None], v[None], attn_mask=seen)
            out[tokens] = o.view(kv_heads, group, q_len, dim).permute(2, 0, 1, 3).reshape(q_len, -1, dim)
        return out

    return BoundImplementation(run, case.workload.dtype)


def _vllm(case: BenchCase) -> BoundImplementation | None:
    from quire.bench.peers.vllm_cpu import load

    return load(amx=True)(case)


def _vllm_without_amx(case: BenchCase) -> BoundImplementation | None:
    from quire.bench.peers.vllm_cpu import load

    return load(amx=False)(case)


def _flex(case: BenchCase) -> BoundImplementation | None:
    from quire.bench.peers.flex_cpu import implementation

    return implementation(case)


CPU_IMPLEMENTATIONS: dict[str, Implementation] = {
    "quire": own,
    "quire without AMX": own_without_amx,
    "quire torch": own_in_torch,
    "gather + SDPA": gather_sdpa,
    "FlexAttention": _flex,
    "vLLM": _vllm,
    "vLLM vec": _vllm_without_amx,
}
OWN_ON_CUDA: dict[str, Implementation] = {
    "quire": own,
    "quire fp8 q": own_with_fp8_queries,
    "quire without prefixes": own_without_prefixes,
    "quire in two launches": own_in_two_launches,
}
