"""Shared by the adapters: declared limits as data, and the cache of a call in the shapes that other libraries take."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cached_property
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from quire.cache.format import FORMATS
from quire.cache.layout import layout_named
from quire.conformance.cases.call import KernelCall
from quire.conformance.runner.target import Target, facts
from quire.problem import Problem

Rules = dict[str, Callable[[Problem], bool]]
"""The requirements of a library: a description, and a function that checks a call."""

LARGEST_COPY = 2**32
"""The most bytes of a cache that an adapter converts to another layout."""


def peer(
    name: str,
    run: Callable[[View], None],
    device: str,
    *,
    takes: str,
    rules: Rules,
    cannot: Callable[[KernelCall], str | None] = lambda call: None,
    refuses: bool = False,
    version: str = "",
) -> Target:
    """A target for a library that `takes` these optional arguments and declares these rules. `cannot` returns a reason if a call
    cannot be expressed in its arguments. Unless the library `refuses` unsupported calls itself, such calls are skipped."""
    known = set(takes.split())

    def limits(call: KernelCall) -> str | None:
        problem = facts(call)
        broken = [words for words, holds in rules.items() if not holds(problem)]
        return f"it requires {'; '.join(broken)}" if broken else None

    def missing(call: KernelCall) -> str | None:
        lacks = [feature for feature, present in call.features.items() if present and feature not in known]
        if call.lse is not None and "lse" not in known:
            lacks.append("lse")
        return f"no argument for {', '.join(lacks)}" if lacks else cannot(call)

    return Target(name, lambda call: run(View(call)), device, limits, missing, refuses, version)


def release(package: str, module: ModuleType) -> str:
    """The version of an installed package; without metadata, a checksum of the file under test."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        given = str(getattr(import_module(package), "__version__", ""))
        return given or f"unknown release, file {zlib.crc32(Path(module.__file__ or '').read_bytes()):08x}"


class View:
    """A call in the shapes that other libraries take. Nothing is copied unless the shape requires it."""

    def __init__(self, call: KernelCall):
        self.call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)

    @cached_property
    def page_table(self) -> torch.Tensor:
        """The page table as engines pass it to these libraries: an entry of -1, which must not be read, becomes 0. They
        may read such entries, and -1 would be an illegal address on a GPU."""
        return self.call.page_table.clamp(min=0)

    @cached_property
    def q_lens(self) -> torch.Tensor:
        return self.call.q_starts.diff()

    @property
    def max_q(self) -> int:
        """The largest q_len, computed: these libraries rely on it, while a hint of a case may be too low."""
        return int(self.q_lens.max()) if self.q_lens.numel() else 0

    @property
    def max_kv(self) -> int:
        return int(self.call.kv_lens.max()) if self.call.kv_lens.numel() else 0

    @property
    def sides(self) -> tuple[int, int]:
        """The window in FlashAttention's convention: -1 is unbounded, and the right side of a causal call is 0."""
        left, right = self.call.window
        return -1 if left is None else left, 0 if self.call.causal is True else -1 if right is None else right

    @cached_property
    def token_major(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [pages, page_size, kv_heads, dim], views."""
        found = token_major(self.call)
        assert found is not None
        return found

    @cached_property
    def new_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the new tokens, [tokens, kv_heads, dim] in the dtype of q: from the call, or read from the cache."""
        if self.call.new_k is not None and self.call.new_v is not None:
            return self.call.new_k, self.call.new_v
        call, (k, v) = self.call, repacked(self.call)
        slots = call.batch().slots_of_tokens(call.tokens, call.page_size)
        page, offset = slots.clamp(min=0) // call.page_size, slots.clamp(min=0) % call.page_size
        live = (slots >= 0)[:, None, None]
        return tuple(  # type: ignore[return-value]
            torch.where(live, dequantised(pages[page, offset], scale, page, offset), 0.0).to(call.q.dtype)
            for pages, scale in ((k, call.k_scale), (v, call.v_scale))
        )

    @cached_property
    def x_packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """vLLM's pair: K [pages, kv_heads, head_dim/x, page_size, x], x of 16 bytes, and V [pages, kv_heads, dim, page_size]."""
        call = self.call
        x = 16 // call.k_pages.element_size()
        if call.layout == "vllm_x" and call.k_pages.shape[-1] == x:
            return indexable(call.k_pages), indexable(call.v_pages)
        k, v = (indexable(pages) for pages in repacked(call))
        return k.unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4).contiguous(), v.permute(0, 2, 3, 1).contiguous()


def token_major(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor] | None:
    """K and V as [pages, page_size, kv_heads, dim] without a copy; None if the layout splits an axis."""
    layout, found = layout_named(call.layout), []
    for order, pages in ((layout.k, call.k_pages), (layout.v, call.v_pages)):
        view = order.view(pages)
        if view.shape[2] != 1 or view.shape[4] != 1:
            return None
        found.append(typed(call, view[:, :, 0, :, 0].transpose(1, 2)))
    return found[0], found[1]


def repacked(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as [pages, page_size, kv_heads, dim], copied if the layout requires it."""
    layout = layout_named(call.layout)
    return token_major(call) or (
        typed(call, layout.k.unpack(indexable(call.k_pages)).view(call.k_pages.dtype)),
        typed(call, layout.v.unpack(indexable(call.v_pages)).view(call.v_pages.dtype)),
    )


def cannot_repack(call: KernelCall) -> str | None:
    """A reason if converting the cache to another layout would take too much memory."""
    size = call.k_pages.numel() * call.k_pages.element_size()
    return f"a cache of {size >> 30} GiB that must be converted to another layout" if size > LARGEST_COPY else None


def cannot_view(call: KernelCall) -> str | None:
    return None if token_major(call) is not None else f"layout {call.layout}, which splits an axis"


def dequantised(x: torch.Tensor, scale: torch.Tensor | None, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Stored elements [n, kv_heads, dim] as numbers."""
    if scale is None:
        return x.float()
    return x.float() * (scale[page, offset, :, None] if scale.dim() == 3 else scale if scale.dim() == 0 else scale[:, None])


def typed(call: KernelCall, pages: torch.Tensor) -> torch.Tensor:
    """Pages in the dtype of their format; bytes are reinterpreted."""
    return pages.view(FORMATS[call.format].dtype) if pages.dtype is torch.uint8 else pages


def indexable(pages: torch.Tensor) -> torch.Tensor:
    """One-byte floats as bytes, which every operator can copy."""
    return pages.view(torch.uint8) if pages.element_size() == 1 else pages


def scale_of(scale: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device) if scale is None else scale
