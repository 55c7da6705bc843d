"""`torch.nn.attention.varlen`: attention of ragged batches, since torch 2.12 also with a page table."""

from __future__ import annotations

import torch

from quire.conformance.runner.target import Target
from quire.conformance.targets.peer import Rules, View, cannot_view, peer

GPU = "a GPU: torch has no CPU kernel for it"
RULES: Rules = {
    GPU: lambda p: p.device == "cuda",
    "queries in fp16 or bf16, and a cache of the same type": lambda p: p.q_dtype in ("fp16", "bf16") and p.format == p.q_dtype,
    "head_dim up to 256, in multiples of 8": lambda p: p.head_dim <= 256 and p.head_dim % 8 == 0,
    "v_head_dim equal to head_dim": lambda p: p.v_head_dim == p.head_dim,
    "int32 indices": lambda p: p.index == "int32",
    "one causality for all sequences": lambda p: p.causal != "per-sequence",
}


def target(name: str, device: str | None) -> Target:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    if "block_table" not in varlen_attn.__annotations__:
        raise ImportError(f"torch {torch.__version__}: varlen_attn takes a page table since torch 2.12")

    def run(call: View) -> None:
        k, v = call.token_major
        result = varlen_attn(
            call.q[: call.live],
            k,
            v,
            call.q_starts,
            None,
            call.max_q,
            call.max_kv,
            return_aux=AuxRequest(lse=True) if call.lse is not None else None,
            scale=call.scale,
            window_size=call.sides,
            enable_gqa=True,
            seqused_k=call.kv_lens,
            block_table=call.page_table,
        )
        call.out[: call.live] = result if call.lse is None else result[0]
        if call.lse is not None:
            call.lse[: call.live] = result[1].T if result[1].shape[0] == call.q_heads else result[1]

    takes, version = "window causal lse", torch.__version__
    return peer(name, run, device or "cuda", takes=takes, rules=RULES, cannot=cannot_view, refuses=True, version=version)
