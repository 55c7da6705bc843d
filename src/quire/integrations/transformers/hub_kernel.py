"""The content of the folder that transformers loads as a kernel of the Hub: the functions of FlashAttention, by Quire.

When transformers loads a kernel it registers its own function under the kernel's name, one that gathers the pages of a request
before every call, and takes the kernel's functions afterwards. `flash_attn_func`, the first it takes, is therefore an attribute
made on demand: it registers Quire's function, which reads the pages where they are.
"""

from __future__ import annotations

from quire.integrations.transformers.flash import flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["__getattr__", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def __getattr__(name: str) -> object:
    if name == "flash_attn_func":
        from quire.integrations.transformers.flash import flash_attn_func
        from quire.integrations.transformers.registration import register_paged

        register_paged()
        return flash_attn_func
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
