"""Encoder attention, which has no cache, and cross attention, whose keys are an encoder's, in vLLM's own classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from layers import PAGE_SIZE, layer_with_scales
from running import SAFETY_FACTOR, start
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec

from quire import reference
from quire.integrations.vllm.backend import QuireBackend

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32
FP32_ERROR = 2.0**-19
"""fp32 results of values of about 1: a few dozen roundings of 2^-24."""


def common_of(kv_lens: tuple[int, ...], q_lens: tuple[int, ...], table: torch.Tensor) -> CommonAttentionMetadata:
    """vLLM's metadata of a step."""
    starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    slots = torch.full((sum(q_lens),), -1)
    return CommonAttentionMetadata(starts, starts, lens, len(kv_lens), sum(q_lens), max(q_lens), max(kv_lens), table, slots)


@pytest.mark.parametrize("window", [None, 9])
def test_encoders(window: int | None) -> None:
    backend = create_encoder_only_attention_backend(QuireBackend)
    spec = EncoderOnlyAttentionSpec(PAGE_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float32)
    lens = (37, 1, 90)
    builder = backend.get_builder_cls()(spec, ["layer"], VllmConfig(), torch.device("cpu"))
    metadata = builder.build(0, common_of(lens, lens, torch.zeros(3, 0, dtype=torch.int32)))
    impl = backend.get_impl_cls()(
        HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, sliding_window=window, attn_type=AttentionType.ENCODER_ONLY
    )
    q, k, v = torch.randn(sum(lens), HEADS + 2 * KV_HEADS, HEAD_SIZE).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    layer, pages = layer_with_scales(), torch.empty(0)
    impl.do_kv_cache_update(layer, k, v, pages, metadata.slot_mapping)
    out = torch.full((sum(lens), HEADS, HEAD_SIZE), float("nan"))
    impl.forward(layer, q, k, v, pages, metadata, out)
    at, sides = 0, (None, None) if window is None else (window - 1, window - 1)
    for n in lens:
        part = slice(at, at + n)
        right, _ = reference.attention(q[part], k[part], v[part], causal=False, window=sides)
        assert float((out[part] - right).abs().max()) < FP32_ERROR
        at += n


@pytest.mark.parametrize("q_lens", [(4, 9, 1), (1, 1, 1)])
def test_cross_attention(q_lens: tuple[int, ...]) -> None:
    """Prompts may be longer than what the encoder saw."""
    backend = create_cross_attention_backend(QuireBackend)
    spec = CrossAttentionSpec(PAGE_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float32)
    encoded, table = (37, 5, 20), torch.tensor([[3, 1, 7], [2, 0, 0], [5, 4, 0]], dtype=torch.int32)
    builder = backend.get_builder_cls()(spec, ["layer"], VllmConfig(), torch.device("cpu"))
    assert builder.get_cudagraph_support(VllmConfig(), spec) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    common = common_of(q_lens, q_lens, table)
    common.seq_lens_cpu_upper_bound = torch.tensor(q_lens, dtype=torch.int32)
    common.encoder_seq_lens_cpu = numpy.array(encoded, dtype=numpy.int32)
    common.encoder_seq_lens = torch.tensor(encoded, dtype=torch.int32)
    metadata = builder.build(0, common)
    impl = backend.get_impl_cls()(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, attn_type=AttentionType.ENCODER_DECODER)
    layer, pages = layer_with_scales(), torch.full((8, KV_HEADS, PAGE_SIZE, 2 * HEAD_SIZE), float("nan"))
    layer.kv_sharing_target_layer_name = None
    q = torch.randn(sum(q_lens), HEADS, HEAD_SIZE)
    k, v = torch.randn(2, sum(encoded), KV_HEADS, HEAD_SIZE)
    out = torch.full_like(q, float("nan"))
    impl.forward(layer, q, k, v, pages, metadata, out)
    q_at = k_at = 0
    for n, keys in zip(q_lens, encoded):
        for row in range(q_at, q_at + n):
            right, _ = reference.attention(q[row : row + 1], k[k_at : k_at + keys], v[k_at : k_at + keys], causal=False)
            assert float((out[row : row + 1] - right).abs().max()) < FP32_ERROR
        q_at, k_at = q_at + n, k_at + keys


def test_an_encoder_model_gives_the_vectors_of_the_stock_backend(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    model = model_path("bert")
    request = {"model": str(model), "lengths": [3, 70, 17, 200, 1], "seed": 4}
    stock = start(tmp_path, "stock", request, "pooling_run.py")
    quire = start(tmp_path, "quire", request, "pooling_run.py", QUIRE_VLLM_OVERRIDE="CPU_ATTN")
    wanted, given = stock.wait(), quire.wait()
    assert given.counts["attend"] > 0 and "attend" not in wanted.counts
    stock_error = max(float((a["vector"] - a["reference"]).abs().max()) for a in wanted.results)
    quire_error = max(float((a["vector"] - a["reference"]).abs().max()) for a in given.results)
    print(stock_error, quire_error)
    assert quire_error <= SAFETY_FACTOR * stock_error
