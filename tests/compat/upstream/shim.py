"""The few modules of vLLM that two of its test files import, served by `quire.compat.vllm`."""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace

import numpy
import torch

from quire.compat import vllm as quire_vllm
from quire.compat.vllm.caches import platform_fp8


def install(device_type: str) -> None:
    """Puts a `vllm` into sys.modules. Its tests compare operators by identity, so each is one object under every name."""
    bytes_of = dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), torch.uint8)
    modules: dict[str, dict[str, object]] = {
        "vllm": {},
        "vllm.platforms": {"current_platform": platform(device_type)},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"STR_DTYPE_TO_TORCH_DTYPE": bytes_of, "set_random_seed": set_random_seed},
        "vllm.utils.math_utils": {"next_power_of_2": lambda n: 1 << (n - 1).bit_length()},
        "vllm.v1": {},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": quire_vllm.KVQuantMode},
        "vllm.v1.attention": {},
        "vllm.v1.attention.ops": {},
        "vllm.v1.attention.ops.chunked_prefill_paged_decode": named("chunked_prefill_paged_decode"),
        "vllm.v1.attention.ops.prefix_prefill": named("context_attention_fwd"),
        "vllm.v1.attention.ops.triton_unified_attention": named("unified_attention"),
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__path__ = []  # a package: the names below it are imported through it
        vars(module).update(contents)
        sys.modules[name] = module


def named(operator: str) -> dict[str, object]:
    return {operator: getattr(quire_vllm, operator)}


def platform(device_type: str) -> SimpleNamespace:
    """The questions that the tests ask about the machine. The CPU kernels can do all that they ask for."""

    def has_device_capability(wanted: int) -> bool:
        if device_type == "cpu":
            return True
        major, minor = torch.cuda.get_device_capability()
        return torch.version.hip is not None or 10 * major + minor >= wanted

    return SimpleNamespace(
        device_type=device_type,
        has_device_capability=has_device_capability,
        is_rocm=lambda: device_type == "cuda" and torch.version.hip is not None,
        fp8_dtype=lambda: platform_fp8(torch.device(device_type)).dtype,
    )


def set_random_seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
