"""What vLLM's own validation says of Quire for configurations of CUDA and ROCm, and what Quire refuses when a layer is made: on
CPUs vLLM validates nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layers import Step
from vllm.config import VllmConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionType
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from quire.integrations.engines import EngineError
from quire.integrations.vllm.backend import QuireBackend, QuireInPlaceOfRocmAttn, QuireInPlaceOfTritonAttn
from quire.integrations.vllm.cache_view import CACHE_TYPES
from quire.integrations.vllm.impl import QuireImpl
from quire.integrations.vllm.settings import Settings
from quire.integrations.vllm.unsupported import refuse_checking, refuse_model

HOPPER, AMPERE, VOLTA, MI300 = (DeviceCapability(*numbers) for numbers in ((9, 0), (8, 0), (7, 0), (9, 4)))
PLAIN = AttentionSelectorConfig(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None)


def reasons(backend: type[AttentionBackend] = QuireBackend, capability: DeviceCapability = HOPPER, **changes: Any) -> list[str]:
    """Why vLLM would refuse a backend, as its platforms ask it."""
    return backend.validate_configuration(device_capability=capability, **PLAIN._replace(**changes)._asdict())


@pytest.mark.parametrize("backend", [QuireBackend, QuireInPlaceOfTritonAttn, QuireInPlaceOfRocmAttn])
@pytest.mark.parametrize("capability", [HOPPER, AMPERE, MI300], ids=str)
def test_everything_at_once_is_accepted(backend: type[AttentionBackend], capability: DeviceCapability) -> None:
    features = dict.fromkeys(("has_sink", "use_per_head_quant_scales", "has_sliding_window", "use_non_causal"), True)
    features |= dict.fromkeys(("use_batch_invariant", "use_kv_connector", "use_adaptive_verification", "use_dcp"), True)
    assert reasons(backend, capability, kv_cache_dtype="fp8", **features) == []


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_types(cache_type: str, dtype: torch.dtype) -> None:
    assert reasons(kv_cache_dtype=cache_type, dtype=dtype) == []


@pytest.mark.parametrize("size", [8, 16, 48, 64, 528, 784])
def test_sizes(size: int) -> None:
    assert reasons(block_size=size) == []
    assert reasons(head_size=min(size, 512)) == []


@pytest.mark.parametrize("kind", AttentionType)
def test_kinds_of_attention(kind: AttentionType) -> None:
    assert reasons(attn_type=kind) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"kv_cache_dtype": "int4_per_token_head"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype not supported"),
        ({"head_size": 576}, "head_size not supported"),
        ({"dtype": torch.float64}, "dtype not supported"),
    ],
)
def test_what_quire_lacks_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert reasons(**changes) == [reason]


def test_images_seen_both_ways() -> None:
    assert reasons(use_mm_prefix=True) == []


def test_old_gpus_are_refused() -> None:
    assert reasons(capability=VOLTA) == ["compute capability not supported"]


def test_any_layout_and_any_graph() -> None:
    assert QuireBackend.supported_kv_cache_layouts() is None
    spec = FullAttentionSpec(16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    assert QuireBackend.get_builder_cls().get_cudagraph_support(VllmConfig(), spec) is AttentionCGSupport.ALWAYS
    assert not QuireBackend.supports_alibi_sqrt()


def layer(**changes: Any) -> QuireImpl:
    """A layer as vLLM makes it."""
    return QuireImpl(**{"num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_dtype": "nvfp4"}, r"--kv-cache-dtype: got nvfp4; Quire supports auto, "),
        ({"head_size": 576}, "head size: got 576; Quire supports 1 to 512"),
        ({"chunk_lookback": 4, "sliding_window": 4}, "chunk_lookback: got 4 with a window of 4"),
        ({"some_new_argument": 1}, "some_new_argument, given for the layer: not supported by Quire"),
        ({"num_kv_heads": 3}, "got 4 over 3 KV heads"),
        ({"sinks": torch.zeros(3)}, r"sinks: got \[3\]; allowed is one for each of 4 heads"),
    ],
)
def test_a_layer_that_quire_lacks_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        layer(**changes)


def configuration(**changes: Any) -> Any:
    """The parts of vLLM's configuration that are looked at; a whole one needs a model of this kind."""
    parallel = SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=changes.pop("dcp", 1))
    graphs, connector = SimpleNamespace(cudagraph_mode=changes.pop("cudagraph_mode", None)), changes.pop("connector", None)
    model = SimpleNamespace(**{"is_mm_prefix_lm": False, "rswa_window": None} | changes)
    return SimpleNamespace(model_config=model, parallel_config=parallel, compilation_config=graphs, kv_transfer_config=connector)


@pytest.mark.parametrize(
    ("changes", "message"), [({"rswa_window": 4}, "R-SWA"), ({"connector": object()}, "a KV connector .* on a CPU")]
)
def test_a_model_that_quire_lacks_is_refused(changes: dict[str, Any], message: str) -> None:
    refuse_model(configuration())
    refuse_model(configuration(is_mm_prefix_lm=True))
    with pytest.raises(EngineError, match=message):
        refuse_model(configuration(**changes))


def test_checked_mode_is_refused_with_graphs() -> None:
    from vllm.config import CUDAGraphMode

    refuse_checking(configuration(cudagraph_mode=CUDAGraphMode.NONE))
    with pytest.raises(EngineError, match="start vLLM with --enforce-eager"):
        refuse_checking(configuration(cudagraph_mode=CUDAGraphMode.FULL))
    with pytest.raises(EngineError, match="decode context parallelism"):
        refuse_checking(configuration(dcp=2))


def test_metadata_aliases_vllm_s_buffers() -> None:
    """A CUDA graph is replayed with other lengths and pages in the same buffers."""
    step = Step()
    batch, common = step.metadata.batch, step.common
    for mine, theirs in (
        (batch.page_table, common.block_table_tensor),
        (batch.kv_lens, common.seq_lens),
        (batch.q_starts, common.query_start_loc),
        (step.metadata.slot_mapping, common.slot_mapping),
    ):
        assert mine.data_ptr() == theirs.data_ptr()


def test_a_step_that_would_be_ignored_is_refused() -> None:
    step = Step()
    builder = QuireBackend.get_builder_cls()
    made = builder(FullAttentionSpec(16, num_kv_heads=2, head_size=32, dtype=torch.float32), [], VllmConfig(), torch.device("cpu"))
    with pytest.raises(EngineError, match="rswa_prefix_lens"):
        made.build(0, step.common.replace(rswa_prefix_lens=torch.tensor([3])))
    assert Settings() == step.impl.settings
