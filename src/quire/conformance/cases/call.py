"""One attention call as tensors, independent of any library: the inputs of a kernel, its outputs, and guards around them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch

from quire import Batch, KVCache, Options, Prefixes, Select
from quire.cache.format import FORMATS
from quire.cache.layout import layout_named
from quire.conformance.cases.case import Case
from quire.options import TENSORS

OPTIONS = tuple(spec.name for spec in fields(Options) if spec.init)
GUARD = 4096
"""Bytes before and after each output, which must not be written."""


@dataclass
class KernelCall:
    """The arguments of one call. Tensors are passed to a kernel as they are; options are plain values.

    q           [tokens, q_heads, head_dim]                 rows from `live` on are padding
    k_pages     [pages, page_size, kv_heads, head_dim]      in layout nhd; for others see `quire.cache.layout`
    out         [tokens, q_heads, v_head_dim]               filled with `fill_byte`, with guards before and after
    lse         [tokens, q_heads] fp32, or None             as out
    new_k/new_v [tokens, kv_heads, dim] or None             context form: the cache holds only the context
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
    """Of K, and of V unless `v_format` is given."""
    v_format: str = ""
    v_in_k: bool = False
    """Whether V is a part of K: `v_pages` and `new_v` are views of the first elements of `k_pages` and `new_k`."""
    hadamard: bool = False
    """Whether stored keys are multiplied by the Hadamard matrix H[i, j] = (-1)^popcount(i & j) / sqrt(head_dim). Queries and new
    keys are not: the kernel multiplies them."""
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    new_k: torch.Tensor | None = None
    new_v: torch.Tensor | None = None
    causal: bool | torch.Tensor = True
    window: tuple[int | None, int | None] = (None, None)
    """Keys visible to the left and to the right of a query besides its own; a causal query sees no key to the right."""
    softcap: float | None = None
    alibi: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    q_scale: float | None = None
    out_scale: float | None = None
    """Divides the output, which then has an fp8 dtype and saturates."""
    batch_invariant: bool = False
    """Each sequence must give the same bits alone as in the batch."""
    shard: tuple[int, int, int] | None = None
    """(rank, ranks, interleave): the cache holds the keys whose position p has p // interleave % ranks == rank, and the page table
    their pages. Lengths count all keys; new tokens of other ranks are not visible."""
    spans: torch.Tensor | None = None
    """[tokens, 2]: each new token sees the keys [begin, end) of its sequence and no others; causality has no effect."""
    select_positions: torch.Tensor | None = None
    """[tokens, kv_heads or 1, n]: the positions of the only keys that each query sees, -1 for none; causality applies."""
    select_columns: torch.Tensor | None = None
    """[seqs, kv_heads or 1, n]: the same for all queries of a sequence, as columns of its page table."""
    prefixes: tuple[tuple[tuple[int, ...], int, int], ...] | None = None
    """(sequences, begin, end): these sequences have the same pages in columns [begin, end) of the page table, which are full pages
    before their new tokens. A hint for kernels that read such pages once; the table of each sequence is complete."""
    max_q_len: int | None = None
    max_kv_len: int | None = None
    fill_byte: int = 0xCB
    case: Case | None = None
    checksums: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    """Inputs that must not change: a view of each, and its checksum before the call."""
    changed_in_subprocess: tuple[str, ...] = ()
    """What `changed_inputs` returned in the subprocess that ran the target."""
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Cached results that depend only on the inputs."""

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
    def formats(self) -> dict[str, str]:
        return {"k": self.format, "v": self.v_format or self.format}

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def new(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        return None if self.new_k is None or self.new_v is None else (self.new_k, None if self.v_in_k else self.new_v)

    # As values of Quire; nothing is copied.

    def cache(self) -> KVCache:
        layout, formats = layout_named(self.layout), (FORMATS[self.formats["k"]], FORMATS[self.formats["v"]])
        cache = KVCache(self.k_pages, self.v_pages, layout, formats, self.k_scale, self.v_scale, None, False, self.v_in_k)
        cache.hadamard = self.hadamard
        return cache

    def batch(self) -> Batch:
        index = self.page_table, self.kv_lens, self.q_starts
        select = selection_of(self.select_positions, self.select_columns)
        prefixes = None if self.prefixes is None else Prefixes(self.prefixes, self.seqs, self.device)
        given: dict[str, Any] = {"shard": self.shard, "spans": self.spans, "select": select, "prefixes": prefixes}
        return Batch(*index, max_q_len=self.max_q_len, max_kv_len=self.max_kv_len, **given)

    def options(self) -> Options:
        given = {name: getattr(self, name) for name in OPTIONS}
        return Options(**given | {"window": None if self.window == (None, None) else self.window})

    @property
    def features(self) -> dict[str, bool]:
        """For each optional argument, whether the call needs it: whether its value is not the default."""
        return {name: self._is_given(name) for name in OPTIONAL_ARGUMENTS}

    def _is_given(self, name: str) -> bool:
        value = getattr(self, name)
        return isinstance(value, torch.Tensor) or value != DEFAULTS[name]

    # Checks that a kernel changes nothing but its outputs.

    def inputs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor that a kernel reads."""
        selected = ("spans", "select_positions", "select_columns")
        names = ("q", "k_pages", "v_pages", "page_table", "kv_lens", "q_starts", "k_scale", "v_scale", "new_k", "new_v")
        for name in (*names, *selected, "causal", *TENSORS):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                yield name, value

    def take_checksums(self) -> KernelCall:
        """Fills the outputs with `fill_byte` and takes checksums of all inputs."""
        self.changed_in_subprocess = ()
        for tensor in (self.out, self.lse):
            if tensor is not None:
                whole_of(tensor).fill_(self.fill_byte)
        self.checksums |= {name: (t, checksum(t)) for name, t in self.inputs() if name not in self.checksums}
        return self

    def changed_inputs(self) -> list[str]:
        """The names of inputs that a kernel changed, and descriptions of guards and padding rows that it wrote to."""
        found = [name for name, (tensor, was) in self.checksums.items() if checksum(tensor) != was]
        for name, tensor in (("out", self.out), ("lse", self.lse)):
            if tensor is None:
                continue
            whole, inner = whole_of(tensor), bytes_of(tensor).numel()
            for place, part in (("before", whole[:GUARD]), ("after", whole[GUARD + inner :])):
                if bool((part != self.fill_byte).any()):
                    found.append(f"{place} {name}")
            if self.live < self.tokens and bool((bytes_of(tensor[self.live :]) != self.fill_byte).any()):
                found.append(f"padding rows of {name}")
        return list(dict.fromkeys((*found, *self.changed_in_subprocess)))

    # What a subprocess sends back.

    def outputs(self) -> dict[str, torch.Tensor]:
        """The output and the LSE with their guards, in host memory."""
        return {name: whole_of(x).cpu() for name, x in (("out", self.out), ("lse", self.lse)) if x is not None}

    def take_outputs(self, outputs: dict[str, torch.Tensor]) -> None:
        """Copies the outputs of the same call in another process. Without an LSE, that target returns none."""
        whole_of(self.out).copy_(outputs["out"])
        if self.lse is not None and "lse" in outputs:
            whole_of(self.lse).copy_(outputs["lse"])
        else:
            self.lse = None

    def unwritten(self) -> torch.Tensor:
        """Which elements of out still hold the fill byte, bool [tokens, q_heads, v_head_dim]."""
        width = self.out.dtype.itemsize
        return (bytes_of(self.out).view(*self.out.shape, width) == self.fill_byte).all(-1)


DEFAULTS = {spec.name: spec.default for spec in fields(KernelCall) if spec.default is not MISSING}
OPTIONAL_ARGUMENTS = (
    *(name for name in OPTIONS if name in DEFAULTS and name != "out_scale"),
    "k_scale",
    "v_scale",
    "v_format",
    "v_in_k",
    "hadamard",
    "new_k",
    "new_v",
    "shard",
    "spans",
    "select_positions",
    "select_columns",
)


def selection_of(positions: torch.Tensor | None, columns: torch.Tensor | None) -> Select | None:
    """The selection of a batch, None if there is neither tensor."""
    return None if positions is None and columns is None else Select(positions=positions, columns=columns)


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A tensor between two guards of the same allocation."""
    size = dtype.itemsize
    for n in shape:
        size *= n
    whole = torch.empty(size + 2 * GUARD, dtype=torch.uint8, device=device)
    return whole[GUARD : GUARD + size].view(dtype).view(shape)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a guarded tensor and of its guards."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in order, without gaps between elements."""
    # A tensor of one element may have any stride and is still contiguous.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def checksum(tensor: torch.Tensor) -> int:
    """A sum over the words of a tensor that depends on their order."""
    if tensor.numel() == 0:
        return 0
    data = bytes_of(tensor)
    cut = data.numel() // 8 * 8
    aligned = data[:cut].clone() if data.storage_offset() % 8 else data[:cut]
    words = aligned.view(torch.int64)
    order = torch.arange(1, words.numel() + 1, device=data.device, dtype=torch.int64)
    return int((words * (2 * order + 1)).sum()) ^ int((data[cut:].to(torch.int64) * 31).sum())
