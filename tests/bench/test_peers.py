"""Peers get what their own users would give them. Each is played by a stand-in that has its parameters and its conventions and
computes with `quire.attend`: a wrong argument is a wrong result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import quire
from quire.bench import peers
from quire.bench.case import build
from quire.bench.reference_check import BenchReference
from quire.bench.workloads import Workload
from quire.errors import ArgumentError

SMALL = Workload("small", ((1, 40), (70, 10), (1, 0)), "bf16", q_heads=4, kv_heads=2, head_dim=16)
DECODE = replace(SMALL, name="decode", sequences=((1, 40), (1, 17), (1, 0)))
WORKLOADS = [
    workload
    for shape in (SMALL, DECODE)
    for workload in (shape, replace(shape, format="e4m3fn"), replace(shape, window=13), replace(shape, dtype="fp16", page_size=32))
]


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
    options = quire.Options(window=sliding_window or None, scale=sm_scale)
    # Long rows take their new tokens from key and value, the others from the cache.
    full, context = (quire.attend(query, cache, batch, options, new=new) for new in (None, (key, value)))
    long = query_start_loc.diff().repeat_interleave(query_start_loc.diff().long()) > 1
    output.copy_(torch.where(long[:, None, None], context, full))


def unified_attention(
    q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, max_seqlen_q: int, seqused_k: Any, max_seqlen_k: int, softmax_scale: float,
    causal: bool, window_size: Any, block_table: Any, softcap: float, q_descale: Any, k_descale: Any, v_descale: Any,
    seq_threshold_3D: int, num_par_softmax_segments: int, softmax_segm_output: Any, softmax_segm_max: Any, softmax_segm_expsum: Any,
    kv_quant_mode: int = 0,
) -> None:  # fmt: skip
    assert causal and not softcap and q_descale is None
    assert k_descale.shape == v_descale.shape == (seqused_k.shape[0], k.shape[2])
    assert seq_threshold_3D == 128 // k.shape[2] and num_par_softmax_segments == 16
    assert softmax_segm_output.shape == (seq_threshold_3D, q.shape[1], 16, q.shape[2])
    assert softmax_segm_max.shape == softmax_segm_expsum.shape == softmax_segm_output.shape[:3]
    assert softmax_segm_output.dtype is torch.float32
    assert (max_seqlen_k, max_seqlen_q) == (int(seqused_k.max()), int(cu_seqlens_q.diff().max()))
    assert (kv_quant_mode == 1) == (k.dtype is torch.float8_e4m3fn)
    scales = {"k_scale": k_descale[0, 0], "v_scale": v_descale[0, 0]} if kv_quant_mode else {}
    window = 1 + window_size[0] if window_size[0] >= 0 else None
    cache = quire.KVCache.wrap(k, v, layout="nhd", **scales)
    batch = quire.Batch(block_table, seqused_k, cu_seqlens_q)
    out.copy_(quire.attend(q, cache, batch, quire.Options(window=window, scale=softmax_scale)))


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int, cache_seqlens: Any,
    qkv_dtype: Any = torch.bfloat16, headdim_v: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None,
    cache_leftpad: Any = None, page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False,
    window_size: Any = (-1, -1), has_softcap: bool = False, num_splits: int = 0, pack_gqa: Any = None, sm_margin: int = 0,
) -> Any:  # fmt: skip
    assert cache_seqlens.shape == (batch_size,) and cu_seqlens_q.shape == (batch_size + 1,)
    return (batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, qkv_dtype, page_size, causal, *window_size)


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, max_seqlen_q: int, cu_seqlens_q: Any, max_seqlen_k: int, cu_seqlens_k: Any = None,
    seqused_k: Any = None, softmax_scale: Any = None, causal: bool = False, window_size: Any = None, block_table: Any = None,
    out: Any = None, scheduler_metadata: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    num_splits: int = 0, fa_version: int = 2,
) -> Any:  # fmt: skip
    assert fa_version == 3 and causal and num_splits == 0 and isinstance(window_size, list)
    assert q.dtype is k.dtype is v.dtype, "FlashAttention-3 takes one type"
    known = (block_table.shape[0], max_seqlen_q, max_seqlen_k, q.shape[1], k.shape[2], q.shape[2], q.dtype, k.shape[1], causal)
    assert scheduler_metadata == (*known, *window_size)
    scales, options = {}, quire.Options(window=window_size[0] + 1 or None, scale=softmax_scale)
    if q.dtype is torch.float8_e4m3fn:
        assert q_descale.shape == k_descale.shape == v_descale.shape == (block_table.shape[0], k.shape[2])
        scales = {"k_scale": k_descale[0, 0], "v_scale": v_descale[0, 0]}
        options = quire.Options(window=options.window, scale=softmax_scale, q_scale=float(q_descale[0, 0]))
    cache = quire.KVCache.wrap(k, v, layout="nhd", **scales)
    out.copy_(quire.attend(q, cache, quire.Batch(block_table, seqused_k, cu_seqlens_q), options))
    return out


class Wrapper:
    """Both of FlashInfer's paged wrappers."""

    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD", *, use_tensor_cores: bool = False):
        assert float_workspace_buffer.dtype is torch.uint8 and not float_workspace_buffer.any() and kv_layout == "NHD"
        self.tensor_cores = use_tensor_cores

    def remember(self, qo: Any, pages: Any, heads: Any, window_left: int, q_data_type: Any, kv_data_type: Any) -> None:
        self.batch = quire.Batch.from_flashinfer(
            kv_indptr=pages[0], kv_indices=pages[1], kv_last_page_len=pages[2], page_size=heads[3], qo_indptr=qo
        )
        self.heads, self.window, self.types = heads, window_left, (q_data_type, kv_data_type)

    def run(self, q: Any, paged_kv_cache: Any, *, k_scale: Any = None, v_scale: Any = None, out: Any = None) -> Any:
        k, v = paged_kv_cache
        assert self.types == (q.dtype, k.dtype)
        assert self.heads == (q.shape[1], k.shape[2], q.shape[2], k.shape[1])
        scales = {} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}
        cache = quire.KVCache.wrap(k, v, layout="nhd", **scales)
        window = self.window + 1 if self.window >= 0 else None
        out.copy_(quire.attend(q, cache, self.batch, quire.Options(window=window)))
        return out


class DecodeWrapper(Wrapper):
    def plan(
        self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        pos_encoding_mode: str = "NONE", window_left: int = -1, q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert self.tensor_cores
        heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.remember(None, (indptr, indices, last_page_len), heads, window_left, q_data_type, kv_data_type)


class PrefillWrapper(Wrapper):
    def plan(
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any, num_qo_heads: int,
        num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: Any = None, causal: bool = False, window_left: int = -1,
        q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert causal
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.remember(
            qo_indptr, (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len), heads, window_left, q_data_type, kv_data_type
        )


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
    "flashinfer": {"BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper, "BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper},
}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts modules of these names where Python looks for them, and nothing else of the same packages."""

    def put(modules: dict[str, dict[str, Any]]) -> None:
        for name, members in modules.items():
            parts = name.split(".")
            for i in range(1, len(parts) + 1):
                path = ".".join(parts[:i])
                if not isinstance(sys.modules.get(path), Stand):
                    monkeypatch.setitem(sys.modules, path, Stand(path))
                if i > 1:
                    monkeypatch.setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[path], raising=False)
            for member, value in members.items():
                monkeypatch.setattr(sys.modules[name], member, value, raising=False)

    return put


class Stand(ModuleType):
    """A package without files."""

    __path__: ClassVar[list[str]] = []


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.bench.peers import flashinfer

    monkeypatch.setattr(flashinfer, "WORKSPACE", 1 << 10)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.label)
@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_are_called_as_their_users_call_them(name: str, workload: Workload, stand_ins: Callable[..., None]) -> None:
    stand_ins(STAND_INS)
    found, missing = peers.load([name])
    assert not missing
    case = build(workload)
    bound = found[name](case)
    assert bound is not None
    quantises = name == "fa3" and workload.format
    assert bound.q_format == ("e4m3fn" if quantises else workload.dtype)
    out = bound.run()
    assert out.dtype is case.q.dtype
    result = BenchReference(case).check(out, bound.q_format)
    assert 0 < result.error <= result.budget
    assert out is bound.run(), "the output is given, not allocated"


@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_of_attention_do_not_write(name: str, stand_ins: Callable[..., None]) -> None:
    stand_ins(STAND_INS)
    assert peers.load([name])[0][name](build(replace(SMALL, operation="write"))) is None


def test_without_names_all_that_can_be_imported(stand_ins: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins({name: STAND_INS[name] for name in STAND_INS if "unified" in name or "interface" in name})
    monkeypatch.setattr(sys.modules["vllm.vllm_flash_attn.flash_attn_interface"], "is_fa_version_supported", lambda version: False)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    found, missing = peers.load()
    assert list(found) == ["vllm_unified"]
    assert missing["fa3"] == "ImportError: no Hopper here"
    assert "chunked_prefill_paged_decode" in missing["vllm_chunked"]
    assert "flashinfer" in missing["flashinfer"]


def test_a_peer_requested_by_name_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ArgumentError, match=r"--peers: given flashinfer, which cannot be imported \(.*flashinfer"):
        peers.load(["flashinfer"])
    with pytest.raises(ArgumentError, match="vllm_chunked, vllm_unified, fa3, flashinfer"):
        peers.load(["fa4"])
    assert peers.load([]) == ({}, {})
