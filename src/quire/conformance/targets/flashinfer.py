"""FlashInfer's paged wrappers: one for decode sequences, one for any mix of lengths."""

from __future__ import annotations

import math
from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.runner.target import Target
from quire.conformance.targets.peer import Rules, View, cannot_view, peer

WORKSPACE = 1 << 29
"""Bytes for partial results."""
RULES: Rules = {
    "queries in fp16 or bf16": lambda p: p.q_dtype in ("fp16", "bf16"),
    "a cache of the type of q, or fp8": lambda p: p.format in (p.q_dtype, "e4m3fn", "e5m2"),
    "one scale per tensor": lambda p: p.scales in ("none", "tensor"),
    "head_dim of 64, 128, 256 or 512": lambda p: p.head_dim in (64, 128, 256, 512),
    "v_head_dim equal to head_dim": lambda p: p.v_head_dim == p.head_dim,
    "int32 indices": lambda p: p.index == "int32",
    "one causality for all sequences": lambda p: p.causal != "per-sequence",
    "windows to the left": lambda p: p.causal == "yes" or p.window[1] is None,
}
DECODE_RULES: Rules = {**RULES, "windows to the left": lambda p: True}
"""A sequence of one new token has no key to the right of its query."""


def target(name: str, device: str | None) -> Target:
    import flashinfer

    where = device or "cuda"
    decode = name.endswith("decode")
    buffers: dict[str, torch.Tensor] = {}

    def run(call: View) -> None:
        if "workspace" not in buffers:
            buffers["workspace"] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=call.device)
        plan_and_run(flashinfer, call, buffers["workspace"], decode)

    def cannot(call: KernelCall) -> str | None:
        if decode and not bool((call.q_starts.diff() == 1).all()):
            return "sequences with other than one new token"
        if call.live < call.tokens and decode:
            return "padding rows"
        return cannot_view(call)

    rules = DECODE_RULES if decode else RULES
    takes = "window softcap causal lse k_scale v_scale"
    return peer(name, run, where, takes=takes, rules=rules, cannot=cannot, version=flashinfer.__version__)


def plan_and_run(flashinfer: Any, call: View, workspace: torch.Tensor, decode: bool) -> None:
    """Plans and runs one call."""
    k, v = call.token_major
    counts = -(-call.kv_lens.long() // call.page_size)
    lists = [call.page_table[seq, : int(count)] for seq, count in enumerate(counts.tolist())]
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    last = torch.where(call.kv_lens > 0, (call.kv_lens - 1) % call.page_size + 1, 0).to(torch.int32)
    pages = (starts, torch.cat(lists), last)
    heads = (call.q_heads, call.kv_heads, call.q.shape[2], call.page_size)
    left = -1 if call.window[0] is None else call.window[0]
    how = {
        "window_left": left,
        "logits_soft_cap": call.softcap,
        "sm_scale": call.scale,
        "q_data_type": call.q.dtype,
        "kv_data_type": k.dtype,
    }
    if decode:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*pages, *heads, **how)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(call.q_starts, *pages, *heads, causal=call.causal, **how)
    scales = {} if call.k_scale is None else {"k_scale": float(call.k_scale), "v_scale": float(call.v_scale)}
    result = wrapper.run(call.q[: call.live], (k, v), out=call.out[: call.live], return_lse=call.lse is not None, **scales)
    if call.lse is not None:
        call.lse[: call.live] = result[1] * math.log(2.0)  # FlashInfer returns base 2
