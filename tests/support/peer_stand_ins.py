"""Stand-ins for the libraries that the benchmark compares with: each has the parameters and the conventions of its library and
computes with `quire.attend`, so that a wrong argument is a wrong result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import quire


def chunked_prefill_paged_decode(
    query: Any, key: Any, value: Any, output: Any, kv_cache_dtype: Any, key_cache: Any, value_cache: Any, block_table: Any,
    query_start_loc: Any, seq_lens: Any, max_seq_len: int, max_query_len: int, k_scale: Any, v_scale: Any, alibi_slopes: Any = None,
    sliding_window: Any = None, sm_scale: Any = None, output_scale: Any = None, sinks: Any = None, is_block_table_ptr: bool = False,
    causal: bool = True,
) -> None:  # fmt: skip
    fp8 = kv_cache_dtype == "fp8"
    assert fp8 or kv_cache_dtype == "auto"
    assert fp8 == (key_cache.dtype is torch.float8_e4m3fn)
    assert key_cache.dim() == 5 and key_cache.shape[4] * key_cache.dtype.itemsize == 16
    scales = {"k_scale": k_scale, "v_scale": v_scale} if fp8 else {}
    cache = quire.KVCache.wrap(key_cache, value_cache, layout="vllm_x", **scales)
    batch = quire.Batch(block_table, seq_lens, query_start_loc)
    assert (max_seq_len, max_query_len) == (int(seq_lens.max()), int(query_start_loc.diff().max()))
    options = quire.Options(window=sliding_window or None, scale=sm_scale, alibi=alibi_slopes, sinks=sinks)
    # Long rows take their new tokens from key and value, the others from the cache.
    full, context = (quire.attend(query, cache, batch, options, new=new) for new in (None, (key, value)))
    long = query_start_loc.diff().repeat_interleave(query_start_loc.diff().long()) > 1
    output.copy_(torch.where(long[:, None, None], context, full))


def unified_attention(
    q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, max_seqlen_q: int, seqused_k: Any, max_seqlen_k: int, softmax_scale: float,
    causal: Any, window_size: Any, block_table: Any, softcap: float, q_descale: Any, k_descale: Any, v_descale: Any,
    seq_threshold_3D: int, num_par_softmax_segments: int, softmax_segm_output: Any, softmax_segm_max: Any, softmax_segm_expsum: Any,
    alibi_slopes: Any = None, output_scale: Any = None, qq_bias: Any = None, sinks: Any = None, kv_quant_mode: int = 0,
) -> None:  # fmt: skip
    assert q_descale is None and k.shape[1] % 16 == 0
    assert k_descale.shape == v_descale.shape == (seqused_k.shape[0], k.shape[2])
    assert seq_threshold_3D == 128 // k.shape[2] and num_par_softmax_segments == 16
    padded = 1 << (q.shape[2] - 1).bit_length()
    assert softmax_segm_output.shape == (seq_threshold_3D, q.shape[1], 16, padded)
    assert softmax_segm_max.shape == softmax_segm_expsum.shape == softmax_segm_output.shape[:3]
    assert softmax_segm_output.dtype is torch.float32
    assert (max_seqlen_k, max_seqlen_q) == (int(seqused_k.max()), int(cu_seqlens_q.diff().max()))
    assert (kv_quant_mode == 1) == (k.dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
    scales = {"k_scale": k_descale[0, 0], "v_scale": v_descale[0, 0]} if kv_quant_mode else {}
    window = 1 + window_size[0] if window_size[0] >= 0 else None
    options = {"softcap": softcap or None, "alibi": alibi_slopes, "sinks": sinks, "causal": causal}
    cache = quire.KVCache.wrap(k, v, layout="nhd", **scales)
    batch = quire.Batch(block_table, seqused_k, cu_seqlens_q)
    out.copy_(quire.attend(q, cache, batch, quire.Options(window=window, scale=softmax_scale, **options)))


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int, cache_seqlens: Any,
    qkv_dtype: Any = torch.bfloat16, headdim_v: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None,
    cache_leftpad: Any = None, page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False,
    window_size: Any = (-1, -1), has_softcap: bool = False, num_splits: int = 0, pack_gqa: Any = None, sm_margin: int = 0,
) -> Any:  # fmt: skip
    assert cache_seqlens.shape == (batch_size,) and cu_seqlens_q.shape == (batch_size + 1,)
    sizes = (batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim_v or headdim, qkv_dtype, page_size)
    return (*sizes, causal, *window_size, has_softcap, num_splits)


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, max_seqlen_q: int, cu_seqlens_q: Any, max_seqlen_k: int, cu_seqlens_k: Any = None,
    seqused_k: Any = None, q_v: Any = None, softmax_scale: Any = None, causal: bool = False, window_size: Any = None,
    softcap: float = 0.0, block_table: Any = None, out: Any = None, scheduler_metadata: Any = None, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, num_splits: int = 0, fa_version: int = 2, s_aux: Any = None,
) -> Any:  # fmt: skip
    assert fa_version == 3 and causal and isinstance(window_size, list)
    assert q.dtype is k.dtype is v.dtype, "FlashAttention-3 takes one type"
    assert q.shape[2] <= 256 and block_table.dtype is seqused_k.dtype is cu_seqlens_q.dtype is torch.int32
    sizes = (q.shape[1], k.shape[2], q.shape[2], v.shape[3], q.dtype, k.shape[1])
    known = (block_table.shape[0], max_seqlen_q, max_seqlen_k, *sizes, causal, *window_size, softcap > 0, num_splits)
    assert scheduler_metadata == known
    assert (max_seqlen_k, max_seqlen_q) == (int(seqused_k.max()), int(cu_seqlens_q.diff().max()))
    assert s_aux is None or (s_aux.dtype is torch.bfloat16 and s_aux.shape == (q.shape[1],))
    scales = {}
    how = {"window": window_size[0] + 1 or None, "softcap": softcap or None, "scale": softmax_scale, "sinks": s_aux}
    if q.dtype is torch.float8_e4m3fn:
        assert q_descale.shape == k_descale.shape == v_descale.shape == (block_table.shape[0], k.shape[2])
        scales = {"k_scale": k_descale[0, 0], "v_scale": v_descale[0, 0]}
        how["q_scale"] = float(q_descale[0, 0])
    batch = quire.Batch(block_table, seqused_k, cu_seqlens_q)
    if q_v is not None:
        assert (q.shape[2], v.shape[3]) == (64, 512) and q_v.dtype is q.dtype
        cache = quire.KVCache.wrap(torch.cat((v, k), 3), layout="nhd", v_in_k=512)
        out.copy_(quire.attend(torch.cat((q_v, q), 2), cache, batch, quire.Options(**how)))
        return out
    cache = quire.KVCache.wrap(k, v, layout="nhd", **scales)
    out.copy_(quire.attend(q, cache, batch, quire.Options(**how)))
    return out


def standard_slopes(heads: int) -> torch.Tensor:
    """FlashInfer's slopes for a power of two."""
    assert heads == 1 << heads.bit_length() - 1
    return (2.0 ** (-8.0 / heads)) ** torch.arange(1, heads + 1)


class Wrapper:
    """FlashInfer's paged wrappers."""

    dims: tuple[int, ...] = (64, 128, 256, 16)

    def __init__(
        self, float_workspace_buffer: Any, kv_layout: str = "NHD", *, backend: str = "auto", use_tensor_cores: bool = False
    ):
        assert float_workspace_buffer.dtype is torch.uint8 and not float_workspace_buffer.any() and kv_layout == "NHD"
        self.tensor_cores, self.backend = use_tensor_cores, backend

    def remember(self, qo: Any, pages: Any, heads: Any, types: Any, **how: Any) -> None:
        assert all(x.dtype is torch.int32 for x in pages), "FlashInfer reads 32-bit indices"
        self.batch = quire.Batch.from_flashinfer(
            kv_indptr=pages[0], kv_indices=pages[1], kv_last_page_len=pages[2], page_size=heads[3], qo_indptr=qo
        )
        self.heads, self.types, self.how = heads, types, how

    def options(self, **more: Any) -> quire.Options:
        how = self.how
        alibi = standard_slopes(self.heads[0]) if how.get("pos_encoding_mode") == "ALIBI" else None
        return quire.Options(
            window=how["window_left"] + 1 or None,
            softcap=how.get("logits_soft_cap"),
            scale=how.get("sm_scale"),
            alibi=alibi,
            **more,
        )

    def run(self, q: Any, paged_kv_cache: Any, *args: Any, k_scale: Any = None, v_scale: Any = None, out: Any = None) -> Any:
        k, v = paged_kv_cache
        assert self.types == (q.dtype, k.dtype) and not args
        assert self.heads == (q.shape[1], k.shape[2], q.shape[2], k.shape[1])
        assert self.heads[2] in self.dims or (self.heads[2] == 512 and not self.tensor_cores and self.backend == "decode")
        scales = {} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}
        cache = quire.KVCache.wrap(k, v, layout="nhd", **scales)
        if self.how.get("custom_mask") is not None:
            out.copy_(self.masked(q, cache))
        else:
            out.copy_(quire.attend(q, cache, self.batch, self.options()))
        return out

    def masked(self, q: Any, cache: quire.KVCache) -> torch.Tensor:
        """The mask of a sequence is [queries, keys]; sequences follow each other. Causality has no effect."""
        mask, lens, counts, most = (
            self.how["custom_mask"],
            self.batch.kv_lens,
            self.batch.q_starts.diff(),
            int(self.batch.kv_lens.max()),
        )
        assert mask.dtype is torch.bool and self.how["window_left"] == -1 and mask.numel() == int((lens * counts).sum())
        rows, at = [], 0
        for n, length in zip(counts.tolist(), lens.tolist()):
            seen = mask[at : (at := at + n * length)].view(n, length)
            positions = torch.where(seen, torch.arange(length), -1)
            rows.append(torch.nn.functional.pad(positions, (0, most - length), value=-1))
        select = quire.Select(positions=torch.cat(rows)[:, None])
        return quire.attend(q, cache, self.batch.with_select(select), self.options(causal=False))


class DecodeWrapper(Wrapper):
    def __init__(self, *args: Any, **how: Any):
        super().__init__(*args, **how, backend="decode")

    def plan(
        self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        pos_encoding_mode: str = "NONE", window_left: int = -1, logits_soft_cap: Any = None, q_data_type: Any = "float16",
        kv_data_type: Any = None, sm_scale: Any = None,
    ) -> None:  # fmt: skip
        assert self.tensor_cores == (head_dim != 512)
        heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
        how = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left, "logits_soft_cap": logits_soft_cap}
        self.remember(None, (indptr, indices, last_page_len), heads, (q_data_type, kv_data_type), sm_scale=sm_scale, **how)


class PrefillWrapper(Wrapper):
    def plan(
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any, num_qo_heads: int,
        num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: Any = None, custom_mask: Any = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", sm_scale: Any = None, window_left: int = -1, logits_soft_cap: Any = None,
        q_data_type: Any = "float16", kv_data_type: Any = None, fixed_split_size: Any = None,
    ) -> None:  # fmt: skip
        assert causal != (custom_mask is not None)
        assert (head_dim_vo is None and fixed_split_size is None) or self.backend == "fa2"
        self.dims = (*Wrapper.dims, 192) if head_dim_vo == 128 else Wrapper.dims
        how = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left, "logits_soft_cap": logits_soft_cap}
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.remember(qo_indptr, pages, heads, (q_data_type, kv_data_type), sm_scale=sm_scale, custom_mask=custom_mask, **how)


class SinkWrapper(PrefillWrapper):
    def __init__(
        self, workspace: Any, kv_layout: str = "NHD", *, q_data_type: Any = torch.bfloat16, kv_data_type: Any = torch.bfloat16,
        head_dim_qk: int = 128, head_dim_vo: int = 128, window_left: int = -1,
    ):  # fmt: skip
        super().__init__(workspace, kv_layout)
        self.compiled = (q_data_type, kv_data_type, head_dim_qk, window_left)

    def run(self, q: Any, paged_kv_cache: Any, *args: Any, out: Any = None) -> Any:  # type: ignore[override]
        (sinks, scale), (k, v) = args, paged_kv_cache
        assert sinks.dtype is torch.float32 and isinstance(scale, float)
        assert self.compiled == (*self.types, q.shape[2], self.how["window_left"])
        options = quire.Options(window=self.how["window_left"] + 1 or None, sinks=sinks, scale=scale)
        return out.copy_(quire.attend(q, quire.KVCache.wrap(k, v, layout="nhd"), self.batch, options))


class CascadeWrapper:
    """Levels are merged by their LSE; only the last is causal."""

    def __init__(self, num_levels: int, float_workspace_buffer: Any, kv_layout: str = "NHD"):
        assert float_workspace_buffer.dtype is torch.uint8 and kv_layout == "NHD"
        self.count = num_levels

    def plan(
        self, qo_indptr_arr: Any, paged_kv_indptr_arr: Any, paged_kv_indices_arr: Any, paged_kv_last_page_len: Any,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, causal: bool = False, sm_scale: Any = None,
        window_left: int = -1, q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert causal and window_left == -1
        levels = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        assert all(isinstance(level, list) and len(level) == self.count for level in levels)
        assert all(x.dtype is torch.int32 for level in levels for x in level)
        self.batches = [
            quire.Batch.from_flashinfer(
                kv_indptr=indptr, kv_indices=ids, kv_last_page_len=last, page_size=page_size, qo_indptr=queries
            )
            for queries, indptr, ids, last in zip(*levels)
        ]
        self.planned = (num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type, kv_data_type)

    def run(self, q: Any, paged_kv_cache: Any) -> Any:
        k, v = paged_kv_cache
        assert self.planned == (q.shape[1], k.shape[2], q.shape[2], k.shape[1], q.dtype, k.dtype)
        cache = quire.KVCache.wrap(k, v, layout="nhd")
        parts = [
            quire.attend(q, cache, batch, quire.Options(causal=batch is self.batches[-1]), lse=True, out=torch.empty_like(q))
            for batch in self.batches
        ]
        return quire.merge([out.float() for out, _ in parts], [lse for _, lse in parts])[0].to(q.dtype)


class LatentWrapper:
    def __init__(self, float_workspace_buffer: Any, use_cuda_graph: bool = False, backend: str = "auto"):
        assert float_workspace_buffer.dtype is torch.uint8

    def plan(
        self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any, num_heads: int, head_dim_ckv: int,
        head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float, q_data_type: Any, kv_data_type: Any,
        use_profiler: bool = False,
    ) -> None:  # fmt: skip
        assert causal and all(x.dtype is torch.int32 for x in (qo_indptr, kv_indptr, kv_indices, kv_len_arr))
        last = (kv_len_arr - 1) % page_size + 1
        self.batch = quire.Batch.from_flashinfer(
            kv_indptr=kv_indptr, kv_indices=kv_indices, kv_last_page_len=last, page_size=page_size, qo_indptr=qo_indptr
        )
        assert self.batch.kv_lens.tolist() == kv_len_arr.tolist()
        self.planned, self.scale = (num_heads, head_dim_ckv, head_dim_kpe, page_size, q_data_type, kv_data_type), sm_scale

    def run(self, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, out: Any = None) -> Any:
        sizes = (q_nope.shape[1], ckv_cache.shape[2], kpe_cache.shape[2], ckv_cache.shape[1])
        assert self.planned == (*sizes, q_nope.dtype, ckv_cache.dtype)
        cache = quire.KVCache.wrap(torch.cat((ckv_cache, kpe_cache), 2)[:, :, None], layout="nhd", v_in_k=ckv_cache.shape[2])
        return out.copy_(quire.attend(torch.cat((q_nope, q_pe), 2), cache, self.batch, quire.Options(scale=self.scale)))


def apply_rope_with_cos_sin_cache(
    positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool = True
) -> Any:
    assert cos_sin_cache.dtype is torch.float32 and is_neox and query.dim() == key.dim() == 2
    cos, sin = (x.contiguous() for x in cos_sin_cache.chunk(2, 1))
    rope = quire.Rope(cos=cos, sin=sin)
    heads = (x.view(len(x), -1, head_size) for x in (query, key))
    return tuple(rope.rotate(x, positions).to(query.dtype).flatten(1) for x in heads)


def append_paged_kv_cache(
    append_key: Any, append_value: Any, batch_indices: Any, positions: Any, paged_kv_cache: Any, kv_indices: Any, kv_indptr: Any,
    kv_last_page_len: Any, kv_layout: str = "NHD",
) -> None:  # fmt: skip
    assert kv_layout == "NHD" and append_key.dim() == append_value.dim() == 3
    assert all(x.dtype is torch.int32 for x in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len))
    k, v = paged_kv_cache
    size = k.shape[1]
    page = kv_indices[kv_indptr[batch_indices.long()].long() + positions.long() // size].long()
    k[page, positions.long() % size], v[page, positions.long() % size] = append_key.to(k.dtype), append_value.to(v.dtype)


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: Any, k_rope: Any, q_nope: Any, k_nope: Any, v: Any, cos_sin_cache: Any, pos_ids: Any, paged_kv_cache: Any,
    kv_indices: Any, kv_indptr: Any, batch_indices: Any, positions: Any, is_neox: bool = True, quantize_dtype: Any = None,
    quant_scale_q: float = 1.0, quant_scale_kv: float = 1.0, page_size: int = 16, kv_layout: str = "NHD", q_rope_out: Any = None,
    q_nope_out: Any = None, enable_pdl: bool = False,
) -> Any:  # fmt: skip
    k_cache, v_cache = paged_kv_cache
    assert q_nope is k_nope is None and k_rope.dim() == 3 and page_size == k_cache.shape[1] and kv_layout == "NHD"
    assert quantize_dtype is k_cache.dtype is v_cache.dtype is q_rope_out.dtype
    cos, sin = (x.contiguous() for x in cos_sin_cache.chunk(2, 1))
    rope = quire.Rope(cos=cos, sin=sin, interleaved=not is_neox)
    q, k = (rope.rotate(x, pos_ids) for x in (q_rope, k_rope))
    q_rope_out.copy_((q * quant_scale_q).to(quantize_dtype))
    last = torch.zeros(1, dtype=torch.int32)
    stored = (k * quant_scale_kv, v.float() * quant_scale_kv)
    append_paged_kv_cache(*stored, batch_indices, positions, (k_cache, v_cache), kv_indices, kv_indptr, last)
    return q_rope_out, None


STAND_INS: dict[str, dict[str, Any]] = {
    "vllm.v1.attention.ops.chunked_prefill_paged_decode": {"chunked_prefill_paged_decode": chunked_prefill_paged_decode},
    "vllm.v1.attention.ops.triton_unified_attention": {"unified_attention": unified_attention},
    "vllm.v1.kv_cache_interface": {"KVQuantMode": SimpleNamespace(NONE=0, FP8_PER_TENSOR=1)},
    "vllm.vllm_flash_attn.flash_attn_interface": {
        "get_scheduler_metadata": get_scheduler_metadata,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "is_fa_version_supported": lambda version: version == 3,
        "fa_version_unsupported_reason": lambda version: "no Hopper here",
    },
    "flashinfer": {
        "BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper,
        "BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper,
        "BatchAttentionWithAttentionSinkWrapper": SinkWrapper,
        "MultiLevelCascadeAttentionWrapper": CascadeWrapper,
        "apply_rope_with_cos_sin_cache": apply_rope_with_cos_sin_cache,
        "append_paged_kv_cache": append_paged_kv_cache,
        "mla": SimpleNamespace(BatchMLAPagedAttentionWrapper=LatentWrapper),
        "rope": SimpleNamespace(rope_quantize_fp8_append_paged_kv_cache=rope_quantize_fp8_append_paged_kv_cache),
    },
}
