"""vLLM's own attention kernel for CPUs, straight: its pages of 32, its layout, its schedule made beforehand and not timed."""

from __future__ import annotations

import torch

from quire.batch import Batch
from quire.bench.case import K_SCALE, V_SCALE, Case
from quire.bench.contestants import Bound, Contestant
from quire.bench.stream.contestants import Contestant as StreamContestant
from quire.bench.stream.setup import UNWRITTEN, Planned, Setup
from quire.errors import ArgumentError

PAGE = 32
FORMATS = {"": "auto", "e4m3fn": "fp8_e4m3", "e5m2": "fp8_e5m2"}


def load(amx: bool) -> Contestant:
    """A contestant: with AMX where this CPU has it, if wanted, and else by vectors."""
    from vllm import _custom_ops as ops

    with_amx = amx and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()

    def contestant(case: Case) -> Bound | None:
        w, q = case.workload, case.q
        if w.operation != "attend" or w.form != "full" or w.format not in FORMATS or w.window is not None:
            return None
        uses_amx = with_amx and q.dtype is torch.bfloat16
        if amx and not uses_amx and torch.cpu._is_amx_tile_supported():
            return None  # the other contestant is the same
        if not amx and not torch.cpu._is_amx_tile_supported():
            return None
        isa = "amx" if uses_amx else "vec" if w.head_dim % 32 == 0 else "vec16"
        kind, scales = FORMATS[w.format], (K_SCALE, V_SCALE) if w.format else (1.0, 1.0)
        lens = case.batch.kv_lens.tolist()
        used = [-(-n // PAGE) for n in lens]
        table = torch.zeros(len(lens), max(used), dtype=torch.int32, device="cpu")
        for row, ids in zip(
            table, torch.randperm(sum(used), generator=torch.Generator().manual_seed(2), device="cpu").int().split(used)
        ):
            row[: len(ids)] = ids
        pages = torch.zeros(sum(used), w.kv_heads, PAGE, 2 * w.head_dim, dtype=torch.uint8 if w.format else q.dtype, device="cpu")
        k_cache, v_cache = pages.view(sum(used), w.kv_heads, 2 * PAGE, w.head_dim).chunk(2, dim=2)
        for row, n, ids in zip(table.long(), lens, case.page_lists()):
            k, v = (x[:n].to(q.dtype) for x in case.keys_and_values(ids))
            at = torch.arange(n, device="cpu")
            ops.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, row[at // PAGE] * PAGE + at % PAGE, isa, *scales, kind)
        starts, kv_lens, out = case.batch.q_starts, case.batch.kv_lens, case.out()
        plan = ops.cpu_attn_get_scheduler_metadata(
            len(lens), w.q_heads, w.kv_heads, w.head_dim, kv_lens, q.dtype, starts, True, -1, isa, True, None, kind
        )
        scale = w.head_dim**-0.5

        def run() -> torch.Tensor:
            ops.cpu_attention_with_kv_cache(
                q, k_cache, v_cache, out, starts, kv_lens, scale, True, None, -1, table, 0.0, plan, None, None, *scales, kind
            )
            return out

        return Bound(run, w.dtype)

    return contestant


def stream() -> StreamContestant:
    """The contestant of a stream: its own memory in its own layout, its schedule made once a step."""
    from vllm import _custom_ops as ops

    class Layers:
        is_peer = True

        def __init__(self, setup: Setup, fixed: Batch | None = None):
            model, dtype = setup.model, setup.fused.dtype
            if model.page_size != PAGE:
                raise ArgumentError("page_size", model.page_size, f"{PAGE}: vLLM's CPU kernel has no other")
            self.model, self.dtype = model, dtype
            with_amx = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx() and dtype is torch.bfloat16
            self.isa = "amx" if with_amx else "vec" if model.head_dim % 32 == 0 else "vec16"
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

    return Layers
