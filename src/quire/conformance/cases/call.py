"""One attention call as tensors, in nobody's dialect: what a kernel gets, and what it must not touch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch

from quire import Batch, KVCache, Options
from quire.cache.format import FORMATS
from quire.cache.layout import layout_named
from quire.conformance.cases.case import Case

OPTIONS = tuple(spec.name for spec in fields(Options) if spec.init)
GUARD = 4096
"""Bytes before and after each buffer that a kernel writes: nobody may touch them."""


@dataclass
class KernelCall:
    """What one call is made of. Tensors are as a kernel gets them; options are plain values.

    q           [tokens, q_heads, head_dim]                 rows from `live` on are padding
    k_pages     [pages, page_size, kv_heads, head_dim]      in layout nhd; others as `quire.cache.layout` says
    out         [tokens, q_heads, v_head_dim]               stamped, with guards before and behind
    lse         [tokens, q_heads] fp32, or None             stamped likewise
    new_k/new_v [tokens, kv_heads, dim] or None             context form: the cache holds only what came before
    """

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    kv_lens: torch.Tensor
    q_starts: torch.Tensor
    out: torch.Tensor
    scale: float
    layout: str = "nhd"
    format: str = "fp16"
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    new_k: torch.Tensor | None = None
    new_v: torch.Tensor | None = None
    causal: bool | torch.Tensor = True
    window: tuple[int | None, int | None] = (None, None)
    """Keys visible to the left and to the right of a query besides its own; a causal row never looks right."""
    softcap: float | None = None
    alibi: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    q_scale: float | None = None
    out_scale: float | None = None
    """Divides the output, which then has an fp8 type and saturates."""
    batch_invariant: bool = False
    """Each sequence must give the same bits alone as in the batch."""
    max_q_len: int | None = None
    max_kv_len: int | None = None
    stamp: int = 0xCB
    case: Case | None = None
    seals: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    """What must stay as it is: a view, and the checksum it had."""
    broken_elsewhere: tuple[str, ...] = ()
    """What another process, which ran the target, found broken."""
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What was already worked out about its inputs."""

    @property
    def live(self) -> int:
        return int(self.q_starts[-1]) if self.q_starts.numel() else 0

    @property
    def tokens(self) -> int:
        return self.q.shape[0]

    @property
    def seqs(self) -> int:
        return self.kv_lens.shape[0]

    @property
    def q_heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k_pages.shape[2 if self.layout == "nhd" else 1]

    @property
    def page_size(self) -> int:
        order = layout_named(self.layout).k
        return self.k_pages.shape[order.names.index("slot")]

    @property
    def pages(self) -> int:
        return self.k_pages.shape[0]

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def new(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self.new_k is None or self.new_v is None else (self.new_k, self.new_v)

    # As Quire's own values; nothing is copied.

    def cache(self) -> KVCache:
        layout, format = layout_named(self.layout), FORMATS[self.format]
        return KVCache(self.k_pages, self.v_pages, layout, format, self.k_scale, self.v_scale, None, False)

    def batch(self) -> Batch:
        return Batch(self.page_table, self.kv_lens, self.q_starts, max_q_len=self.max_q_len, max_kv_len=self.max_kv_len)

    def options(self) -> Options:
        given = {name: getattr(self, name) for name in OPTIONS}
        return Options(**given | {"window": None if self.window == (None, None) else self.window})

    @property
    def features(self) -> dict[str, bool]:
        """Which optional arguments the call needs, by name: those with another value than their default."""
        return {name: self._is_given(name) for name in FEATURES}

    def _is_given(self, name: str) -> bool:
        value = getattr(self, name)
        return isinstance(value, torch.Tensor) or value != DEFAULTS[name]

    # What a kernel must leave alone.

    def inputs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor that a kernel reads."""
        names = ("q", "k_pages", "v_pages", "page_table", "kv_lens", "q_starts", "k_scale", "v_scale", "new_k", "new_v")
        for name in (*names, "causal", "alibi", "sinks", "mask", "positions"):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                yield name, value

    def seal(self) -> KernelCall:
        """Stamps the outputs and takes checksums of all else."""
        self.broken_elsewhere = ()
        for tensor in (self.out, self.lse):
            if tensor is not None:
                whole_of(tensor).fill_(self.stamp)
        self.seals |= {name: (t, checksum(t)) for name, t in self.inputs() if name not in self.seals}
        return self

    def broken_seals(self) -> list[str]:
        """Inputs that a kernel changed, and guards or padding rows it wrote to."""
        found = [name for name, (tensor, was) in self.seals.items() if checksum(tensor) != was]
        for name, tensor in (("out", self.out), ("lse", self.lse)):
            if tensor is None:
                continue
            whole, inner = whole_of(tensor), bytes_of(tensor).numel()
            for place, part in (("before", whole[:GUARD]), ("behind", whole[GUARD + inner :])):
                if bool((part != self.stamp).any()):
                    found.append(f"{place} {name}")
            if self.live < self.tokens and bool((bytes_of(tensor[self.live :]) != self.stamp).any()):
                found.append(f"padding rows of {name}")
        return list(dict.fromkeys((*found, *self.broken_elsewhere)))

    def unwritten(self) -> torch.Tensor:
        """Which elements of out still bear the stamp, bool [tokens, q_heads, v_head_dim]."""
        width = self.out.dtype.itemsize
        return (bytes_of(self.out).view(*self.out.shape, width) == self.stamp).all(-1)


DEFAULTS = {spec.name: spec.default for spec in fields(KernelCall) if spec.default is not MISSING}
FEATURES = (*(name for name in OPTIONS if name in DEFAULTS and name != "out_scale"), "k_scale", "v_scale", "new_k", "new_v")


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A tensor between two guards of the same allocation."""
    size = dtype.itemsize
    for n in shape:
        size *= n
    whole = torch.empty(size + 2 * GUARD, dtype=torch.uint8, device=device)
    return whole[GUARD : GUARD + size].view(dtype).view(shape)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """A guarded tensor and its guards, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in order, without the gaps between its elements."""
    # A tensor of one element may have any stride and still counts as contiguous.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def checksum(tensor: torch.Tensor) -> int:
    """A sum over the bits of a tensor that depends on their order."""
    if tensor.numel() == 0:
        return 0
    data = bytes_of(tensor)
    cut = data.numel() // 8 * 8
    aligned = data[:cut].clone() if data.storage_offset() % 8 else data[:cut]
    words = aligned.view(torch.int64)
    order = torch.arange(1, words.numel() + 1, device=data.device, dtype=torch.int64)
    return int((words * (2 * order + 1)).sum()) ^ int((data[cut:].to(torch.int64) * 31).sum())
