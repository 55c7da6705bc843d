"""vLLM's question whether its own ROCm kernel takes the decode rows, answered from the rules in `quire.dispatch.vllm`."""

from __future__ import annotations

import torch

from quire.dispatch.vllm import VllmCall, explain_vllm
from quire.errors import ArgumentError
from quire.platform import Platform
from quire.problem import dtype_name


def use_rocm_custom_paged_attention(
    qtype: torch.dtype,
    head_size: int,
    block_size: int,
    gqa_ratio: int,
    max_seq_len: int,
    sliding_window: int | tuple[int, int] | None,
    kv_cache_dtype: str,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    rule: str = "today",
    platform: Platform | None = None,
) -> bool:
    """Whether vLLM would run `paged_attention_rocm` and it would work: where upstream's rule selects it and it then raises or traps
    (other gfx9, gfx1250, e5m2 caches), the answer is no.

    `rule` and `platform` are not vLLM's: 'seeds' asks the rule of November 2025, and another platform may be asked about."""
    if gqa_ratio < 1:
        raise ArgumentError("gqa_ratio", gqa_ratio, "1 or more query heads a key head")
    if dtype_name(qtype) not in ("fp16", "bf16", "fp32"):
        return False
    # As upstream: neither None nor -1 says that there is no window.
    no_window = sliding_window in (0, (-1, -1))
    call = VllmCall(
        Platform.detect() if platform is None else platform,
        q_heads=gqa_ratio,
        kv_heads=1,
        head_size=head_size,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        q_dtype=dtype_name(qtype),
        max_seq_len=max(1, max_seq_len),
        sliding_window=0 if no_window else 1,
        alibi=alibi_slopes is not None,
        sinks=sinks is not None,
    )
    decision = explain_vllm(call, rule)
    return decision.selected == "custom" and decision.outcome == "runs"
