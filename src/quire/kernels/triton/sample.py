"""Calls without memory: their tensors are of torch's meta device, for whoever wants to compile a kernel and not to run it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from quire.batch import Batch
from quire.cache.format import FORMATS
from quire.cache.kv_cache import KVCache
from quire.kernels.triton.launch import Launch, launches
from quire.kernels.triton.target import Target
from quire.kernels.triton.tuning import SMALL
from quire.options import Options


@dataclass(frozen=True)
class Sample:
    """A call, by what the compiler sees of it. Every member goes to JSON and back.

    >>> print(Sample("decode", head_dim=64, format="e4m3fn"))
    decode of head_dim 64, e4m3fn
    """

    kernel: str
    """decode or mixed."""
    head_dim: int = 128
    format: str = "bf16"
    """The cache's."""
    q_dtype: str = "bf16"
    out_dtype: str = "bf16"
    q_heads: int = 32
    kv_heads: int = 8
    page_size: int = 16
    pages: int = 1000
    table_width: int = 256
    seqs: int = 64
    index: str = "int32"
    scales: str = "tensor"
    """tensor, head or token, if the format has them."""
    new: bool = False
    """Whether new keys and values are given beside the cache."""
    lse: bool = False
    small: bool = False
    """Whether it is compiled with the smallest tiles."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of `Options`; 'tensor' stands for a tensor of the right shape."""
    how: dict[str, Any] = field(default_factory=dict)
    """More for `launches`."""

    def launches(self, arch: str) -> list[Launch]:
        """What would be launched on such a card."""
        tokens = self.seqs if self.kernel == "decode" else 8192
        q_dtype, index = FORMATS[self.q_dtype].dtype, getattr(torch, self.index)
        stored = FORMATS[self.format]
        with torch.device("meta"):
            k = torch.empty(self.pages, self.page_size, self.kv_heads, self.head_dim, dtype=stored.dtype)
            shape = {"tensor": (), "head": (self.kv_heads,), "token": k.shape[:3]}[self.scales]
            scale = torch.empty(shape, dtype=torch.float32) if stored.quantised else None
            cache = KVCache.wrap(k, torch.empty_like(k), layout="nhd", k_scale=scale, v_scale=scale)
            batch = Batch(
                torch.empty(self.seqs, self.table_width, dtype=index),
                torch.empty(self.seqs, dtype=index),
                torch.empty(self.seqs + 1, dtype=index),
                max_q_len=tokens // self.seqs,
            )
            q = torch.empty(tokens, self.q_heads, self.head_dim, dtype=q_dtype)
            out = torch.empty(q.shape, dtype=FORMATS[self.out_dtype].dtype)
            given = torch.empty(tokens, self.kv_heads, self.head_dim, dtype=torch.bfloat16 if q_dtype.itemsize == 1 else q_dtype)
            shapes = {
                "alibi": torch.empty(self.q_heads),
                "sinks": torch.empty(self.q_heads),
                "causal": torch.empty(self.seqs, dtype=torch.bool),
                "mask": torch.empty(tokens, 128, dtype=torch.bool),
                "positions": torch.empty(tokens, dtype=index),
                "q_scale": torch.empty(()),
                "out_scale": torch.empty(()),
            }
            options = {name: shapes[name] if value == "tensor" else value for name, value in self.options.items()}
            options |= {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
            how = self.how | ({"tuning": SMALL} if self.small else {})
            return launches(
                *(self.kernel, q, cache, batch, Options(**options), (given, given) if self.new else None, out),
                torch.empty(q.shape[:2]) if self.lse else None,
                target=Target(arch, 100),
                **how,
            )

    def __str__(self) -> str:
        facts = [f"head_dim {self.head_dim}", self.format]
        return f"{self.kernel} of {', '.join(facts)}"
