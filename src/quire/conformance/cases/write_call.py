"""One write as tensors, independent of any library: what is stored, the cache before and after, and what must not change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from quire import Batch, KVCache, Rope
from quire.cache.format import FORMATS
from quire.cache.layout import layout_named
from quire.conformance.cases.call import GUARD, bytes_of, checksum, whole_of
from quire.conformance.cases.case import Case


@dataclass
class Places:
    """Where the elements of a part of the cache are."""

    flat: torch.Tensor
    """The whole memory as a vector of elements of storage; K and V may share it."""
    addresses: torch.Tensor
    """[pages with contents, page_size, kv_heads, units]: indices into it."""


@dataclass
class WriteCall:
    """The arguments of one write. Tensors are passed to a kernel as they are; options are plain values.

    k, v        [tokens, kv_heads, dim]                     new keys and values; rows from `live` on are padding. v is None if V is
                                                            the first elements of K
    k_pages     [pages, page_size, kv_heads, head_dim]      in layout nhd; for others see `quire.cache.layout`
    slots       [tokens]                                    page * page_size + offset; -1 for a token that is not stored
    page_table, kv_lens, q_starts                           as in `KernelCall`, or None where only slots say where tokens go
    k_scale     fp32 [], [kv_heads], or [pages, page_size, kv_heads]: the last is written too
    cos, sin    fp32 [max_positions, rotary_dim / 2], or None without a rotation
    positions   [tokens], the position by which each token is rotated
    q, q_out    [tokens, q_heads, head_dim], or None        queries to rotate, and where they go
    k_norm, q_norm [head_dim]                               weights of the norm before the rotation, or None
    """

    k: torch.Tensor
    v: torch.Tensor | None
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor | None
    kv_lens: torch.Tensor | None
    q_starts: torch.Tensor | None
    case: Case
    """What the call was made from."""
    places: dict[str, Places]
    """By part: where its elements are."""
    pages_of: torch.Tensor
    """Ids of the pages with contents."""
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    interleaved: bool = False
    positions: torch.Tensor | None = None
    q: torch.Tensor | None = None
    q_out: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 1e-6
    unit_offset: bool = False
    """Whether the norms multiply by 1 + weight."""
    hadamard: bool = False
    """Whether keys are multiplied by the Hadamard matrix H[i, j] = (-1)^popcount(i & j) / sqrt(head_dim) before they are stored."""
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    """What `contents` was before the call."""
    received: dict[str, torch.Tensor] = field(default_factory=dict)
    """What `contents` was after the call in the subprocess that ran the target."""
    memory: dict[int, torch.Tensor] = field(default_factory=dict)
    """A copy of each memory before the call, by its address; none if most of it has no contents."""
    checksums: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    changed_in_subprocess: tuple[str, ...] = ()

    @property
    def live(self) -> int:
        return self.case.live

    @property
    def tokens(self) -> int:
        return self.k.shape[0]

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def layout(self) -> str:
        return self.case.layout

    @property
    def format(self) -> str:
        """Of K, and of V unless `v_format` is given."""
        return self.case.format

    @property
    def v_format(self) -> str:
        return self.case.v_format

    @property
    def v_in_k(self) -> bool:
        return self.case.v_in_k > 0

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        return {"k": self.k_scale, "v": self.v_scale}

    @property
    def features(self) -> dict[str, bool]:
        """For each optional argument, whether the call needs it."""
        rotates, normalises = self.cos is not None, self.k_norm is not None
        needed = dict.fromkeys(("cos", "sin", "positions"), rotates) | {"q": self.q is not None}
        needed |= dict.fromkeys(("k_norm", "eps"), normalises) | {"q_norm": normalises and self.q is not None}
        needed |= {"interleaved": self.interleaved, "unit_offset": self.unit_offset, "hadamard": self.hadamard}
        needed |= {f"{part}_scale": scale is not None for part, scale in self.scales.items() if part == "k" or not self.v_in_k}
        return needed | {"v_format": bool(self.v_format), "v_in_k": self.v_in_k, "slots": self.case.slots != "batch"}

    # As values of Quire; nothing is copied.

    def cache(self) -> KVCache:
        formats = FORMATS[self.case.formats["k"]], FORMATS[self.case.formats["v"]]
        how = layout_named(self.layout), formats, self.k_scale, self.v_scale, None, False, self.v_in_k
        cache = KVCache(self.k_pages, self.v_pages, *how)
        cache.hadamard = self.hadamard
        return cache

    def batch(self) -> Batch | None:
        if self.page_table is None or self.kv_lens is None or self.q_starts is None:
            return None
        return Batch(self.page_table, self.kv_lens, self.q_starts)

    def rope(self) -> Rope | None:
        if self.cos is None or self.sin is None:
            return None
        norms: dict[str, Any] = {"q_norm": self.q_norm, "k_norm": self.k_norm, "eps": self.eps, "unit_offset": self.unit_offset}
        return Rope(self.cos, self.sin, interleaved=self.interleaved, **norms)

    # What a kernel writes, and checks that it changes nothing else.

    def contents(self) -> dict[str, torch.Tensor]:
        """Everything that a write may change, in host memory: elements of storage and scales of the pages with contents, and the
        rotated queries."""
        if self.received:
            return self.received
        found = {part: place.flat[place.addresses.to(place.flat.device)].cpu() for part, place in self.places.items()}
        for part, scale in self.scales.items():
            if scale is not None and scale.dim() == 3 and part in self.places:
                found[f"{part}_scale"] = scale[self.pages_of.clamp(min=0).to(scale.device)].cpu()
        if self.q_out is not None:
            found["q"] = self.q_out.cpu().clone()
        return found

    def inputs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor that a kernel reads and must not change."""
        rows = ("k", "v", "q", "slots", "page_table", "kv_lens", "q_starts", "positions")
        for name in (*rows, "cos", "sin", "q_norm", "k_norm", "k_scale", "v_scale"):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor) and not (name.endswith("_scale") and value.dim() == 3):
                yield name, value

    def take_checksums(self) -> WriteCall:
        """Takes checksums of the inputs, and copies of what must not change."""
        self.before = self.contents()
        self.checksums = {name: (t, checksum(t)) for name, t in self.inputs()}
        if self.case.table not in ("high", "far", "very-far"):
            self.memory = {place.flat.data_ptr(): whole_of(place.flat).clone() for place in self.places.values()}
        return self

    def changed_inputs(self) -> list[str]:
        """The names of inputs that a kernel changed, and descriptions of memory beside its outputs that it wrote to."""
        found = [name for name, (tensor, was) in self.checksums.items() if checksum(tensor) != was]
        for address, was in self.memory.items():
            mine = [place for place in self.places.values() if place.flat.data_ptr() == address]
            flat = mine[0].flat
            changed = (whole_of(flat) != was).view(-1, flat.element_size()).any(1)
            for place in mine:
                changed[place.addresses.flatten().to(changed.device)] = False
            if bool(changed.any()):
                found.append("beside the pages")
        buffers = {f"{part}_scale": scale for part, scale in self.scales.items() if scale is not None and scale.dim() == 3}
        for name, tensor in (*buffers.items(), ("q_out", self.q_out)):
            if tensor is not None:
                found += _outside(name, tensor, self.case.fill_byte)
        # Without `q_starts` a kernel cannot know which rows are padding.
        padding = None if self.q_out is None or self.q_starts is None else bytes_of(self.q_out[self.live :])
        if padding is not None and bool((padding != self.case.fill_byte).any()):
            found.append("padding rows of q_out")
        return list(dict.fromkeys((*found, *self.changed_in_subprocess)))

    # What a subprocess sends back.

    def outputs(self) -> dict[str, torch.Tensor]:
        return self.contents()

    def take_outputs(self, outputs: dict[str, torch.Tensor]) -> None:
        self.received = outputs


def _outside(name: str, tensor: torch.Tensor, fill_byte: int) -> list[str]:
    """Where a kernel wrote around a guarded tensor."""
    whole, inner = whole_of(tensor), bytes_of(tensor).numel()
    parts = (("before", whole[:GUARD]), ("after", whole[GUARD + inner :]))
    return [f"{place} {name}" for place, part in parts if bool((part != fill_byte).any())]
