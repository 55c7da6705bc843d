"""Peers under test. Each file translates a call into a peer's own words, and says what that peer declares not to support."""

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
"""Name -> the file here whose `target(name, device)` makes it."""


def load(name: str, device: str | None = None) -> Target:
    """The peer of this name, which must be installed."""
    module = import_module(f"quire.conformance.targets.{TARGETS[name]}")
    try:
        found: Target = module.target(name, device)
    except ImportError as error:
        raise ArgumentError("target", f"{name}, which cannot be imported ({error})", "a peer that is installed here") from error
    if found.device.startswith("cuda") and not torch.cuda.is_available():
        raise ArgumentError("target", f"{name} on {found.device}", "a peer that runs here: torch sees no GPU")
    return found
