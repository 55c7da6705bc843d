"""Quire as a kernel of the Hub. It needs the package `quire`."""

from quire.integrations.transformers.hub_kernel import __getattr__, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["__getattr__", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
