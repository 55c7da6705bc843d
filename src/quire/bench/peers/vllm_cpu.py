"""vLLM's attention kernel for CPUs, called directly: its pages of 32, its layout, its schedule computed beforehand."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from quire.batch import Batch
from quire.bench.case import K_SCALE, V_SCALE, BenchCase
from quire.bench.implementations import BoundImplementation, Implementation
from quire.bench.stream.implementations import StreamImplementation
from quire.bench.stream.setup import UNWRITTEN, Planned, Setup
from quire.errors import ArgumentError

PAGE = 32
FORMATS = {"": "auto", "e4m3fn": "fp8_e4m3", "e5m2": "fp8_e5m2"}


def load(amx: bool) -> Implementation:
    """With AMX where this CPU has it, if wanted, and else with vector instructions."""
    from vllm import _custom_ops as ops

    with_amx = amx and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    return partial(_bind, ops, amx, with_amx)


def _bind(ops: Any, amx: bool, with_amx: bool, case: BenchCase) -> BoundImplementation | None:
    w, q = case.workload, case.q
    if w.operation != "attend" or w.form != "full" or w.format not in FORMATS or w.window is not None or w.features:
        return None
    uses_amx = with_amx and q.dtype is torch.bfloat16
    supported = torch.cpu._is_amx_tile_supported()
    # Where both variants would run the same kernel, one of them has no result.
    if (supported and amx and not uses_amx) or (not supported and not amx):
        return None
    isa = _isa(uses_amx, w.head_dim)
    scales = (K_SCALE, V_SCALE) if w.format else (1.0, 1.0)
    table, k_cache, v_cache = _fill(ops, case, isa, scales)
    starts, kv_lens, out = case.batch.q_starts, case.batch.kv_lens, case.out()
    kind, scale = FORMATS[w.format], w.head_dim**-0.5
    metadata = ops.cpu_attn_get_scheduler_metadata(
        len(kv_lens), w.q_heads, w.kv_heads, w.head_dim, kv_lens, q.dtype, starts, True, -1, isa, True, None, kind
    )

    def run() -> torch.Tensor:
        ops.cpu_attention_with_kv_cache(
            q, k_cache, v_cache, out, starts, kv_lens, scale, True, None, -1, table, 0.0, metadata, None, None, *scales, kind
        )
        return out

    return BoundImplementation(run, w.dtype)


def _isa(uses_amx: bool, head_dim: int) -> str:
    return "amx" if uses_amx else "vec" if head_dim % 32 == 0 else "vec16"


def _fill(ops: Any, case: BenchCase, isa: str, scales: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The page table and the caches of K and V in vLLM's layout, with the keys and values of the case."""
    w, dtype, lens = case.workload, case.q.dtype, case.batch.kv_lens.tolist()
    used = [-(-n // PAGE) for n in lens]
    ids_of_all = torch.randperm(sum(used), generator=torch.Generator().manual_seed(2), device="cpu").int()
    table = torch.zeros(len(lens), max(used), dtype=torch.int32, device="cpu")
    pages = torch.zeros(sum(used), w.kv_heads, PAGE, 2 * w.head_dim, dtype=torch.uint8 if w.format else dtype, device="cpu")
    k_cache, v_cache = pages.view(sum(used), w.kv_heads, 2 * PAGE, w.head_dim).chunk(2, dim=2)
    for row, ids, n, own_pages in zip(table, ids_of_all.split(used), lens, case.page_lists()):
        row[: len(ids)] = ids
        k, v = (x[:n].to(dtype) for x in case.keys_and_values(own_pages))
        at = torch.arange(n, device="cpu")
        slots = row.long()[at // PAGE] * PAGE + at % PAGE
        ops.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots, isa, *scales, FORMATS[w.format])
    return table, k_cache, v_cache


def stream() -> StreamImplementation:
    """The implementation for a stream: its own memory in its own layout, scheduled once a step."""
    from vllm import _custom_ops as ops

    class VllmCpuLayers:
        is_peer = True

        def __init__(self, setup: Setup, fixed: Batch | None = None):
            model, dtype = setup.model, setup.fused.dtype
            if model.page_size != PAGE:
                raise ArgumentError("page_size", model.page_size, f"{PAGE}: vLLM's CPU kernel has no other")
            self.model, self.dtype = model, dtype
            with_amx = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx() and dtype is torch.bfloat16
            self.isa = _isa(with_amx, model.head_dim)
            shape = (setup.pages, model.kv_heads, PAGE, 2 * model.head_dim)
            self.memory = [torch.full(shape, UNWRITTEN, dtype=dtype, device="cpu") for _ in range(model.layers)]
            flat = (setup.pages, model.kv_heads, 2 * PAGE, model.head_dim)
            self.pages = [x.view(flat).chunk(2, dim=2) for x in self.memory]
            self.planned: Planned | None = None
            self.metadata = torch.empty(0, device="cpu")

        def plan(self, planned: Planned) -> None:
            batch, model, self.planned = planned.batch, self.model, planned
            for source, target in batch.copies:
                for memory in self.memory:
                    memory[target] = memory[source]
            self.metadata = ops.cpu_attn_get_scheduler_metadata(
                batch.seqs, model.q_heads, model.kv_heads, model.head_dim, batch.kv_lens, self.dtype, batch.q_starts, True, -1,
                self.isa, True, None, "auto",
            )  # fmt: skip

        def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
            assert self.planned is not None
            (k_pages, v_pages), batch = self.pages[layer], self.planned.batch
            scale, scales = self.model.head_dim**-0.5, (1.0, 1.0)
            ops.cpu_attn_reshape_and_cache(k, v, k_pages, v_pages, self.planned.slots, self.isa, *scales, "auto")
            ops.cpu_attention_with_kv_cache(
                q, k_pages, v_pages, out, batch.q_starts, batch.kv_lens, scale, True, None, -1, batch.page_table, 0.0,
                self.metadata, None, None, *scales, "auto",
            )  # fmt: skip

    return VllmCpuLayers
