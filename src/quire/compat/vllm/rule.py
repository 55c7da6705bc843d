"""`use_rocm_custom_paged_attention`: whether vLLM's ROCm kernel computes the decode sequences, by the rules in
`quire.compat.vllm_rule`."""

from __future__ import annotations

import torch

from quire.compat.vllm.translation import operator
from quire.compat.vllm_rule import VllmCall, explain_vllm
from quire.errors import ArgumentError
from quire.platform import Platform
from quire.problem import dtype_name


@operator()
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
    """Whether vLLM would run `paged_attention_rocm` and it would work. If vLLM's rule selects it and it then raises or traps (other
    gfx9, gfx1250, e5m2 caches), the result is False.

    `rule` and `platform` are not vLLM's: rule='2025-11' applies the rule of November 2025, and platform= any other machine."""
    if gqa_ratio < 1:
        raise ArgumentError("gqa_ratio", gqa_ratio, "1 or more query heads a key head")
    if dtype_name(qtype) not in ("fp16", "bf16", "fp32"):
        return False
    # As in vLLM: neither None nor -1 means that there is no window.
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
