"""vLLM's own attention kernel for CPUs, straight: its pages of 32, its layout, its schedule made beforehand and not timed."""

from __future__ import annotations

import torch

from quire.bench.case import K_SCALE, V_SCALE, Case
from quire.bench.contestants import Bound, Contestant

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
