"""Which keys the queries of a batch see, if not all: positions per query, or columns of the page table per sequence."""

from __future__ import annotations

from typing import Literal, NoReturn

import torch

from quire.errors import ArgumentError, describe
from quire.keywords import refuse_unknown

Kind = Literal["positions", "columns"]


class Select:
    """The keys that the queries of a batch see, of those that causality and window show: `Batch(select=...)`. A query sees no other
    key, and nothing else of the cache is read. Give exactly one of the two tensors, int32 or int64. It is not copied: indices may
    be updated in place, for example before a CUDA graph is replayed.

    The middle axis has an entry for each KV head, or one for all of them; the query heads of a group always share theirs. The last
    axis may have any length, and the order of its entries changes the result only by rounding. -1, at any place, is no entry.
    An entry that occurs twice or that does not exist violates the contract.

    Args:
        positions: `[tokens, kv_heads or 1, n]`: for each row of q, positions of keys in its sequence, each below the sequence's
            length. Rows of padding are not read.
        columns: `[seqs, kv_heads or 1, n]`: for each sequence, columns of its row of the page table, each of a page that the
            sequence has. Column c selects the keys at positions `c * page_size` to `(c + 1) * page_size - 1`, for all queries of
            the sequence.

    Raises:
        ArgumentError: None of the two is given, or both are, or a value that is not a dense tensor.

    Example:
        >>> import torch, quire
        >>> pool = quire.PagePool(pages=8, page_size=4)
        >>> batch = pool.step({pool.sequence(): 19})  # five pages; the last has three tokens
        >>> sparse = batch.with_select(quire.Select(columns=torch.tensor([[[0, 4, -1]]])))  # the first page and the last
        >>> sparse.select.kind
        'columns'
    """

    __slots__ = ("kind", "entries")

    def __init__(self, *, positions: torch.Tensor | None = None, columns: torch.Tensor | None = None, **unknown: NoReturn):
        if unknown:
            refuse_unknown(Select.__init__, unknown)
        if (positions is None) == (columns is None):
            given = "neither positions nor columns" if positions is None else "both positions and columns"
            raise ArgumentError("select", given, "one of them")
        self.kind: Kind = "columns" if positions is None else "positions"
        """positions or columns."""
        entries = columns if positions is None else positions
        if not isinstance(entries, torch.Tensor) or entries.layout is not torch.strided:
            raise ArgumentError(self.kind, describe(entries), "a dense tensor of int32 or int64")
        self.entries: torch.Tensor = entries
        """The tensor."""

    @property
    def n(self) -> int:
        """Entries of a row."""
        return self.entries.shape[-1] if self.entries.dim() else 0

    @property
    def traits(self) -> tuple[str, torch.dtype]:
        """What kernels are compiled for."""
        return self.kind, self.entries.dtype

    def keys_per_entry(self, page_size: int) -> int:
        """How many keys an entry selects."""
        return 1 if self.kind == "positions" else page_size

    def __repr__(self) -> str:
        return f"Select({self.kind}={describe(self.entries)})"

    @staticmethod
    def of(given: object) -> Select | None:
        """The argument of a batch. Raises ArgumentError if it is not a selection."""
        if given is None or isinstance(given, Select):
            return given
        raise ArgumentError("select", describe(given), "quire.Select(positions=...) or quire.Select(columns=...), or None")
