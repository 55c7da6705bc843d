"""vLLM's mixed-batch operators, and Quire's under the same names and signatures."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

import quire
from quire.conformance.cases.call import KernelCall
from quire.conformance.runner.target import Target
from quire.conformance.targets.peer import Rules, View, cannot_repack, cannot_view, peer, release, scale_of

MODULES = {
    "vllm.chunked_prefill_paged_decode": "vllm.v1.attention.ops.chunked_prefill_paged_decode",
    "vllm.context_attention_fwd": "vllm.v1.attention.ops.prefix_prefill",
    "vllm.unified_attention": "vllm.v1.attention.ops.triton_unified_attention",
}
CACHE_WORDS = {"e4m3fn": "fp8", "e5m2": "fp8_e5m2"}
"""vLLM's names for the 8-bit formats. fp8 is the platform's e4m3, which is e4m3fn except on gfx94x."""
LEAST_PROGRAMS, SEGMENTS = 128, 16
"""vLLM splits sequences into segments below this number of programs, and the number of segments."""

_SAME_TYPE = {"a cache of the type of q, or fp8": lambda p: p.format in (p.q_dtype, *CACHE_WORDS)}
_PAIR_RULES: Rules = {
    "queries in fp16, bf16 or fp32": lambda p: p.q_dtype in ("fp16", "bf16", "fp32"),
    **_SAME_TYPE,
    "one scale per tensor": lambda p: p.scales in ("none", "tensor"),
    "v_head_dim equal to head_dim": lambda p: p.v_head_dim == p.head_dim,
    "one causality for all sequences": lambda p: p.causal != "per-sequence",
    "windows to the left": lambda p: p.causal == "yes" or p.window[1] is None,
}
_UPSTREAM_RULES: Rules = {**_PAIR_RULES, "ALiBi without sinks": lambda p: not (p.alibi and p.sinks)}
_UPSTREAM_MIXED_RULES: Rules = {**_UPSTREAM_RULES, "page_size of 16 or more, its smallest tile": lambda p: p.page_size >= 16}
_UNIFIED_RULES: Rules = {
    "queries in fp16, bf16, fp32 or e4m3": lambda p: p.q_dtype in ("fp16", "bf16", "fp32", "e4m3fn"),
    "a cache of the type of q, fp8 or int8": lambda p: p.format in (p.q_dtype, "int8", *CACHE_WORDS),
    "one scale per tensor, or per token and head": lambda p: p.scales != "head",
    "int8 with a scale per token": lambda p: p.format != "int8" or p.scales == "token",
    "v_head_dim equal to head_dim": lambda p: p.v_head_dim == p.head_dim,
    "head_dim of 32 or more": lambda p: p.head_dim >= 32,
    "page_size in multiples of 16": lambda p: p.page_size % 16 == 0,
    "symmetric windows unless causal": lambda p: p.causal == "yes" or p.window[0] == p.window[1],
}


def target(name: str, device: str | None) -> Target:
    operator = name.rpartition(".")[2]
    ours = name.startswith("quire.")
    module = import_module("quire.compat.vllm" if ours else MODULES[name])
    where = device or ("cuda" if not ours or torch.cuda.is_available() else "cpu")
    version = quire.__version__ if ours else release("vllm", module)
    make = _unified if operator == "unified_attention" else _pair
    return make(name, getattr(module, operator), where, version)


def _pair(name: str, function: Callable[..., Any], device: str, version: str) -> Target:
    """The two operators that take new tokens as arguments, and a cache of x-packed pages. New tokens are passed as arguments also
    if they are in the cache, as vLLM's backend does."""
    mixed = name.endswith("chunked_prefill_paged_decode")

    def run(call: View) -> None:
        k, v = call.x_packed
        key, value = call.new_tokens
        left, _ = call.window
        function(
            call.q,
            key,
            value,
            call.out,
            CACHE_WORDS.get(call.format, "auto"),
            k,
            v,
            call.page_table,
            call.q_starts,
            call.kv_lens,
            call.max_kv,
            call.max_q,
            scale_of(call.k_scale, call.device),
            scale_of(call.v_scale, call.device),
            alibi_slopes=call.alibi,
            sliding_window=None if left is None else left + 1,
            sm_scale=call.scale,
            sinks=call.sinks,
            causal=call.causal,
        )

    def cannot(call: KernelCall) -> str | None:
        if mixed and call.new is not None and bool((call.q_starts.diff() == 1).any()):
            return "context form with a sequence of one new token, which it reads from the cache"
        if bool((call.q_starts.diff() > call.kv_lens).any()):
            return "sequences with more new tokens than keys"
        head_dim = call.q.shape[2]
        if head_dim % (16 // call.k_pages.element_size()):
            return f"head_dim {head_dim} has no x-packed layout"
        return cannot_repack(call)

    takes = "window alibi sinks causal k_scale v_scale new_k new_v"
    rules = _PAIR_RULES if name.startswith("quire.") else _UPSTREAM_MIXED_RULES if mixed else _UPSTREAM_RULES
    return peer(name, run, device, takes=takes, rules=rules, cannot=cannot, version=version)


def _unified(name: str, function: Callable[..., Any], device: str, version: str) -> Target:
    """The operator that reads everything from the cache, with the segment buffers that vLLM's backend passes for small batches."""

    def run(call: View) -> None:
        k, v = call.token_major
        heads, dim, where = call.q_heads, call.q.shape[2], call.device
        per_token = call.k_scale is not None and call.k_scale.dim() == 3
        most = max(LEAST_PROGRAMS // call.kv_heads, 1)
        buffer = (most, heads, SEGMENTS)
        left, right = call.sides
        function(
            q=call.q,
            k=k,
            v=v,
            out=call.out,
            cu_seqlens_q=call.q_starts,
            max_seqlen_q=call.max_q,
            seqused_k=call.kv_lens,
            max_seqlen_k=call.max_kv,
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=(left, right),
            block_table=call.page_table,
            softcap=call.softcap or 0.0,
            q_descale=None if call.q_scale is None else torch.full((), call.q_scale, device=where),
            k_descale=None if per_token else scale_of(call.k_scale, where).expand(call.seqs, call.kv_heads),
            v_descale=None if per_token else scale_of(call.v_scale, where).expand(call.seqs, call.kv_heads),
            seq_threshold_3D=most,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=torch.zeros(*buffer, 1 << (dim - 1).bit_length(), device=where),
            softmax_segm_max=torch.zeros(buffer, device=where),
            softmax_segm_expsum=torch.zeros(buffer, device=where),
            alibi_slopes=call.alibi,
            sinks=call.sinks,
            kv_quant_mode=2 if call.format == "int8" else 3 if per_token else 1 if call.k_scale is not None else 0,
            k_scale_cache=call.k_scale if per_token else None,
            v_scale_cache=call.v_scale if per_token else None,
        )

    takes = "window softcap alibi sinks causal k_scale v_scale q_scale"
    return peer(name, run, device, takes=takes, rules=_UNIFIED_RULES, cannot=cannot_view, version=version)
