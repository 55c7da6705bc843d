"""Calls without memory: their tensors are of torch's meta device, for whoever wants to compile a kernel and not to run it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from quire.batch import Batch
from quire.cache.format import FORMATS
from quire.cache.kv_cache import KVCache
from quire.kernels.triton import ledger, write
from quire.kernels.triton.launch import Launch, launches_of
from quire.kernels.triton.launch import launches as attend
from quire.kernels.triton.target import Target
from quire.kernels.triton.tuning import AUDIT, LEAST, SMALL, SMALL_GLUON, WRITE
from quire.options import Options


@dataclass(frozen=True)
class Sample:
    """A call, by what the compiler sees of it. Every member goes to JSON and back.

    >>> print(Sample("decode", head_dim=64, format="e4m3fn"))
    decode of head_dim 64, e4m3fn
    """

    kernel: str
    """decode, mixed, gluon, write, or ledger."""
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
    slots: bool = False
    """Whether the batch says where new tokens go."""
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
        index, stored, q_dtype = getattr(torch, self.index), FORMATS[self.format], FORMATS[self.q_dtype].dtype
        k, v = (_nothing(self.pages, self.page_size, self.kv_heads, self.head_dim, dtype=stored.dtype) for _ in "kv")
        scales = {"tensor": (), "head": (self.kv_heads,), "token": k.shape[:3]}[self.scales]
        k_scale, v_scale = (_nothing(*scales) if stored.quantised else None for _ in "kv")
        cache = KVCache.wrap(k, v, layout="nhd", k_scale=k_scale, v_scale=v_scale, ledger=self.kernel == "ledger")
        batch = Batch(
            _nothing(self.seqs, self.table_width, dtype=index),
            _nothing(self.seqs, dtype=index),
            _nothing(self.seqs + 1, dtype=index),
            slots=_nothing(tokens, dtype=index) if self.slots else None,
            max_q_len=tokens // self.seqs,
        )
        q = _nothing(tokens, self.q_heads, self.head_dim, dtype=q_dtype)
        new = _nothing(tokens, self.kv_heads, self.head_dim, dtype=torch.bfloat16 if q_dtype.itemsize == 1 else q_dtype)
        tensors = {
            "alibi": _nothing(self.q_heads),
            "sinks": _nothing(self.q_heads),
            "causal": _nothing(self.seqs, dtype=torch.bool),
            "mask": _nothing(tokens, 128, dtype=torch.bool),
            "positions": _nothing(tokens, dtype=index),
            "q_scale": _nothing(),
            "out_scale": _nothing(),
        }
        fields: dict[str, Any] = {name: tensors[name] if value == "tensor" else value for name, value in self.options.items()}
        fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        options = Options(**fields)
        if self.kernel == "write":
            return write.launches(new, new, cache, batch, None, target=Target(arch, 100), portion=LEAST if self.small else WRITE)
        beside = (new, new) if self.new else None
        if self.kernel == "ledger":
            return ledger.launches(q, cache, batch, options, beside, portion=LEAST if self.small else AUDIT, **self.how)
        out, lse = _nothing(*q.shape, dtype=FORMATS[self.out_dtype].dtype), _nothing(*q.shape[:2]) if self.lse else None
        call = (q, cache, batch, options, beside, out)
        if self.kernel == "gluon":
            from quire.kernels.gluon.launch import Hopper

            tuning = SMALL_GLUON if self.small else None
            return launches_of(Hopper(*call, target=Target(arch, 100), tuning=tuning, **self.how), *call, lse)
        return attend(self.kernel, *call, lse, target=Target(arch, 100), tuning=SMALL if self.small else None, **self.how)

    def __str__(self) -> str:
        facts = [f"head_dim {self.head_dim}", self.format]
        return f"{self.kernel} of {', '.join(facts)}"


def _nothing(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
