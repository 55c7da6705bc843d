"""FlashAttention 2 and 3 over a page table, through vLLM's build of both or through the flash_attn package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.conformance.runner.target import Target
from quire.conformance.targets.peer import Rules, View, cannot_view, peer, release

_RULES: Rules = {
    "head_dim up to 256, in multiples of 8": lambda p: p.head_dim <= 256 and p.head_dim % 8 == 0,
    "v_head_dim equal to head_dim": lambda p: p.v_head_dim == p.head_dim,
    "int32 indices": lambda p: p.index == "int32",
    "one causality for all sequences": lambda p: p.causal != "per-sequence",
}
RULES: dict[int, Rules] = {
    2: {
        **_RULES,
        "queries in fp16 or bf16, and a cache of the same type": lambda p: p.q_dtype in ("fp16", "bf16") and p.format == p.q_dtype,
        "page_size in multiples of 16": lambda p: p.page_size % 16 == 0,
    },
    3: {
        **_RULES,
        "queries in fp16, bf16 or e4m3, and a cache of the same type": lambda p: (
            p.q_dtype in ("fp16", "bf16", "e4m3fn") and p.format == p.q_dtype
        ),
        "one scale per tensor or per head": lambda p: p.scales != "token",
    },
}
UPSTREAM_RULES: Rules = {**RULES[2], "page_size in multiples of 256": lambda p: p.page_size % 256 == 0}
TAKES = {2: "window softcap alibi causal lse", 3: "window softcap causal lse k_scale v_scale q_scale"}


def target(name: str, device: str | None) -> Target:
    wanted = {"flash_attn": None, "flash_attn.fa2": 2, "flash_attn.fa3": 3}[name]
    try:
        from vllm.vllm_flash_attn import flash_attn_interface as interface
    except ImportError:
        if wanted == 3:
            raise
        return _upstream(name, device)
    version = wanted or (3 if interface.is_fa_version_supported(3) else 2)
    if not interface.is_fa_version_supported(version):
        raise ImportError(interface.fa_version_unsupported_reason(version))
    built = f"FA{version} of vllm {release('vllm', interface)}"
    return built_by_vllm(name, interface.flash_attn_varlen_func, version, device or "cuda", built)


def built_by_vllm(name: str, function: Callable[..., Any], version: int, device: str, built: str) -> Target:
    def run(call: View) -> None:
        k, v = call.token_major
        scales = {}
        if call.k_scale is not None:
            q_scale = torch.full((), call.q_scale or 1.0, device=call.device)
            by_name = {"q_descale": q_scale, "k_descale": call.k_scale, "v_descale": call.v_scale}
            scales = {key: scale.expand(call.seqs, call.kv_heads) for key, scale in by_name.items()}
        result = function(
            q=call.q[: call.live],
            k=k,
            v=v,
            out=call.out[: call.live],
            cu_seqlens_q=call.q_starts,
            max_seqlen_q=call.max_q,
            seqused_k=call.kv_lens,
            max_seqlen_k=call.max_kv,
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=list(call.sides),
            softcap=call.softcap or 0.0,
            alibi_slopes=call.alibi,
            block_table=call.page_table,
            return_softmax_lse=call.lse is not None,
            fa_version=version,
            **scales,
        )
        if call.lse is not None:
            call.lse[: call.live] = result[1].T  # FlashAttention returns [heads, tokens]

    takes, rules = TAKES[version], RULES[version]
    return peer(name, run, device, takes=takes, rules=rules, cannot=cannot_view, refuses=True, version=built)


def _upstream(name: str, device: str | None) -> Target:
    """The flash_attn package: FlashAttention 2 with pages in multiples of 256."""
    import flash_attn

    def run(call: View) -> None:
        k, v = call.token_major
        starts = torch.nn.functional.pad(call.kv_lens.cumsum(0), (1, 0)).to(torch.int32)
        result = flash_attn.flash_attn_varlen_func(
            call.q[: call.live],
            k,
            v,
            call.q_starts,
            starts,
            call.max_q,
            call.max_kv,
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=call.sides,
            softcap=call.softcap or 0.0,
            alibi_slopes=call.alibi,
            return_attn_probs=call.lse is not None,
            block_table=call.page_table,
        )
        call.out[: call.live] = result[0] if call.lse is not None else result
        if call.lse is not None:
            call.lse[: call.live] = result[1].T

    version = flash_attn.__version__
    return peer(
        name, run, device or "cuda", takes=TAKES[2], rules=UPSTREAM_RULES, cannot=cannot_view, refuses=True, version=version
    )
