"""Peers replay a stream as their own users would: planned once a step, over pages that vLLM's writer fills. Each is played by a
stand-in that has its parameters and its conventions and computes with `quire.attend`: a wrong argument is a wrong result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import quire
from quire.bench import peers
from quire.bench.stream.graphs import GraphRunner, capture_all
from quire.bench.stream.replay import EagerRunner, replay, warm_up
from quire.bench.stream.setup import Setup, Spec, StreamModel
from quire.bench.stream.trace import EngineLimits
from quire.errors import ArgumentError

SPECS = {
    "agents": Spec("agents", 1, StreamModel(2, 4, 2, 16, 16), EngineLimits(20, 48, 6, 4096, 1 / 64)),
    "chat": Spec("chat", 2, StreamModel(2, 4, 2, 16, 16), EngineLimits(16, 48, 6, 4096, 1 / 64)),
}
PLANS: list[str] = []
"""What was planned, in order."""


def triton_reshape_and_cache_flash(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, kv_cache_dtype: str, k_scale: Any, v_scale: Any
) -> None:
    assert kv_cache_dtype == "auto" and float(k_scale) == float(v_scale) == 1.0 and slot_mapping.dtype is torch.int64
    assert slot_mapping.shape[0] <= key.shape[0]
    live = slot_mapping >= 0
    for new, pages in ((key, key_cache), (value, value_cache)):
        pages.view(-1, *pages.shape[2:])[slot_mapping[live]] = new[: slot_mapping.shape[0]][live]


def attend(q: Any, k: Any, v: Any, out: Any, table: Any, lens: Any, starts: Any, scale: float) -> Any:
    assert int(table.min()) >= 0 and table.shape[1] % 8 == 0, "peers read past the end of a row"
    batch = quire.Batch(table, lens, starts)
    out.copy_(quire.attend(q, quire.KVCache.wrap(k, v, layout="nhd"), batch, quire.Options(scale=scale)))
    return out


def unified_attention(
    q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, max_seqlen_q: int, seqused_k: Any, max_seqlen_k: int, softmax_scale: float,
    causal: bool, window_size: Any, block_table: Any, softcap: float, q_descale: Any, k_descale: Any, v_descale: Any,
    seq_threshold_3D: int, num_par_softmax_segments: int, softmax_segm_output: Any, softmax_segm_max: Any, softmax_segm_expsum: Any,
    kv_quant_mode: int = 0,
) -> None:  # fmt: skip
    assert causal and not softcap and q_descale is None and window_size == (-1, -1) and kv_quant_mode == 0
    assert k_descale.shape == v_descale.shape == (seqused_k.shape[0], k.shape[2])
    assert softmax_segm_output.shape == (seq_threshold_3D, q.shape[1], num_par_softmax_segments, q.shape[2])
    assert max_seqlen_k >= int(seqused_k.max()) and max_seqlen_q >= int(cu_seqlens_q.diff().max())
    attend(q, k, v, out, block_table, seqused_k, cu_seqlens_q, softmax_scale)


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int, cache_seqlens: Any,
    qkv_dtype: Any, cu_seqlens_q: Any, page_size: int, causal: bool, window_size: Any, num_splits: int,
) -> torch.Tensor:  # fmt: skip
    """The schedule is played by the lengths: a stale one is noticed."""
    assert causal and window_size == (-1, -1) and cache_seqlens.shape == (batch_size,) and cu_seqlens_q.shape == (batch_size + 1,)
    assert max_seqlen_q >= 1 and max_seqlen_k >= 1 and (num_heads_q, num_heads_kv, headdim, page_size) == (4, 2, 16, 16)
    PLANS.append("graph" if num_splits else "eager")
    return cache_seqlens.clone()


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, max_seqlen_q: int, cu_seqlens_q: Any, max_seqlen_k: int, seqused_k: Any, softmax_scale: float,
    causal: bool, window_size: Any, block_table: Any, out: Any, scheduler_metadata: Any, num_splits: int, fa_version: int,
) -> Any:  # fmt: skip
    assert fa_version == 3 and causal and window_size == [-1, -1] and num_splits in (0, 32)
    assert torch.equal(scheduler_metadata, seqused_k), "the schedule of another step"
    return attend(q, k, v, out, block_table, seqused_k, cu_seqlens_q, softmax_scale)


class Wrapper:
    """Both of FlashInfer's paged wrappers. With a graph their plans are copied to the buffers that they were given."""

    def __init__(
        self, workspace: Any, kv_layout: str, *, use_cuda_graph: bool = False, use_tensor_cores: bool = False, **buffers: Any
    ):
        assert workspace.dtype is torch.uint8 and kv_layout == "NHD" and bool(buffers) == use_cuda_graph
        assert use_tensor_cores == isinstance(self, DecodeWrapper)
        self.buffers = {name.removesuffix("fer"): buffer for name, buffer in buffers.items()}

    def remember(self, pages: Any, heads: Any, types: Any, qo: Any = None) -> None:
        indptr, indices, last = pages
        assert types == (torch.bfloat16, torch.bfloat16) and heads == (4, 2, 16, 16)
        assert all(x.dtype is torch.int32 for x in pages) and int(last.min()) >= 1
        PLANS.append("graph" if self.buffers else "eager")
        if self.buffers:
            given = {"paged_kv_indptr_buf": indptr, "paged_kv_last_page_len_buf": last}
            for name, tensor in (given | ({} if qo is None else {"qo_indptr_buf": qo})).items():
                assert self.buffers[name].shape == tensor.shape, "a graph has a fixed number of sequences"
                self.buffers[name].copy_(tensor)
            assert "qo_indptr_buf" in self.buffers or qo is None
            self.buffers["paged_kv_indices_buf"][: len(indices)] = indices
        self.batch = quire.Batch.from_flashinfer(
            kv_indptr=indptr, kv_indices=indices, kv_last_page_len=last, page_size=heads[3], qo_indptr=qo
        )

    def run(self, q: Any, paged_kv_cache: Any, *, out: Any) -> Any:
        k, v = paged_kv_cache
        starts = self.batch.q_starts
        if self.batch.max_q_len is None and int(starts[-1]) > q.shape[0]:
            raise AssertionError("more tokens than queries")
        # A decode wrapper has one query for each sequence; those without keys are padding.
        lens = self.batch.kv_lens
        live = torch.where(lens > 0, starts.diff(), 0)
        if isinstance(self, DecodeWrapper):
            starts = torch.cat((torch.zeros(1, dtype=torch.int32), live.cumsum(0).int()))
        out.copy_(quire.attend(q, quire.KVCache.wrap(k, v, layout="nhd"), quire.Batch(self.batch.page_table, lens, starts)))
        return out


class DecodeWrapper(Wrapper):
    def plan(
        self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, *,
        q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.remember((indptr, indices, last_page_len), heads, (q_data_type, kv_data_type))


class PrefillWrapper(Wrapper):
    def plan(
        self, qo_indptr: Any, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, *, causal: bool, q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        assert causal
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.remember((indptr, indices, last_page_len), heads, (q_data_type, kv_data_type), qo_indptr)


def cpu_attn_get_scheduler_metadata(*given: Any) -> torch.Tensor:
    seqs, q_heads, kv_heads, head_dim, lens, dtype, starts, causal, window, isa, splits, table, kind = given
    assert (q_heads, kv_heads, head_dim, dtype) == (4, 2, 32, torch.bfloat16) and causal and window == -1 and kind == "auto"
    assert lens.shape == (seqs,) and starts.shape == (seqs + 1,) and splits and table is None and isa in ("vec", "amx")
    PLANS.append("eager")
    return lens.clone()


def cpu_attn_reshape_and_cache(k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any, isa: str, *scales: Any) -> None:
    assert scales == (1.0, 1.0, "auto") and k_pages.shape[1:] == (2, 32, 32)
    for new, pages in ((k, k_pages), (v, v_pages)):
        pages[slots // 32, :, slots % 32] = new


def cpu_attention_with_kv_cache(*given: Any) -> None:
    q, k_pages, v_pages, out, starts, lens, scale, causal, _, window, table, softcap, metadata, _, _, *scales = given
    assert causal and window == -1 and not softcap and scales == [1.0, 1.0, "auto"] and torch.equal(metadata, lens)
    attend(q, k_pages.transpose(1, 2).contiguous(), v_pages.transpose(1, 2).contiguous(), out, table, lens, starts, scale)


STAND_INS: dict[str, dict[str, Any]] = {
    "vllm.v1.attention.ops.triton_reshape_and_cache_flash": {"triton_reshape_and_cache_flash": triton_reshape_and_cache_flash},
    "vllm.v1.attention.ops.triton_unified_attention": {"unified_attention": unified_attention},
    "vllm.v1.kv_cache_interface": {"KVQuantMode": SimpleNamespace(NONE=0)},
    "vllm.vllm_flash_attn.flash_attn_interface": {
        "get_scheduler_metadata": get_scheduler_metadata,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "is_fa_version_supported": lambda version: version == 3,
    },
    "vllm._custom_ops": {
        "cpu_attn_get_scheduler_metadata": cpu_attn_get_scheduler_metadata,
        "cpu_attn_reshape_and_cache": cpu_attn_reshape_and_cache,
        "cpu_attention_with_kv_cache": cpu_attention_with_kv_cache,
    },
    "flashinfer": {"BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper, "BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper},
}


class Stand(ModuleType):
    """A package without files."""

    __path__: ClassVar[list[str]] = []


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from quire.bench.peers import flashinfer

    monkeypatch.setattr(flashinfer, "WORKSPACE", 1 << 10)
    for name, members in STAND_INS.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            if not isinstance(sys.modules.get(path), Stand):
                monkeypatch.setitem(sys.modules, path, Stand(path))
            if i > 1:
                monkeypatch.setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[path], raising=False)
        for member, value in members.items():
            monkeypatch.setattr(sys.modules[name], member, value, raising=False)
    PLANS.clear()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("stream", SPECS)
@pytest.mark.parametrize("name", peers.STREAM_PEERS)
def test_peers_replay_streams(name: str, stream: str) -> None:
    implementation = peers.load_streams([name])[0][name]
    setup = Setup(SPECS[stream])
    warm_up(setup, implementation(setup, None))
    PLANS.clear()
    assert replay(setup, EagerRunner(setup, implementation(setup, None))).error.right
    assert name == "vllm_unified" or PLANS == ["eager"] * len(setup.trace.steps), "one plan for all layers of a step"


@pytest.mark.parametrize("stream", SPECS)
@pytest.mark.parametrize("name", peers.STREAM_PEERS)
def test_peers_replay_graphs(name: str, stream: str) -> None:
    implementation = peers.load_streams([name])[0][name]
    setup = Setup(SPECS[stream])
    graphs = capture_all(setup, implementation, lambda run: run)
    PLANS.clear()
    runner = GraphRunner(setup, implementation(setup, None), graphs)
    assert replay(setup, runner).error.right and runner.replayed > 0
    assert name == "vllm_unified" or PLANS.count("graph") == runner.replayed


@pytest.mark.parametrize("stream", SPECS)
def test_vllm_on_a_cpu(stream: str) -> None:
    from quire.bench.peers.vllm_cpu import stream as load

    setup = Setup(replace(SPECS[stream], model=StreamModel(2, 4, 2, 32, 32)))
    assert replay(setup, EagerRunner(setup, load()(setup, None))).error.right
    assert len(PLANS) == len(setup.trace.steps)
    with pytest.raises(ArgumentError, match="page_size: given 16"):
        load()(Setup(SPECS[stream]), None)


def test_a_schedule_of_another_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has power: a peer that plans once for all steps fails."""
    implementation = peers.load_streams(["fa3"])[0]["fa3"]
    setup = Setup(SPECS["chat"])
    layers: Any = implementation(setup, None)
    plan: Callable[..., None] = layers.plan
    monkeypatch.setattr(layers, "plan", lambda planned: plan(planned) if layers.call is None else None)
    with pytest.raises((AssertionError, quire.QuireError, RuntimeError)):
        replay(setup, EagerRunner(setup, layers))


def test_missing_peers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.triton_reshape_and_cache_flash", None)
    found, missing = peers.load_streams()
    assert not found and set(missing) == set(peers.STREAM_PEERS)
    assert all("triton_reshape_and_cache_flash" in reason for reason in missing.values())
    with pytest.raises(ArgumentError, match="--peers: given fa3, which cannot be imported"):
        peers.load_streams(["fa3"])
    with pytest.raises(ArgumentError, match="fa3, flashinfer, vllm_unified"):
        peers.load_streams(["vllm_chunked"])
