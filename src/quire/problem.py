"""A call without its tensors: what a kernel is compiled for (`Problem`), and how large one batch is (`Extent`).

A serving engine never repeats a batch, but a layer stays what it is. All that a kernel is compiled for is in the Problem, nothing
that changes from batch to batch is: the Problem and the chosen kernel are the key of the one cache of launchers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from quire.batch import Batch
from quire.cache.format import FLOAT_NAMES, FORMATS, FP8_TYPES, OCP_FP8
from quire.cache.format import dtype_name as dtype_name
from quire.cache.groups import GroupPlaces, group_places, split
from quire.cache.kv_cache import KVCache, PageStrides
from quire.cache.layout import LAYOUTS
from quire.options import FEATURES, Traits
from quire.rope import RopeTraits

ANY = 2**31 - 1
"""More new tokens than any sequence has."""
ALIGNED = 16
"""Kernels of aligned problems require that tensors start at multiples of this number of bytes."""


class Extent(NamedTuple):
    """The size of one batch: counts, and upper bounds of its lengths. They choose a kernel and size its launch; nothing is compiled
    for them.

    Example:
        >>> import quire
        >>> print(quire.Extent(seqs=64, tokens=64, max_q_len=1, max_kv_len=4096))
        decode, q <= 1, kv <= 4096
    """

    seqs: int = 1
    """Number of sequences."""
    tokens: int = 1
    """Rows of q, padding included."""
    max_q_len: int = 1
    """Upper bound of the new tokens of one sequence."""
    max_kv_len: int = 1
    """Upper bound of the tokens of one sequence that are on this rank."""
    saved_keys: int = 0
    """How many reads of keys are saved if shared prefixes are read once."""

    @classmethod
    def of(cls, rows: torch.Tensor, cache: KVCache, batch: Batch) -> Extent:
        """The extent of a call whose queries (or new keys) are `rows`. Lengths come from the hints or, without them, from shapes:
        never from a device."""
        tokens, (seqs, columns) = rows.shape[0], batch.page_table.shape
        capacity, max_q_len, max_kv_len = columns * cache.page_size, batch.max_q_len, batch.max_keys
        return cls(
            seqs,
            tokens,
            tokens if max_q_len is None or max_q_len > tokens else max_q_len,
            capacity if max_kv_len is None or max_kv_len > capacity else max_kv_len,
            0 if batch.prefixes is None else batch.prefixes.saved_pages * cache.page_size,
        )

    @property
    def mix(self) -> str:
        """decode, mixed or prefill."""
        return "decode" if self.max_q_len <= 1 else "mixed" if self.seqs > 1 else "prefill"

    def __str__(self) -> str:
        saved = f", {self.saved_keys} reads of keys shared" if self.saved_keys else ""
        return f"{self.mix}, q <= {self.max_q_len}, kv <= {self.max_kv_len}{saved}"


MOST_NARROW = 576
"""The width of the tiles of 512 and 64 elements."""


@dataclass(frozen=True)
class Problem(Traits):
    """What a kernel is compiled for: sizes, types and features of the calls of one layer, without tensors. It is hashable, and
    can be written as JSON.

    Example:
        >>> import quire
        >>> print(quire.Problem(q_heads=32, kv_heads=8, head_dim=128, page_size=16))
        32/8 heads x 128, pages of 16 nhd bf16, q bf16
    """

    q_heads: int
    """Heads of the queries."""
    kv_heads: int
    """Heads of the cache."""
    head_dim: int
    """Size of a head of q and K."""
    page_size: int
    """Slots of a page."""
    v_head_dim: int = 0
    """Size of a head of V and of the output. 0 in the constructor means: as head_dim."""
    q_dtype: str = "bf16"
    """The type of the queries."""
    out_dtype: str = ""
    """The type of the output. Empty in the constructor means: as q_dtype."""
    format: str = "bf16"
    """How the cache stores an element of K."""
    v_format: str = ""
    """How the cache stores an element of V. Empty in the constructor means: as format."""
    layout: str = "nhd"
    """nhd, hnd, vllm_x, vllm_joint or aiter."""
    scales: str = "none"
    """The granularity of the scales: none, tensor, head or token. Where one of K and V is not quantised, of those of the other."""
    index: str = "int32"
    """The type of page_table, kv_lens and q_starts; the three types joined by '+' if they differ."""
    form: str = "full"
    """full: the cache holds every token. context: the new tokens come as k and v."""
    lse: bool = False
    """Whether the call also returns the LSE."""
    device: str = "cpu"
    """The torch device of the tensors."""
    memory: str = "aligned"
    """aligned: every tensor begins at a multiple of 16 bytes, its last axis and the index tensors have stride 1, and its other
    strides are what a projection's views have. generic: anything else."""
    new_dtype: str = ""
    """The type of the new keys and values in context form; empty in the constructor means: as q_dtype, bf16 for fp8 queries."""
    q_scale: str = "none"
    """none, number (also a tensor of another device, which is read on the host) or tensor."""
    out_scale: str = "none"
    """As `q_scale`, for the output."""
    context_from: int = 1
    """Sequences with at least that many new tokens take them from `new`. Other than 1 in vLLM's operators alone."""
    only: tuple[int, int] = (0, ANY)
    """Sequences with fewer or more new tokens are not part of the call. Narrower in vLLM's operators alone."""
    k_pages: PageStrides | None = None
    """How K's pages lie in memory; None in the constructor means: as `KVCache.allocate` makes them."""
    v_pages: PageStrides | None = None
    """The same for V."""
    k_scale_strides: tuple[int, ...] | None = None
    """Strides of K's scales by page, slot and head; None in the constructor means: contiguous."""
    v_scale_strides: tuple[int, ...] | None = None
    """The same for V."""
    v_in_k: bool = False
    """Whether V is the first `v_head_dim` elements of K (`KVCache.v_in_k`)."""
    aligned_pages: bool = True
    """Whether K and V start at multiples of 16 bytes. If not, `memory` is generic."""
    far: bool = False
    """Whether offsets of elements in the cache reach 2^31, so that they need 64 bits."""
    shard: bool = False
    """Whether the cache holds only the keys of one rank (`Batch(shard=...)`)."""
    rope: RopeTraits | None = None
    """In a write: how new keys and queries are rotated; None if they are not."""
    spans: str = "none"
    """The type of the keys that each new token sees (`Batch(spans=...)`): none, int32 or int64."""
    select: str = "none"
    """Whether the batch selects keys (`Batch(select=...)`): none, positions or columns."""
    select_index: str = ""
    """The type of the selection; empty without one."""
    prefixes: bool = False
    """Whether the batch says which sequences begin with the same pages (`Batch(prefixes=...)`)."""

    def __post_init__(self) -> None:
        fill = object.__setattr__
        fill(self, "v_head_dim", self.v_head_dim or self.head_dim)
        fill(self, "v_format", self.v_format or self.format)
        fill(self, "out_dtype", self.out_dtype or self.q_dtype)
        new_dtype = self.new_dtype or ("bf16" if FORMATS[self.q_dtype].fp8 else self.q_dtype)
        fill(self, "new_dtype", new_dtype if self.form == "context" else "")
        fill(self, "select_index", "" if self.select == "none" else self.select_index or "int32")
        for name in ("window", "only"):
            fill(self, name, tuple(getattr(self, name)))
        for name in ("k_pages", "v_pages"):
            pages = getattr(self, name) or self._allocated_pages(name)
            fill(self, name, PageStrides(tuple(pages[0]), *pages[1:]))
        if self.rope is not None:
            rope = RopeTraits(*self.rope)
            fill(self, "rope", rope._replace(sections=tuple(rope.sections)))
        for name in ("k_scale_strides", "v_scale_strides"):
            strides = getattr(self, name)
            fill(self, name, tuple(self._allocated_scales(name) if strides is None else strides))
        # A Problem is looked up in every call.
        fill(self, "_hash", hash(tuple(getattr(self, name) for name in FIELDS)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def _allocated_pages(self, name: str) -> PageStrides:
        """The strides of the pages that `KVCache.allocate` makes."""
        layout = LAYOUTS[self.layout]
        order = layout.k if name == "k_pages" else layout.v
        k, v = (FORMATS[format] for format in self.formats)
        k_units, v_units = k.units_of(self.head_dim), v.units_of(self.v_head_dim)
        dim, x = (k_units, 16 // k.itemsize) if name == "k_pages" else (v_units, 16 // v.itemsize)
        if order.split and (self.page_size if order.split == "slot" else dim) % x:
            x = 1
        if self.v_in_k:
            storage = torch.empty(layout.k.shape(2, self.page_size, self.kv_heads, k_units), device="meta")
            storage = storage if name == "k_pages" else storage[..., :v_units]
        elif layout.joint:
            joint = torch.empty(order.shape(2, self.page_size, self.kv_heads, k_units + v_units, x), device="meta")
            storage = layout.parts(joint, head_dim=k_units)[name == "v_pages"]
        else:
            storage = torch.empty(order.shape(2, self.page_size, self.kv_heads, dim, x), device="meta")
        return PageStrides.of(split(order.view(storage), k if name == "k_pages" else v, order)[0])

    def _allocated_scales(self, name: str) -> tuple[int, ...]:
        if not FORMATS[self.formats[name == "v_scale_strides"]].scaled and self.mixed_formats:
            return ()
        per_token = (self.page_size * self.kv_heads, self.kv_heads, 1)
        return {"none": (), "tensor": (0, 0, 0), "head": (0, 0, 1), "token": per_token}[self.scales]

    def of_writes(self, rope: RopeTraits | None = None) -> Problem:
        """The problem of the writes of the same layer: new keys and values have the type of the queries, bf16 for fp8 queries."""
        plain: dict[str, Any] = {field.name: field.default for field in fields(Problem) if field.name in _NOT_OF_WRITES}
        dtype = "bf16" if FORMATS[self.q_dtype].itemsize == 1 else self.q_dtype
        q_heads = self.q_heads if rope is not None and rope.q else self.kv_heads
        return replace(self, **plain, q_heads=q_heads, q_dtype=dtype, out_dtype=dtype, rope=rope)

    @property
    def formats(self) -> tuple[str, str]:
        """How the cache stores an element of K and of V."""
        return self.format, self.v_format

    @property
    def mixed_formats(self) -> bool:
        """Whether K and V are stored in different formats."""
        return self.format != self.v_format

    def group_places(self, name: str) -> GroupPlaces | None:
        """Where the scales of groups of K ("k_pages") or V ("v_pages") are; None without."""
        layout, (k, v) = LAYOUTS[self.layout], self.formats
        order, format, dim = (layout.k, k, self.head_dim) if name == "k_pages" else (layout.v, v, self.v_head_dim)
        if not FORMATS[format].group:
            return None
        return group_places(FORMATS[format], order, self.page_size, self.kv_heads, dim, getattr(self, name).strides[0])

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q_heads // self.kv_heads

    @property
    def float_types(self) -> set[str]:
        """The types of more than 8 bits of queries, keys and values."""
        found = {self.q_dtype, *self.formats, self.new_dtype} & set(FLOAT_NAMES)
        # Elements of a latent have scales in fp32, or are stored in bf16: they do not fit into fp16.
        return found | ({"bf16"} if any(FORMATS[name].latent for name in self.formats) else set())

    @property
    def in_fp32(self) -> bool:
        """Whether a GPU multiplies in fp32: where a type is fp32, and with two different 16-bit types."""
        return len(self.float_types) > 1 or "fp32" in self.float_types

    @property
    def is_wide_latent(self) -> bool:
        """Whether V is a part of K, and the tiles of a key, one of V and one of the others, are together wider than 576."""
        if not self.v_in_k:
            return False
        parts = (self.v_head_dim, self.head_dim - self.v_head_dim)
        return sum(max(16, power_of_two(dim)) for dim in parts if dim) > MOST_NARROW

    @property
    def features(self) -> tuple[str, ...]:
        """The optional features this call uses, by name."""
        return tuple(name for name, is_used in _USES.items() if is_used(self))

    @property
    def index_types(self) -> tuple[str, str, str]:
        """The types of page_table, kv_lens and q_starts."""
        names = self.index.split("+")
        table, lens, starts = names if len(names) == 3 else (names[0], names[0], names[-1])
        return table, lens, starts

    def replace(self, **changes: Any) -> Problem:
        """A copy with other values of some fields."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON-compatible values."""
        return asdict(self)

    def to_json(self) -> str:
        """The problem as JSON; `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Problem:
        """The problem that `to_json` wrote."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        dim = f"{self.head_dim}" if self.v_head_dim == self.head_dim else f"{self.head_dim}/{self.v_head_dim}"
        dim += " of K" if self.v_in_k else ""
        stored = "/".join(self.formats) if self.mixed_formats else self.format
        scales = "" if self.scales == "none" else f" (scale per {self.scales})"
        parts = [
            f"{self.q_heads}/{self.kv_heads} heads x {dim}",
            f"pages of {self.page_size} {self.layout} {stored}{scales}",
            f"q {self.q_dtype}" + ("" if self.out_dtype == self.q_dtype else f" -> {self.out_dtype}"),
        ]
        said = {"window": f"window {self.window}", "rope": str(self.rope), "select": f"selected {self.select}"}
        parts += [said.get(name, name) for name in self.features if name not in ("mixed-formats", "v_in_k")]
        if self.index != "int32":
            parts.append(f"index {self.index}")
        if self.memory != "aligned":
            parts.append("strided or misaligned memory")
        return ", ".join(parts)


_USES: dict[str, Callable[[Problem], bool]] = {
    **{name: attrgetter(name) for name in (*FEATURES, "lse", "shard", "prefixes")},
    "spans": lambda problem: problem.spans != "none",
    "select": lambda problem: problem.select != "none",
    "window": lambda problem: problem.window != (None, None),
    "non-causal": lambda problem: problem.causal != "yes",
    "context-form": lambda problem: problem.form == "context",
    "rope": lambda problem: problem.rope is not None,
    "mixed-formats": attrgetter("mixed_formats"),
    "v_in_k": attrgetter("v_in_k"),
}
"""The optional features, and whether a problem uses them."""
FIELDS = tuple(field.name for field in fields(Problem))
_NOT_OF_WRITES = frozenset(
    (*(field.name for field in fields(Traits)), "form", "lse", "new_dtype", "q_scale", "out_scale", "context_from", "only", "spans")
) | {"select", "select_index", "prefixes"}


def is_aligned(tensor: torch.Tensor, unit: int) -> bool:
    """Whether a tensor [tokens, heads, dim] can be read 16 bytes at a time, like the views of a fused projection. Heads are
    addressed in 32 bits, tokens in 64."""
    token, head, last = tensor.stride()
    if last != 1 or (token | head) % unit or (token | head * tensor.shape[1]) >= 2**31:
        return False
    return (tensor.data_ptr() or tensor.storage_offset() * tensor.element_size()) % ALIGNED == 0


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype in FP8_TYPES


def default_out_dtype(q_dtype: torch.dtype, scaled: bool) -> torch.dtype:
    """The type of an output that is not given. With an `out_scale`: fp8 queries' own type, `OCP_FP8` for others. Without: the
    queries' type, bf16 for fp8 queries, since an fp8 output needs a scale of its own."""
    if scaled:
        return q_dtype if is_fp8(q_dtype) else OCP_FP8.dtype
    return torch.bfloat16 if is_fp8(q_dtype) else q_dtype


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n; 0 for 0."""
    return 0 if n < 1 else 1 << (n - 1).bit_length()
