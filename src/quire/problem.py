"""A call without its tensors: every fact that rules, kernels, benchmarks and bug reports speak about."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.options import PLAIN, Options


@dataclass(frozen=True)
class Problem:
    """The host facts of one `attend`. Hashable, no tensors, no device reads, one line of text, JSON both ways.

    >>> print(Problem(q_heads=32, kv_heads=8, head_dim=128, page_size=16, max_q_len=1, max_kv_len=4096))
    decode, q <= 1, kv <= 4096, 32/8 heads x 128, pages of 16 nhd bf16, q bf16
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    v_head_dim: int = 0
    """0 in the constructor means: as head_dim."""
    q_dtype: str = "bf16"
    out_dtype: str = ""
    """Empty in the constructor means: as q_dtype."""
    format: str = "bf16"
    """How the cache stores an element."""
    layout: str = "nhd"
    scales: str = "none"
    """none, tensor, head or token."""
    index: str = "int32"
    """The types of page_table, kv_lens and q_starts, joined by '+' if they differ."""
    seqs: int = 1
    max_q_len: int = 1
    """Upper bound of the new tokens of one sequence, as a power of two."""
    max_kv_len: int = 1
    """Upper bound of the tokens of one sequence, as a power of two."""
    form: str = "full"
    """full: the cache holds every token. context: the new tokens come as k and v."""
    causal: str = "yes"
    """yes, no or per-sequence."""
    window: tuple[int | None, int | None] = (None, None)
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    mask: bool = False
    lse: bool = False
    batch_invariant: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        fill = object.__setattr__
        fill(self, "v_head_dim", self.v_head_dim or self.head_dim)
        fill(self, "out_dtype", self.out_dtype or self.q_dtype)
        fill(self, "window", tuple(self.window))
        for name in ("seqs", "max_q_len", "max_kv_len"):
            fill(self, name, power_of_two(getattr(self, name)))

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        options: Options | None = None,
        *,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
        lse: bool = False,
    ) -> Problem:
        """The facts of a call. Lengths come from the hints or, without them, from shapes: never from a device."""
        options = PLAIN if options is None else options
        tokens, q_heads, head_dim = q.shape
        room = batch.page_table.shape[-1] * cache.page_size
        per_row = isinstance(options.causal, torch.Tensor)
        index = dict.fromkeys(dtype_name(t.dtype) for t in (batch.page_table, batch.kv_lens, batch.q_starts))
        return cls(
            q_heads=q_heads,
            kv_heads=cache.kv_heads,
            head_dim=head_dim,
            page_size=cache.page_size,
            v_head_dim=cache.v_head_dim,
            q_dtype=dtype_name(q.dtype),
            out_dtype=dtype_name(out.dtype if out is not None else default_out_dtype(q.dtype, options)),
            format=cache.format.name,
            layout=cache.layout.name,
            scales=cache.scale_kind,
            index="+".join(index),
            seqs=batch.seqs,
            max_q_len=tokens if batch.max_q_len is None else min(batch.max_q_len, tokens),
            max_kv_len=room if batch.max_kv_len is None else min(batch.max_kv_len, room),
            form="full" if new is None else "context",
            causal="per-sequence" if per_row else ("yes" if options.causal else "no"),
            window=options.sides,
            softcap=options.softcap is not None,
            alibi=options.alibi is not None,
            sinks=options.sinks is not None,
            mask=options.mask is not None,
            lse=lse,
            batch_invariant=options.batch_invariant,
            device=q.device.type,
        )

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def features(self) -> tuple[str, ...]:
        """The optional features this call uses, by name."""
        names = [name for name in ("softcap", "alibi", "sinks", "mask", "lse", "batch_invariant") if getattr(self, name)]
        if self.window != (None, None):
            names.append("window")
        if self.causal != "yes":
            names.append("non-causal")
        if self.form == "context":
            names.append("context-form")
        return tuple(names)

    def replace(self, **changes: Any) -> Problem:
        return replace(self, **changes)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Problem:
        return cls(**json.loads(text))

    def __str__(self) -> str:
        kind = "decode" if self.max_q_len == 1 else "mixed" if self.seqs > 1 else "prefill"
        dim = f"{self.head_dim}" if self.v_head_dim == self.head_dim else f"{self.head_dim}/{self.v_head_dim}"
        parts = [kind, f"q <= {self.max_q_len}", f"kv <= {self.max_kv_len}", f"{self.q_heads}/{self.kv_heads} heads x {dim}"]
        scales = "" if self.scales == "none" else f" (scale per {self.scales})"
        parts.append(f"pages of {self.page_size} {self.layout} {self.format}{scales}")
        parts.append(f"q {self.q_dtype}" + ("" if self.out_dtype == self.q_dtype else f" -> {self.out_dtype}"))
        parts += [f"window {self.window}" if name == "window" else name for name in self.features]
        if self.index != "int32":
            parts.append(f"index {self.index}")
        return ", ".join(parts)


FIELDS = tuple(field.name for field in fields(Problem))

_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2: "e5m2",
}


def dtype_name(dtype: torch.dtype) -> str:
    """A type in the words of the cache formats: fp32, bf16, e4m3fn, ...; others by torch's name."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype.is_floating_point


def default_out_dtype(q_dtype: torch.dtype, options: Options) -> torch.dtype:
    """The type of an output nobody gave. Under an out_scale it is fp8: fp8 queries keep their own type, all others give e4m3fn.
    Without one it is the query's type, and bf16 for fp8 queries, since an fp8 output needs a scale of its own."""
    if options.out_scale is not None:
        return q_dtype if is_fp8(q_dtype) else torch.float8_e4m3fn
    return torch.bfloat16 if is_fp8(q_dtype) else q_dtype


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n; 0 for 0."""
    return 0 if n < 1 else 1 << (n - 1).bit_length()
