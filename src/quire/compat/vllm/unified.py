"""`unified_attention`: sequences of any query length over token-major caches that hold every token."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import torch

from quire.cache.format import format_of
from quire.cache.kv_cache import KVCache, Scale
from quire.compat.vllm.attention import attend, batch_of
from quire.compat.vllm.caches import E4M3, number, platform_fp8, wrap
from quire.compat.vllm.translation import operator
from quire.compat.vllm.tree import check_bias, tree_mask
from quire.errors import ArgumentError, describe
from quire.options import Options
from quire.problem import is_fp8


class KVQuantMode(IntEnum):
    """vLLM's enumeration of cache quantisation."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5
    TURBOQUANT_K8V4 = 6
    TURBOQUANT_4BIT_NC = 7
    TURBOQUANT_K3V4_NC = 8
    TURBOQUANT_3BIT_NC = 9


FP8_TYPES = (torch.uint8, *E4M3, torch.float8_e5m2)
STORAGE: dict[KVQuantMode, tuple[torch.dtype, ...]] = {
    KVQuantMode.NONE: (torch.float32, torch.float16, torch.bfloat16, *FP8_TYPES[1:]),
    KVQuantMode.FP8_PER_TENSOR: FP8_TYPES,
    KVQuantMode.INT8_PER_TOKEN_HEAD: (torch.int8,),
    KVQuantMode.FP8_PER_TOKEN_HEAD: FP8_TYPES,
}
"""The supported modes, and the storage types of their caches."""


@operator(
    {
        "q": "q",
        "out": "out",
        "kv_lens": "seqused_k",
        "q_starts": "cu_seqlens_q",
        "max_q_len": "max_seqlen_q",
        "max_kv_len": "max_seqlen_k",
        "window": "window_size",
        "scale": "softmax_scale",
        "k_pages": "k",
        "v_pages": "v",
        "k_scale": "k_descale",
        "v_scale": "v_descale",
    }
)
def unified_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool | torch.Tensor,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
    softcap: float | None,
    q_descale: Scale,
    k_descale: Scale,
    v_descale: Scale,
    seq_threshold_3D: int | None = None,
    num_par_softmax_segments: int | None = None,
    softmax_segm_output: torch.Tensor | None = None,
    softmax_segm_max: torch.Tensor | None = None,
    softmax_segm_expsum: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    output_scale: Scale = None,
    qq_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    mm_prefix_range: torch.Tensor | None = None,
    rswa_prefix_lens: torch.Tensor | None = None,
    rswa_window: int | None = None,
    use_alibi_sqrt: bool = False,
    kv_quant_mode: int = KVQuantMode.NONE,
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
    chunk_lookback: int = -1,
    use_td: bool = False,
    mm_prefix_clamp_sliding_window: bool = False,
) -> None:
    """Writes `out`: attention of `q` over the caches `k` and `v` [blocks, block_size, kv_heads, head_size], which hold all tokens
    of every sequence. `window_size[0]` keys before a query's own are visible, and as many after it if `causal` is False; all if it
    is negative. The buffers for split KV (`softmax_segm_*`), their number and `use_td` are accepted and not used."""
    window = _window(window_size)
    causal = causal.bool() if isinstance(causal, torch.Tensor) else bool(causal)
    _check_supported(window, rswa_prefix_lens, rswa_window, chunk_lookback)
    _check_alibi(alibi_slopes, use_alibi_sqrt, causal is not True or mm_prefix_range is not None)
    cache = cache_of(k, v, kv_quant_mode, k_descale, v_descale, k_scale_cache, v_scale_cache)
    batch = batch_of(block_table, seqused_k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    tree: dict[str, Any] = {"window": window, "causal": causal}
    if batch.seqs and (qq_bias is not None or mm_prefix_range is not None):
        _check_ranges(mm_prefix_range, batch.seqs, window is None or mm_prefix_clamp_sliding_window)
        batch = batch if qq_bias is None else check_bias(qq_bias, batch)
        mask, positions = tree_mask(batch, q.shape[0], causal, window, qq_bias, mm_prefix_range)
        needs_positions = window is not None or alibi_slopes is not None
        tree = {"window": None if window is None else (window - 1, None), "mask": mask}
        tree["positions"] = positions if needs_positions else None
    scales: dict[str, Any] = {"q_scale": _q_scale(q, q_descale), "out_scale": number("out_scale", output_scale)}
    options = Options(softcap=_softcap(softcap), alibi=alibi_slopes, sinks=sinks, scale=softmax_scale, **tree, **scales)
    attend(q, cache, batch, options, None, out)


def _check_supported(
    window: int | None, rswa_prefix_lens: torch.Tensor | None, rswa_window: int | None, chunk_lookback: int
) -> None:
    """Rejects the windows that `Options` cannot express."""
    if rswa_window is not None and rswa_prefix_lens is not None:
        raise ArgumentError("rswa_window", rswa_window, "None: a window with a prefix that stays visible is not supported")
    if chunk_lookback > -1 and window is not None:
        raise ArgumentError("chunk_lookback", chunk_lookback, "-1: windows of aligned chunks are not supported")


def _check_alibi(alibi_slopes: torch.Tensor | None, use_alibi_sqrt: bool, sees_later_keys: bool) -> None:
    if alibi_slopes is not None and use_alibi_sqrt:
        raise ArgumentError("use_alibi_sqrt", True, "False: only linear ALiBi is supported")
    if alibi_slopes is not None and sees_later_keys:
        allowed = "None if queries see later keys: vLLM's ALiBi raises the logits of such keys, Quire's lowers them"
        raise ArgumentError("alibi_slopes", describe(alibi_slopes), allowed)


def cache_of(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_quant_mode: int,
    k_descale: Scale,
    v_descale: Scale,
    k_scale_cache: torch.Tensor | None,
    v_scale_cache: torch.Tensor | None,
) -> KVCache:
    """The cache of a quantisation mode: with one scale, or one for each token and head."""
    for name, cache in (("k", k), ("v", v)):
        if not isinstance(cache, torch.Tensor):
            raise ArgumentError(name, describe(cache), "a tensor [blocks, block_size, kv_heads, head_size]")
    if kv_quant_mode not in STORAGE:
        raise ArgumentError("kv_quant_mode", describe(kv_quant_mode), ", ".join(f"{mode.name} ({mode:d})" for mode in STORAGE))
    mode = KVQuantMode(kv_quant_mode)
    if k.dtype not in STORAGE[mode]:
        allowed = ", ".join(str(dtype) for dtype in STORAGE[mode])
        raise ArgumentError("kv_quant_mode", f"{mode.name} over {k.dtype} storage", f"storage of {allowed}")
    format = platform_fp8(k.device) if k.dtype is torch.uint8 else format_of(k.dtype)
    if mode in (KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD):
        for name, scales in (("k_scale_cache", k_scale_cache), ("v_scale_cache", v_scale_cache)):
            if not isinstance(scales, torch.Tensor) or tuple(scales.shape) != tuple(k.shape[:3]):
                raise ArgumentError(name, describe(scales), f"float32 [blocks, block_size, kv_heads] = {list(k.shape[:3])}")
        return wrap("nhd", k, v, format, k_scale_cache, v_scale_cache)
    if not format.quantised:
        return wrap("nhd", k, v, format, None, None)
    return wrap("nhd", k, v, format, _per_head("k_descale", k_descale), _per_head("v_descale", v_descale))


def _window(window_size: tuple[int, int]) -> int | None:
    """The number of keys that a query sees, including its own; None for all."""
    if len(window_size) != 2 or not all(isinstance(side, int) for side in window_size):
        raise ArgumentError("window_size", describe(window_size), "a pair of ints, (-1, -1) for no window")
    return 1 + window_size[0] if window_size[0] >= 0 else None


def _softcap(softcap: float | None) -> float | None:
    """0 or less means no cap, as in vLLM; NaN is rejected."""
    if softcap is not None and math.isnan(softcap):
        raise ArgumentError("softcap", softcap, "a number, 0 or None for no cap")
    return softcap if softcap is not None and softcap > 0 else None


def _per_head(name: str, descale: Scale) -> Scale:
    """A scale for all, or one for each kv head: [seqs, kv_heads] has the same for every sequence, as all share the cache."""
    if not isinstance(descale, torch.Tensor) or descale.numel() == 1 or not any(descale.stride()):
        return number(name, descale)
    if descale.dim() == 2 and len(descale):
        if descale.device.type == "cpu" and not torch.equal(descale, descale[:1].expand_as(descale)):
            raise ArgumentError(name, "scales that differ between sequences", "one for each kv head at most")
        return descale[0]
    return descale


def _q_scale(q: torch.Tensor, q_descale: Scale) -> Scale:
    """The scale of fp8 queries; None for other queries, even if one is passed."""
    if not is_fp8(q.dtype):
        return None
    return 1.0 if q_descale is None else number("q_scale", q_descale)


def _check_ranges(ranges: torch.Tensor | None, seqs: int, supported: bool) -> None:
    if ranges is None:
        return
    if not isinstance(ranges, torch.Tensor) or ranges.dim() != 3 or (ranges.shape[0], ranges.shape[2]) != (seqs, 2):
        raise ArgumentError("mm_prefix_range", describe(ranges), f"[seqs, ranges, 2] with seqs = {seqs}")
    if not supported:
        allowed = "None with a window, unless mm_prefix_clamp_sliding_window: a range that extends the window is not supported"
        raise ArgumentError("mm_prefix_range", describe(ranges), allowed)
