"""Other libraries as targets. Each module translates a call to the arguments of a library and declares what it does not support."""

from __future__ import annotations

from importlib import import_module

import torch

from quire.conformance.runner.target import Target
from quire.errors import ArgumentError

_OPERATORS = ("chunked_prefill_paged_decode", "context_attention_fwd", "unified_attention")

TARGETS: dict[str, str] = {
    **{f"vllm.{name}": "vllm" for name in _OPERATORS},
    **{f"quire.compat.vllm.{name}": "vllm" for name in _OPERATORS},
    "flash_attn": "flash_attn",
    "flash_attn.fa2": "flash_attn",
    "flash_attn.fa3": "flash_attn",
    "flashinfer.prefill": "flashinfer",
    "flashinfer.decode": "flashinfer",
    "torch.varlen": "torch_varlen",
    "torch.flex": "torch_flex",
    "transformers.eager": "transformers",
    "transformers.sdpa": "transformers",
}
"""Name of a target -> module of this package whose `target(name, device)` returns it."""


def load(name: str, device: str | None = None) -> Target:
    """The target of this name, whose library must be installed."""
    module = import_module(f"quire.conformance.targets.{TARGETS[name]}")
    try:
        found: Target = module.target(name, device)
    except ImportError as error:
        raise ArgumentError("target", f"{name}, which cannot be imported ({error})", "a library that is installed") from error
    if found.device.startswith("cuda") and not torch.cuda.is_available():
        raise ArgumentError("target", f"{name} on {found.device}", "a GPU, which torch does not find")
    return found
