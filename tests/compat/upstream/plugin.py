"""The pytest plugin under which vLLM's test files run: its markers, its `--optional`, and a sample of them on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import shim
import torch

SMALL = {"kv_cache_dtype": "auto", "head_size": 24, "num_queries_per_kv": 64}
NARROW = {"num_blocks": 2048, "head_size": 128}

SAMPLE: dict[str, tuple[dict[str, Any], ...]] = {
    "test_contexted_kv_attention": (
        {"op": "chunked_prefill_paged_decode", "sliding_window": 16, "kv_cache_dtype": "auto", "head_size": 24},
        {"op": "chunked_prefill_paged_decode", "sliding_window": 0, "kv_cache_dtype": "fp8", "head_size": 24},
        {"op": "context_attention_fwd", "sliding_window": 2048, "kv_cache_dtype": "fp8_e5m2", "head_size": 24},
    ),
    "test_contexted_kv_attention_cached_kv": ({"kv_cache_dtype": "auto", "head_size": 24},),
    "test_contexted_kv_attention_alibi": (
        {"op": "chunked_prefill_paged_decode", "kv_cache_dtype": "auto", "head_size": 24},
        {"op": "context_attention_fwd", "kv_cache_dtype": "fp8", "head_size": 24},
    ),
    "test_contexted_kv_attention_f32": ({"op": "chunked_prefill_paged_decode", "sliding_window": 16, **SMALL},),
    "test_contexted_kv_attention_alibi_f32": ({"op": "chunked_prefill_paged_decode", **SMALL},),
    "test_triton_unified_attn": ({**NARROW, "seq_threshold_3D": 8},),
    "test_triton_unified_attn_bf16_query_fp8_kv": (NARROW,),
    "test_triton_unified_attn_fp16_input_fp8_output": tuple(
        {**NARROW, "seq_threshold_3D": 0, "seq_lens": lens}
        for lens in ([(1, 1328), (5, 18), (129, 463)], [(1, 523), (1, 37), (1, 2011)], [(1, 1)] * 533)
    ),
    "test_triton_unified_attn_use_td": ({"num_blocks": 2048, "seq_threshold_3D": 8},),
}
"""The cases that a CPU runs: those that have one of these among their parameters. A test that is not named runs whole."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--optional", action="store_true", help="run the cases that are marked optional, too")
    parser.addoption("--cpu", action="store_true", help="run on the CPU: the cases of SAMPLE, unless --all is given")
    parser.addoption("--all", action="store_true", help="with --cpu: every case")


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("optional: not run without --optional", "skip_global_cleanup: nothing to clean up"):
        config.addinivalue_line("markers", marker)
    on_cpu = config.getoption("--cpu")
    if on_cpu:
        accelerator: Any = torch.accelerator
        accelerator.device_count = lambda: 1
        accelerator.set_device_index = lambda device: None
        accelerator.synchronize = lambda *args: None
    shim.install("cpu" if on_cpu else "cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--optional"):
        for item in items:
            if item.get_closest_marker("optional"):
                item.add_marker(pytest.mark.skip(reason="needs --optional"))
    if not config.getoption("--cpu"):
        return
    for item in items:
        parameters(item).update(device="cpu") if "device" in parameters(item) else None
    if not config.getoption("--all"):
        left_out = [item for item in items if not sampled(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def sampled(item: pytest.Item) -> bool:
    given = {name: getattr(value, "__name__", value) for name, value in parameters(item).items()}
    wanted = SAMPLE.get(item.name.partition("[")[0], ({},))
    return any(all(given.get(name) == value for name, value in case.items()) for case in wanted)


def pytest_runtest_teardown() -> None:
    """Several processes may share a card, and a test fills gigabytes of it: what it had is for the others now."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
