"""A paged KV cache of one layer: pages of K and V, how they are laid out, how they are stored, and their scales."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from quire.cache.copies import AppliedCopies, Copies
from quire.cache.format import FORMATS, Format, formats_given, formats_of_storage
from quire.cache.groups import check_layout, check_pages, split
from quire.cache.hadamard import checked_hadamard
from quire.cache.latent_rows import check_latent_pages, check_latent_sizes, rotated_view
from quire.cache.layout import Layout, layout_named
from quire.cache.ledger import Ledger
from quire.cache.memory import overlaps_itself, share_memory
from quire.cache.packing import pack
from quire.cache.swap import HostPages
from quire.errors import ArgumentError, describe
from quire.keywords import with_pointers

if TYPE_CHECKING:
    from quire.cache.pool import PagePool

Scale = float | torch.Tensor | None
MOST_DIM = 512
"""The largest size of a head of K, and of V."""
MOST_LATENT = 576
"""The largest size of a head of K of which V is a part, or all."""
_made: WeakKeyDictionary[PagePool, int] = WeakKeyDictionary()
"""How many caches were made for each pool."""


class PageStrides(NamedTuple):
    """Strides of the pages of K or V."""

    strides: tuple[int, ...]
    """Strides of [page, head, slot/, slot%, dim/, dim%]. An axis of length 1 has stride 0, so that the compiler can drop the term
    and see alignment. The page axis keeps its stride: kernels are not compiled for the number of pages."""
    slot_part: int
    """The length of slot%."""
    dim_part: int
    """The length of dim%."""

    @classmethod
    def of(cls, view: torch.Tensor) -> PageStrides:
        strides = [stride if size > 1 else 0 for stride, size in zip(view.stride(), view.shape)]
        return cls((view.stride(0), *strides[1:]), view.shape[3], view.shape[5])


class Storage(NamedTuple):
    """The properties of a cache that a kernel is compiled for."""

    kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    format: str
    v_format: str
    layout: str
    scales: str
    k_pages: PageStrides
    v_pages: PageStrides
    k_scale_strides: tuple[int, ...]
    """By page, slot and head, 0 where the scale is shared; empty without scales."""
    v_scale_strides: tuple[int, ...]
    far: bool
    """Whether offsets of elements reach 2^31, so that they need 64 bits."""
    aligned_pages: bool
    """Whether K and V start at multiples of 16 bytes."""
    stride_units: tuple[int, int]
    """For aligned memory, the divisors of the strides of K's and V's heads: gcd(16, head_dim)."""
    v_in_k: bool
    """Whether V is the first `v_head_dim` elements of K."""


class KVCache:
    """The paged keys and values of one layer. It only holds data: `quire.write` writes it, `quire.attend` reads it. Make one with
    `KVCache.allocate` or `KVCache.wrap`.

    A pickled cache is its description: sizes, layout, format, scales, device and whether it keeps a ledger. It is unpickled as a
    new cache of zeros, in contiguous memory and without a pool; scales per token are 1 again. A deep copy has the contents too, and
    a copy of the pool.

    Example:
        >>> import torch, quire
        >>> pool = quire.PagePool(pages=8, page_size=16)
        >>> quire.KVCache.allocate(pool, kv_heads=2, head_dim=64)
        KVCache(8 pages x 16 slots x 2 heads x 64, bf16, layout=nhd, cpu)
    """

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Layout,
        format: Format | tuple[Format, Format],
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        pool: PagePool | None,
        ledger: bool,
        v_in_k: bool = False,
    ):
        self._k, self._v, self._k_scale, self._v_scale = k, v, k_scale, k_scale if v_in_k else v_scale
        self.layout: Layout = layout
        """The order of the axes of a page; `layout.name` is nhd, hnd, vllm_x, vllm_joint or aiter."""
        self.k_format, self.v_format = format if isinstance(format, tuple) else (format, format)
        """How an element of K and of V is stored; `name` is a key of `quire.cache.format.FORMATS`, such as bf16 or nvfp4."""
        self.hadamard: bool = False
        """Whether `write` and `attend` transform keys and queries by a Hadamard matrix."""
        self.pool: PagePool | None = pool
        """The pool that allocates the pages, or None."""
        self.number: int = 0
        """Which cache of its pool it is, in the order in which they were made, from 1 on; 0 without a pool."""
        if pool is not None:
            self.number = _made[pool] = _made.get(pool, 0) + 1
        (self.k_view, self.k_groups), (self.v_view, self.v_groups) = (
            split(order.view(storage), found, order)
            for order, storage, found in ((layout.k, k, self.k_format), (layout.v, v, self.v_format))
        )
        """Views of K and V, `[pages, kv_heads, slot/, slot%, dim/, dim%]` (see `quire.cache.layout`). A format that packs elements
        has fewer elements of storage than dims. Scales of groups have views of their own, `[.., group/, group%]`, else None."""
        pages, kv_heads, slot_hi, slot_lo, _, _ = self.k_view.shape
        self.pages: int = pages
        """Number of pages."""
        self.kv_heads: int = kv_heads
        """Number of heads."""
        self.page_size: int = slot_hi * slot_lo
        """Slots of a page."""
        self.head_dim: int = self.k_format.elements_in(self.k_view.shape[4] * self.k_view.shape[5])
        """Size of a head of K."""
        self.v_head_dim: int = self.v_format.elements_in(self.v_view.shape[4] * self.v_view.shape[5])
        """Size of a head of V."""
        self.v_in_k: int | None = self.v_head_dim if v_in_k else None
        """The number of elements of a key that are also its value; None if V is stored by itself."""
        self.written_dims, self.written_views, self.written_formats = self._written()
        """Sizes, views and formats of what a write stores: K and V, or the first `v_in_k` elements of K and the others."""
        self.ledger: Ledger | None = Ledger(pages, self.page_size, k.device, pool) if ledger else None
        """A `Ledger` that records every write, or None."""
        self.packed: Any = None
        """Data that the native kernels cache."""
        self.applied = AppliedCopies()
        """The ids of the copies that were applied."""
        self.copied: deque[tuple[tuple[int, int], ...]] = deque(maxlen=256)
        """The last copies without an id that were applied, compared by identity."""

    def _written(self) -> tuple[tuple[int, int], tuple[torch.Tensor, torch.Tensor], tuple[Format, Format]]:
        if self.v_in_k is None:
            return (self.head_dim, self.v_head_dim), (self.k_view, self.v_view), (self.k_format, self.v_format)
        dims = self.v_head_dim, self.head_dim - self.v_head_dim
        if self.k_format.latent:
            return dims, (self.v_view, rotated_view(self.k_view, self.k_format)), (self.k_format, FORMATS["bf16"])
        return dims, (self.v_view, self.k_view[..., self.v_view.shape[5] :]), (self.k_format, self.k_format)

    # Views and sizes are computed once, so k and v cannot be assigned. The getters are Python functions because torch.compile
    # cannot trace operator.attrgetter.
    @property
    def k(self) -> torch.Tensor:
        """The storage of K, in the shape of the layout; quantised formats may be stored as torch.uint8."""
        return self._k

    @property
    def v(self) -> torch.Tensor:
        """The storage of V, likewise."""
        return self._v

    @property
    def k_scale(self) -> torch.Tensor | None:
        """The scales of K: fp32 `[]`, `[kv_heads]` or `[pages, page_size, kv_heads]`; None if the format is not quantised. May be
        replaced by a tensor of the same shape."""
        return self._k_scale

    @k_scale.setter
    def k_scale(self, scale: torch.Tensor | None) -> None:
        self._k_scale = scale
        if self.v_in_k is not None:
            self._v_scale = scale
        self.__dict__.pop("storage", None)

    @property
    def v_scale(self) -> torch.Tensor | None:
        """The scales of V, likewise; those of K if V is a part of K."""
        return self._v_scale

    @v_scale.setter
    def v_scale(self, scale: torch.Tensor | None) -> None:
        if self.v_in_k is not None and scale is not self._k_scale:
            raise ArgumentError("v_scale", describe(scale), "k_scale, which is the scale of V too: V is a part of K")
        self._v_scale = scale
        self.__dict__.pop("storage", None)

    @cached_property
    def storage(self) -> Storage:
        """The properties that a kernel is compiled for; computed again when a scale is replaced."""
        return self._describe_storage()

    def _describe_storage(self) -> Storage:
        views = (self.layout.k.view(self._k), self.layout.v.view(self._v))
        reach = max(sum((size - 1) * stride for size, stride in zip(view.shape, view.stride())) for view in views)
        begins = (t.data_ptr() or t.storage_offset() * t.element_size() for t in (self._k, self._v))
        return Storage(
            self.kv_heads,
            self.head_dim,
            self.v_head_dim,
            self.page_size,
            self.k_format.name,
            self.v_format.name,
            self.layout.name,
            self.scale_kind,
            PageStrides.of(self.k_view),
            PageStrides.of(self.v_view),
            _scale_strides(self._k_scale),
            _scale_strides(self._v_scale),
            reach >= 2**31,
            not any(begin % 16 for begin in begins),
            (math.gcd(16, self.head_dim), math.gcd(16, self.v_head_dim)),
            self.v_in_k is not None,
        )

    @property
    def format(self) -> Format:
        """How an element is stored, where K and V have the same format; ArgumentError where they differ."""
        if self.k_format is not self.v_format:
            raise ArgumentError("cache", f"K as {self.k_format} and V as {self.v_format}", "one format for both")
        return self.k_format

    @property
    def formats(self) -> str:
        """The formats in words: one name, or K's and V's."""
        return str(self.k_format) if self.k_format is self.v_format else f"{self.k_format}/{self.v_format}"

    @property
    def quantised(self) -> bool:
        """Whether K or V is quantised."""
        return self.k_format.quantised or self.v_format.quantised

    @classmethod
    @with_pointers
    def allocate(
        cls,
        pool: PagePool,
        *,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        v_in_k: int | None = None,
        dtype: torch.dtype | None = None,
        format: str | None = None,
        k_format: str | None = None,
        v_format: str | None = None,
        layout: str = "nhd",
        x: int | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        scales: str | None = None,
        hadamard: bool = False,
        ledger: bool = False,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """Allocates the cache of one layer for the pages of `pool`.

        Args:
            pool: The pool that allocates the pages.
            kv_heads, head_dim, v_head_dim: Sizes; 1 to 512 for the dims. `v_head_dim` defaults to `head_dim`.
            v_in_k: V is the first `v_in_k` elements of K, or all (latent attention): head_dim up to 576, layout nhd or hnd.
            dtype: The storage type, which determines the format. Default: that of the format, bf16 without one.
            format: The name of the format; required for torch.uint8 and optional otherwise.
            k_format, v_format: The format of K and of V, where it is not `format` or that of `dtype`.
            layout: nhd, hnd, vllm_x, vllm_joint or aiter. vllm_joint has one format for both; nvfp4 is nhd or hnd.
            x: The length of the split axis, for layouts that split one, in elements of storage. Default: 16 bytes.
            k_scale, v_scale: For quantised formats: a number, or fp32 `[]` or `[kv_heads]`. Default: 1 for fp8 and nvfp4.
            scales: "token": `write` computes one scale for each token and head of what is quantised.
            hadamard: Whether keys are Hadamard-transformed before they are quantised, and queries alike: less error with 4 bits.
            ledger: Whether to record every write, so that a read of a slot that was never written, or is stale, is detected.
            device: Default: the pool's device.

        Raises:
            ArgumentError: A size, format, layout, scale or device is not allowed.

        Example:
            >>> import torch, quire
            >>> pool = quire.PagePool(pages=8, page_size=16)
            >>> quire.KVCache.allocate(pool, kv_heads=2, head_dim=64, dtype=torch.float16, layout="hnd").k.shape
            torch.Size([8, 2, 16, 64])
        """
        _check_pool(pool)
        order, dims, of_k = layout_named(layout), (head_dim, head_dim if v_head_dim is None else v_head_dim), v_in_k is not None
        if v_in_k is not None:
            _check_v_in_k(v_in_k, order, v_head_dim=v_head_dim, v_format=v_format, v_scale=v_scale)
            v_format, dims = k_format, (head_dim, v_in_k)
        formats = formats_given(dtype, format, k_format, v_format)
        _check_sizes(order, kv_heads, *dims, formats, of_k)
        place, size = _device(device, pool.device), (pool.pages, pool.page_size, kv_heads)
        pages = _allocated(order, size, dims[:1] if of_k else dims, formats, x, dtype, place)
        both = (k_scale, v_scale) if scales is None else _token_scales(scales, formats, k_scale, v_scale, size, place)
        how: dict[str, Any] = {"layout": layout, "k_format": formats[0].name, "head_dim": head_dim, "k_scale": both[0]}
        how |= {"v_in_k": v_in_k} if of_k else {"v_format": formats[1].name, "v_scale": both[1]}
        return cls.wrap(*pages, **how, hadamard=hadamard, pool=pool, ledger=ledger)

    @classmethod
    @with_pointers
    def wrap(
        cls,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor | None = None,
        *,
        layout: str,
        format: str | None = None,
        k_format: str | None = None,
        v_format: str | None = None,
        head_dim: int | None = None,
        v_in_k: int | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        hadamard: bool = False,
        pool: PagePool | None = None,
        ledger: bool = False,
    ) -> KVCache:
        """Makes a cache over existing memory. Nothing is copied. Any strides are allowed: padded pages, or K and V as views of one
        tensor.

        Args:
            k_pages, v_pages: The pages of K and of V, in the shape of the layout. A joint layout has one tensor, `k_pages`.
            layout: nhd, hnd, vllm_x, vllm_joint or aiter.
            format: The name of the format; required for torch.uint8 and optional otherwise.
            k_format, v_format: The format of K and of V, where they differ.
            head_dim: Where a joint layout splits K and V. Default: the middle.
            v_in_k: As in `allocate`: V is the first elements of `k_pages`, the one tensor.
            k_scale, v_scale: For quantised formats: a number, or fp32 `[]`, `[kv_heads]` or `[pages, page_size, kv_heads]`.
            pool: The pool that allocates these pages, if there is one.
            hadamard, ledger: As in `allocate`.

        Raises:
            ArgumentError: A tensor does not fit the layout, the format or the other arguments, or elements overlap.

        Example:
            >>> import torch, quire
            >>> pages = torch.zeros(8, 16, 2, 64, dtype=torch.float16)  # [pages, page_size, kv_heads, head_dim]
            >>> quire.KVCache.wrap(pages, pages.clone(), layout="nhd").page_size
            16
        """
        order = layout_named(layout)
        _check_pages(k_pages, v_pages, head_dim)
        if v_in_k is not None:
            _check_v_in_k(v_in_k, order, v_pages=v_pages, v_format=v_format, v_scale=v_scale)
            v_format = k_format
        formats = formats_of_storage(k_pages, k_pages if v_pages is None else v_pages, format, k_format, v_format)
        _check_layout(order, formats)
        check_latent_pages(k_pages, formats, v_in_k)
        k, v = _storage_of(order, k_pages, v_pages, head_dim, v_in_k, formats[0])
        if k.device != v.device:
            raise ArgumentError("v_pages", describe(v), f"the device of k_pages, {describe(k)}")
        size = _common_size(order, k, v, head_dim, formats, v_in_k is not None)
        if pool is not None and (pool.pages, pool.page_size) != size[:2]:
            allowed = f"{size[0]} pages of {size[1]}, the size of k_pages"
            raise ArgumentError("pool", f"{pool.pages} pages of {pool.page_size}", allowed)
        scale = _scales(k_scale, v_scale if v_in_k is None else k_scale, formats, size, k.device)
        cache = cls(k, v, order, formats, *scale, pool, ledger, v_in_k is not None)
        cache.hadamard = checked_hadamard(hadamard, cache.head_dim, formats[0], v_in_k)
        cache.check_memory()
        return cache

    def check_memory(self) -> None:
        """Raises `ArgumentError` if elements overlap in memory. While a graph is traced addresses are unknown; the check runs with
        the graph."""
        for name, view in (("k_pages", self.layout.k.view(self.k)), ("v_pages", self.layout.v.view(self.v))):
            if overlaps_itself(view):
                raise ArgumentError(
                    name, f"strides {view.stride()} over {list(view.shape)}", "memory in which no two elements overlap"
                )
        if self.v_in_k is None and share_memory(self.k, self.v):
            raise ArgumentError("v_pages", "memory shared with k_pages", "memory that does not overlap k_pages")
        scales = (("k_scale", self.k_scale), ("v_scale", None if self.v_in_k is not None else self.v_scale))
        per_token = {name: t for name, t in scales if t is not None and t.dim() == 3}
        for name, scale in per_token.items():
            others = [other for word, other in per_token.items() if word != name]
            if overlaps_itself(scale) or any(share_memory(scale, other) for other in others):
                raise ArgumentError(name, "scales that share memory", "separate memory for each scale: write computes them")

    @property
    def device(self) -> torch.device:
        """The device of the pages."""
        return self.k.device

    @property
    def scale_kind(self) -> str:
        """The granularity of the scales: 'none', 'tensor', 'head' or 'token'; of K's, or of V's where K has none."""
        scale = self.v_scale if self.k_scale is None else self.k_scale
        return "none" if scale is None else ("tensor", "head", "", "token")[scale.dim()]

    def copy_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copies whole pages with their K, V, scales and ledger entries, as copy-on-write requires. All sources are read before any
        target is written. `quire.write` calls it for the copies of its batch.

        Args:
            copies: (source, target) page ids. Those of a pool (`batch.copies`, `pool.extend`) have an id and are applied once,
                however often they are given; other pairs are applied every time.

        Raises:
            ArgumentError: A page id is not in the cache, or two pairs have the same target.
        """
        pairs = self._pairs(copies)
        if not pairs or self.has_applied(pairs):
            return
        source, target = torch.tensor(pairs, device=self.device).unbind(1)
        for tensor in self._page_data():
            tensor.index_copy_(0, target, tensor.index_select(0, source))
        if self.ledger is not None:
            self.ledger.copy_pages(source, target)
        if isinstance(pairs, Copies):
            self.applied.add(pairs.id)
        else:
            self.copied.append(pairs)

    def swap_out(self, pages: Iterable[int]) -> HostPages:
        """Copies pages to host memory, with their scales per token and their ledger entries. From a GPU this is one asynchronous
        copy to pinned memory, on the current stream: work that is queued later may overwrite the pages.

        Args:
            pages: Page ids, as `PagePool.swap_out` returns them.

        Raises:
            ArgumentError: A page id is not in the cache or is given twice.
        """
        index = self._page_index(pages)
        memory, parts = pack([tensor.index_select(0, index) for tensor in self._swapped_data()])
        if memory.device.type == "cuda":
            memory = torch.empty_like(memory, device="cpu", pin_memory=True).copy_(memory, non_blocking=True)
        return HostPages(memory.cpu(), tuple(parts), self._stored_as(), self.layout.name)

    def swap_in(self, host: HostPages, pages: Iterable[int]) -> None:
        """Copies pages from host memory back, into other pages of this cache or of one of the same kind. To a GPU this is one
        asynchronous copy on the current stream.

        Args:
            host: What `swap_out` returned.
            pages: Page ids, as many as `host` has, as `PagePool.swap_in` returns them.

        Raises:
            ArgumentError: `host` has pages of another kind, or the page ids are too many or too few, not in the cache, or given
                twice.
        """
        index, tensors = self._page_index(pages), self._swapped_data()
        kind = self._stored_as(), self.layout.name, tuple((t.dtype, tuple(t.shape[1:])) for t in tensors)
        if not isinstance(host, HostPages) or host.kind != kind:
            raise ArgumentError("host", describe(host), f"pages that swap_out of a cache as this one returned: {self}")
        if len(index) != host.pages:
            raise ArgumentError("pages", f"{len(index)} page ids", f"{host.pages}, the number of pages of host")
        memory = host.memory.to(self.device, non_blocking=True)
        for tensor, part in zip(tensors, host.parts):
            tensor.index_copy_(0, index, part.of(memory))

    def _stored_as(self) -> str:
        """The formats in words, and whether keys are transformed."""
        return f"hadamard {self.formats}" if self.hadamard else self.formats

    def _page_data(self) -> list[torch.Tensor]:
        """What a page holds, each `[pages, ...]`: K, V and the scales per token and head."""
        scales = [t for t in (self.k_scale, self.v_scale) if t is not None and t.dim() == 3]
        return [self.k_bytes, *scales[:1]] if self.v_in_k is not None else [self.k_bytes, self.v_bytes, *scales]

    def _swapped_data(self) -> list[torch.Tensor]:
        return self._page_data() + ([] if self.ledger is None else self.ledger.page_columns())

    def _page_index(self, pages: Iterable[int]) -> torch.Tensor:
        """Page ids as an index, validated."""
        if not isinstance(pages, Iterable) or isinstance(pages, (str, bytes, torch.Tensor)):
            raise ArgumentError("pages", describe(pages), f"page ids in [0, {self.pages})")
        ids = list(pages)
        for page in ids:
            if not _is_page(page, self.pages):
                raise ArgumentError("pages", describe(page), f"page ids in [0, {self.pages})")
        if len(set(ids)) < len(ids):
            raise ArgumentError("pages", ids, "each page once")
        return torch.tensor(ids, dtype=torch.int64, device=self.device)

    def has_applied(self, copies: tuple[tuple[int, int], ...]) -> bool:
        """Whether copies with an id were applied to this cache; False for copies without an id."""
        return isinstance(copies, Copies) and copies.id in self.applied

    def _pairs(self, copies: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """The copies as a tuple of pairs, validated."""
        allowed = f"(source, target) page ids in [0, {self.pages})"
        if not isinstance(copies, Iterable) or isinstance(copies, (str, bytes, torch.Tensor)):
            raise ArgumentError("copies", describe(copies), f"pairs of {allowed}")
        pairs = copies if isinstance(copies, tuple) else tuple(copies)
        for pair in pairs:
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(_is_page(page, self.pages) for page in pair)):
                raise ArgumentError("copies", describe(pair), allowed)
        if len({target for _, target in pairs}) < len(pairs):
            raise ArgumentError("copies", tuple(pairs), "each target once")
        return pairs

    def record(self, slots: torch.Tensor, positions: torch.Tensor | None = None, writers: torch.Tensor | None = None) -> None:
        """Records in the ledger, if there is one, that tokens were written with the scales of this cache. Without `positions` the
        slots count as written, position unknown."""
        if self.ledger is not None:
            self.ledger.record(slots, positions, writers, self.scale_mark())

    def scale_mark(self) -> torch.Tensor | None:
        """A hash of the values of `k_scale` and `v_scale`, int64 `[]` on the cache's device; None if there are no scales or `write`
        computes one per token. Nothing is read on the host."""
        scales = [scale for scale in (self.k_scale, self.v_scale) if scale is not None]
        if not scales or self.scale_kind == "token":
            return None
        bits = torch.cat([scale.reshape(-1) for scale in scales]).view(torch.int32).to(torch.int64)
        # A polynomial of the bits, modulo 2**64; the lowest bit is set, because 0 means unknown.
        powers = torch.full_like(bits, 6364136223846793005).cumprod(0)
        return (bits * powers).sum() * 2 + 1

    def __reduce__(self) -> tuple[Any, ...]:
        k, v = self.k_view.shape, self.v_view.shape
        orders = ((self.layout.k, k), (self.layout.v, v))
        described = {
            "size": (self.pages, self.page_size, self.kv_heads),
            "dims": (self.head_dim, self.v_head_dim),
            "x": [view[5 if order.split == "dim" else 3] if order.split else 1 for order, view in orders],
            "layout": self.layout.name,
            "formats": (self.k_format.name, self.v_format.name),
            "dtypes": (self.k.dtype, self.v.dtype),
            "device": self.device,
            "ledger": self.ledger is not None,
            "v_in_k": self.v_in_k,
            "hadamard": self.hadamard,
        }
        scales = (None if t is None else "token" if t.dim() == 3 else t.cpu().numpy() for t in (self.k_scale, self.v_scale))
        return _restored, (described, tuple(scales))

    def __copy__(self) -> KVCache:
        """Another cache over the same pages, scales and ledger."""
        cache = KVCache.__new__(KVCache)
        cache.__dict__.update(self.__dict__)
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        k, v, k_scale, v_scale = (None if t is None else t.detach().clone() for t in (self.k, self.v, self.k_scale, self.v_scale))
        assert k is not None and v is not None
        if self.v_in_k is not None:
            v = _first_of_k(k, self.layout, self.v_in_k, self.k_format)
        pool = copy.deepcopy(self.pool, memo)
        formats = (self.k_format, self.v_format)
        cache = KVCache(k, v, self.layout, formats, k_scale, v_scale, pool, self.ledger is not None, self.v_in_k is not None)
        cache.hadamard = self.hadamard
        memo[id(self)] = cache
        cache.applied, cache.copied = copy.deepcopy(self.applied), deque(self.copied, maxlen=self.copied.maxlen)
        if self.ledger is not None and cache.ledger is not None:
            cache.ledger.copy_from(self.ledger)
        return cache

    @property
    def k_bytes(self) -> torch.Tensor:
        """K with one-byte types viewed as uint8, which every torch operator can copy."""
        return _movable(self.k)

    @property
    def v_bytes(self) -> torch.Tensor:
        """V with one-byte types viewed as uint8."""
        return _movable(self.v)

    def __repr__(self) -> str:
        dims = f"{self.head_dim}" if self.v_head_dim == self.head_dim else f"{self.head_dim}/{self.v_head_dim}"
        if self.v_in_k is not None:
            dims = f"{self.head_dim} (v_in_k={self.v_in_k})"
        scales = "" if self.scale_kind == "none" else f", scales={self.scale_kind}"
        return (
            f"KVCache({self.pages} pages x {self.page_size} slots x {self.kv_heads} heads x {dims}, {self._stored_as()}, "
            f"layout={self.layout}{scales}, {self.device})"
        )


def _scale_strides(scale: torch.Tensor | None) -> tuple[int, ...]:
    return () if scale is None else (0,) * (3 - scale.dim()) + scale.stride()


def _storage_of(
    order: Layout, k_pages: torch.Tensor, v_pages: torch.Tensor | None, head_dim: int | None, v_in_k: int | None, format: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """The storage of K and that of V, from the tensors of pages that are given."""
    if v_in_k is not None:
        return k_pages, _first_of_k(k_pages, order, v_in_k, format)
    cut = None if head_dim is None else format.units_of(head_dim)
    return order.parts(*((k_pages,) if v_pages is None else (k_pages, v_pages)), head_dim=cut)


def _allocated(
    order: Layout,
    size: tuple[int, int, int],
    dims: Sequence[int],
    formats: tuple[Format, Format],
    x: int | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> list[torch.Tensor]:
    """The storage of a new cache, for heads of K and V of the sizes `dims`, or of K alone."""
    if x is not None and not order.splits:
        raise ArgumentError("x", describe(x), f"None: layout {order.name!r} splits no axis")
    x_of = [(16 // found.itemsize if x is None else x) if order.splits else 1 for found in formats]
    types = [dtype if dtype is torch.uint8 and found.itemsize == 1 else found.dtype for found in formats]
    return _zeros(order, size, [found.units_of(dim) for dim, found in zip(dims, formats)], x_of, types, device)


def _check_pool(pool: object) -> None:
    if not all(isinstance(getattr(pool, name, None), int) for name in ("pages", "page_size")):
        raise ArgumentError("pool", describe(pool), "a quire.PagePool; for memory without a pool use KVCache.wrap")


def _check_pages(k_pages: object, v_pages: object, head_dim: object) -> None:
    """Raises unless the pages are dense tensors, of V optional, and head_dim is a number."""
    for name, given in (("k_pages", k_pages), ("v_pages", v_pages)):
        if name == "v_pages" and given is None:
            continue
        if not isinstance(given, torch.Tensor) or given.layout is not torch.strided or given.is_quantized:
            raise ArgumentError(name, describe(given), "a dense tensor of pages")
    if head_dim is not None and (not isinstance(head_dim, int) or isinstance(head_dim, bool)):
        raise ArgumentError("head_dim", describe(head_dim), "an int of 1 to 512, or None")


def _zeros(
    order: Layout,
    size: tuple[int, int, int],
    units: Sequence[int],
    x: Sequence[int],
    types: Sequence[torch.dtype],
    device: torch.device,
) -> list[torch.Tensor]:
    """The storage of a cache: one tensor if the layout is joint or `units` has no V, else two. `units` are the elements of storage
    of a head of K and of V, `x` the lengths of their split axes."""
    shapes = [one.shape(*size, unit, part) for one, unit, part in zip((order.k, order.v), units, x)]
    if order.joint:
        shapes = [order.k.shape(*size, sum(units), x[0])]
    # Not torch.empty: a page that was never written then reads as zeros on every machine, which makes errors reproducible.
    return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, types)]


def _restored(described: dict[str, Any], scales: tuple[Any, ...]) -> KVCache:
    """Unpickles a cache: zeros, with the scales it had."""
    d, (k_format, v_format) = described, described["formats"]
    order, units = layout_named(d["layout"]), [FORMATS[name].units_of(dim) for dim, name in zip(d["dims"], d["formats"])]
    if d["v_in_k"] is not None:
        units, v_format, scales = units[:1], None, (scales[0], None)
    storage = _zeros(order, d["size"], units, d["x"], d["dtypes"], d["device"])
    k_scale, v_scale = (_restored_scale(scale, d["size"], d["device"]) for scale in scales)
    return KVCache.wrap(
        *storage,
        layout=d["layout"],
        k_format=k_format,
        v_format=v_format,
        v_in_k=d["v_in_k"],
        hadamard=d["hadamard"],
        head_dim=d["dims"][0],
        k_scale=k_scale,
        v_scale=v_scale,
        ledger=d["ledger"],
    )


def _restored_scale(scale: Any, size: tuple[int, int, int], device: torch.device) -> torch.Tensor | None:
    if scale is None:
        return None
    if isinstance(scale, str):
        return torch.ones(size, dtype=torch.float32, device=device)
    return torch.from_numpy(scale).to(device)


def _is_page(page: object, pages: int) -> bool:
    return isinstance(page, int) and not isinstance(page, bool) and 0 <= page < pages


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _check_layout(order: Layout, formats: tuple[Format, Format]) -> None:
    check_layout(order, formats)
    if order.joint and formats[0] is not formats[1]:
        given = f"{formats[1].name!r}, with {formats[0].name!r} for K"
        raise ArgumentError("v_format", given, f"the format of K: layout {order.name!r} has K and V in one tensor")


def _check_sizes(
    order: Layout, kv_heads: int, head_dim: int, v_head_dim: int, formats: tuple[Format, Format], v_in_k: bool
) -> None:
    _check_layout(order, formats)
    for one in formats:
        check_latent_sizes(one, head_dim, v_head_dim if v_in_k else None)
    most, v_name = (MOST_LATENT, "v_in_k") if v_in_k else (MOST_DIM, "v_head_dim")
    for name, value, limit in (("kv_heads", kv_heads, 2**31 - 1), ("head_dim", head_dim, most), (v_name, v_head_dim, most)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            raise ArgumentError(name, describe(value), f"1 to {limit}")
    if v_in_k:
        _check_format_of_parts(formats[0])
    for name, value, format in (("head_dim", head_dim, formats[0]), (v_name, v_head_dim, formats[1])):
        if value % format.unit:
            raise ArgumentError(name, value, f"a multiple of {format.unit} with {format}")
    if v_in_k:
        _check_parts(v_head_dim, head_dim)


def _check_v_in_k(v_in_k: object, order: Layout, **of_v: object) -> None:
    """Raises unless V can be a part of K: nothing that describes V by itself is given, and an element of V is one of K."""
    if not isinstance(v_in_k, int) or isinstance(v_in_k, bool) or not 1 <= v_in_k <= MOST_LATENT:
        raise ArgumentError("v_in_k", describe(v_in_k), f"an int of 1 to {MOST_LATENT}, or None")
    for name, given in of_v.items():
        if given is not None:
            raise ArgumentError(name, describe(given), "None with v_in_k: V is a part of K")
    if order.joint or order.k != order.v or order.splits:
        raise ArgumentError("layout", repr(order.name), "nhd or hnd with v_in_k: K and V have the same order of axes")


def _first_of_k(k: torch.Tensor, order: Layout, v_in_k: int, format: Format) -> torch.Tensor:
    """The first elements of K, a view."""
    if k.dim() != len(order.k.names):
        allowed = f"{len(order.k.names)} axes: [{', '.join(order.k.names)}]"
        raise ArgumentError("k_pages", describe(k), allowed)
    _check_format_of_parts(format)
    head_dim = format.elements_in(k.shape[-1])
    if v_in_k % format.pack:
        raise ArgumentError("v_in_k", v_in_k, f"a multiple of {format.pack}: {format} stores {format.pack} elements in a byte")
    _check_parts(v_in_k, head_dim)
    return k[..., : format.units_of(v_in_k)]


def _check_format_of_parts(format: Format) -> None:
    """Raises if a part of K's storage does not hold a part of its elements."""
    if format.group or format.zero_point:
        allowed = ", ".join(name for name, other in FORMATS.items() if not other.group and not other.zero_point)
        raise ArgumentError("format", f"{format.name!r} with v_in_k", f"{allowed}: formats without scales of groups or zero points")


def _check_parts(v_in_k: int, head_dim: int) -> None:
    """Raises unless K has the elements of V."""
    if v_in_k > head_dim:
        raise ArgumentError("v_in_k", v_in_k, f"at most head_dim = {head_dim}")


def _device(given: torch.device | str | None, default: torch.device) -> torch.device:
    if given is None:
        return default
    try:
        if isinstance(given, torch.device | str):
            return torch.device(given)
    except RuntimeError:
        pass
    raise ArgumentError("device", describe(given), "a torch.device or its name, or None for the device of the pool")


def _token_scales(
    scales: str,
    formats: tuple[Format, Format],
    k_scale: Scale,
    v_scale: Scale,
    size: tuple[int, int, int],
    device: torch.device,
) -> tuple[torch.Tensor | None, ...]:
    """Scales of 1 for each token and head, `[pages, page_size, kv_heads]`; None for what is not quantised."""
    if not (isinstance(scales, str) and scales == "token"):
        raise ArgumentError("scales", describe(scales), "'token', or None for the scales given")
    if not any(format.scaled for format in formats) or k_scale is not None or v_scale is not None:
        names = "/".join(dict.fromkeys(format.name for format in formats))
        given = f"'token' with format {names}, k_scale {describe(k_scale)} and v_scale {describe(v_scale)}"
        raise ArgumentError("scales", given, "'token' for a quantised format, without other scales")
    return tuple(torch.ones(size, dtype=torch.float32, device=device) if format.scaled else None for format in formats)


def _common_size(
    order: Layout, k: torch.Tensor, v: torch.Tensor, head_dim: int | None, formats: tuple[Format, Format], v_in_k: bool
) -> tuple[int, int, int]:
    """(pages, page_size, kv_heads) of K and V, which must agree."""
    k_view, v_view = order.k.view(k), order.v.view(v)
    sizes = [(view.shape[0], view.shape[2] * view.shape[3], view.shape[1]) for view in (k_view, v_view)]
    if sizes[0] != sizes[1]:
        text = "pages {}, page_size {}, kv_heads {}"
        allowed = f"those of k_pages: {text.format(*sizes[0])} in layout {order.name!r}"
        raise ArgumentError("v_pages", text.format(*sizes[1]), allowed)
    dims = {}
    parts = (("k_pages", "head_dim", k_view, order.k, formats[0]), ("v_pages", "v_head_dim", v_view, order.v, formats[1]))
    for pages, name, view, axes, format in parts:
        units = view.shape[4] * view.shape[5]
        dims[name] = dim = format.elements_of(units)
        most = MOST_LATENT if v_in_k else MOST_DIM
        if not 1 <= dim <= most:
            raise ArgumentError(name, dim, f"1 to {most}")
        if dim % format.unit or format.units_of(dim) != units:
            allowed = f"{format.units_of(format.unit)} for each {format.unit} dims, with their scales"
            raise ArgumentError(pages, f"{units} bytes of a head in {format}", allowed)
        check_pages(pages, view, format, order, axes)
    if head_dim is not None and dims["head_dim"] != head_dim:
        allowed = f"{dims['head_dim']}, the head_dim of k_pages {list(k.shape)} in layout {order.name!r}"
        raise ArgumentError("head_dim", head_dim, allowed)
    if min(sizes[0][1:]) < 1:
        raise ArgumentError("k_pages", describe(k), "page_size and kv_heads of 1 or more")
    return sizes[0]


def _scales(
    k_scale: Scale, v_scale: Scale, formats: tuple[Format, Format], size: tuple[int, int, int], device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Both scales as tensors, either both per token and head or neither."""
    shapes = {"[]": (), "[kv_heads]": size[2:], "[pages, page_size, kv_heads]": size}
    given = (("k_scale", k_scale, formats[0]), ("v_scale", v_scale, formats[1]))
    for name, value, format in given:
        if format.zero_point and not (isinstance(value, torch.Tensor) and value.dim() == 3):
            allowed = f"float32 of shape [pages, page_size, kv_heads] (or scales='token'): {format} has a zero point in each scale"
            raise ArgumentError(name, describe(value), allowed)
    k, v = (_scale(name, value, format, shapes, device) for name, value, format in given)
    if k is not None and v is not None and (k.dim() == 3) != (v.dim() == 3):
        raise ArgumentError("v_scale", describe(v), f"one per token and head, as k_scale {describe(k)}, or neither")
    return k, v


def _scale(
    name: str, value: Scale, format: Format, shapes: dict[str, tuple[int, ...]], device: torch.device
) -> torch.Tensor | None:
    """One scale as an fp32 tensor of an allowed shape. In host memory values are checked: a zero or NaN scale is rejected."""
    if not format.scaled:
        if value is not None:
            why = "has its scales in the pages" if format.quantised else "is not quantised"
            raise ArgumentError(name, describe(value), f"None: format {format} {why}")
        return None
    if value is None:
        if format.integer:
            raise ArgumentError(name, None, f"a scale: {format} stores integers, {format.largest:g} in magnitude at most")
        value = 1.0
    if not isinstance(value, torch.Tensor):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ArgumentError(name, describe(value), "a finite number above 0")
        return torch.tensor(float(value), dtype=torch.float32, device=device)
    if value.dtype is not torch.float32 or tuple(value.shape) not in shapes.values():
        allowed = ", ".join(f"{words} = {list(shape)}" for words, shape in shapes.items())
        raise ArgumentError(name, describe(value), f"float32 of shape {allowed}")
    if value.device != device:
        raise ArgumentError(name, describe(value), f"on {device}, as the pages are")
    if value.device.type == "cpu" and value.dim() < 3 and type(value) is torch.Tensor:
        # Scales per token and head are not checked: those of unused slots may hold any value.
        bad = ~((value > 0) & value.isfinite())
        if bool(bad.any()):
            first = float(value.reshape(-1)[int(bad.reshape(-1).int().argmax())])
            raise ArgumentError(name, f"{describe(value)} that holds {first}", "finite numbers above 0")
    return value
