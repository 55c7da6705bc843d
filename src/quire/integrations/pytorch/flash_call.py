"""The arguments of aten's flash-attention operators, and what of them Quire refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import ArgumentError, describe

QUERY_TYPES = (torch.float32, torch.float16, torch.bfloat16)
KEY_TYPES = (*QUERY_TYPES, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
LARGEST_HEAD = 512


@dataclass(frozen=True, eq=False, slots=True)
class FlashCall:
    """One call of `aten::_flash_attention_forward`, under its own names. What a release of torch does not pass yet has its default
    here; a tensor or number that a later release adds is refused by `from_arguments`."""

    query: torch.Tensor
    """`[tokens, q_heads, head_dim]` with `cum_seq_q`, otherwise `[seqs, q_len, q_heads, head_dim]`."""
    key: torch.Tensor
    """`[keys, kv_heads, head_dim]`, `[seqs, kv_len, kv_heads, head_dim]`, or with a block table `[pages, page_size, ...]`."""
    value: torch.Tensor
    cum_seq_q: torch.Tensor | None
    cum_seq_k: torch.Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    return_debug_mask: bool
    scale: float | None = None
    window_size_left: int | None = None
    window_size_right: int | None = None
    seqused_k: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    num_splits: int | None = None

    @classmethod
    def from_arguments(cls, arguments: tuple[Any, ...], named: dict[str, Any]) -> FlashCall:
        """The call that aten passes to its kernel.

        Raises:
            ArgumentError: An argument has a value that Quire cannot honour.
        """
        for name in [name for name in named if name not in cls.__dataclass_fields__]:
            value = named.pop(name)
            if value is not None:
                raise ArgumentError(name, describe(value), "None: this release of Quire does not know the argument")
        call = cls(*arguments, **named)
        call.check()
        return call

    def check(self) -> None:
        """Raises `ArgumentError` for values that Quire cannot honour."""
        if self.dropout_p:
            raise ArgumentError("dropout_p", describe(self.dropout_p), "0: Quire is for inference and has no dropout")
        if self.return_debug_mask:
            raise ArgumentError("return_debug_mask", "True", "False: the weights are never in memory")
        if self.num_splits not in (None, 0, 1):
            allowed = "None or 0 (Quire divides the keys itself), or 1 (batch-invariant results)"
            raise ArgumentError("num_splits", describe(self.num_splits), allowed)
        slopes, heads = self.alibi_slopes, self.query.shape[-2]
        if slopes is not None and tuple(slopes.shape) != (heads,):
            raise ArgumentError("alibi_slopes", describe(slopes), f"one slope for each of the {heads} heads of query, or None")
        if self.query.dim() != (4 if self.cum_seq_q is None else 3):
            allowed = "[tokens, q_heads, head_dim] with cum_seq_q, or [seqs, q_len, q_heads, head_dim] without"
            raise ArgumentError("query", describe(self.query), allowed)
        if self.key.dim() != (4 if self.block_table is not None or self.cum_seq_q is None else 3):
            raise ArgumentError("key", describe(self.key), "[keys, kv_heads, head_dim]; with a block_table 4 axes, as pages")
        if self.value.shape != self.key.shape:
            raise ArgumentError("value", describe(self.value), f"the shape of key, {list(self.key.shape)}")
        self._check_types()
        self._check_lengths()
        self._check_longest()

    @property
    def k_lengths(self) -> torch.Tensor | None:
        """The keys of each sequence; None for a dense batch."""
        if self.seqused_k is not None:
            return self.seqused_k
        return None if self.cum_seq_k is None else self.cum_seq_k.diff()

    def _check_types(self) -> None:
        if self.query.dtype not in QUERY_TYPES:
            raise ArgumentError("query", describe(self.query), f"one of {', '.join(map(str, QUERY_TYPES))}")
        if self.key.dtype not in KEY_TYPES:
            raise ArgumentError("key", describe(self.key), f"one of {', '.join(map(str, KEY_TYPES))}")
        if self.value.dtype is not self.key.dtype or self.value.device != self.key.device:
            raise ArgumentError("value", describe(self.value), f"the type and device of key, {self.key.dtype} on {self.key.device}")
        head_dim = self.query.shape[-1]
        if not 1 <= head_dim <= LARGEST_HEAD:
            raise ArgumentError("query", describe(self.query), f"a head_dim of 1 to {LARGEST_HEAD}")
        if self.key.shape[-1] != head_dim:
            raise ArgumentError("key", describe(self.key), f"the head_dim of query, {head_dim}")

    def _check_longest(self) -> None:
        """Compares lengths with `max_q` and `max_k`, in host memory only: nothing is read from a GPU."""
        q_lengths = None if self.cum_seq_q is None else self.cum_seq_q.diff()
        for name, lengths, most in (("max_q", q_lengths, self.max_q), ("max_k", self.k_lengths, self.max_k)):
            if lengths is not None and lengths.device.type == "cpu" and lengths.numel() and int(lengths.max()) > most:
                raise ArgumentError(name, most, f"{int(lengths.max())} or more, the length of the longest sequence")

    def _check_lengths(self) -> None:
        if self.cum_seq_q is None:
            for name in ("cum_seq_k", "seqused_k", "block_table"):
                given = getattr(self, name)
                if given is not None:
                    raise ArgumentError(name, describe(given), "None, or pass cum_seq_q too")
            if self.key.shape[0] != self.query.shape[0]:
                raise ArgumentError("key", describe(self.key), f"{self.query.shape[0]} sequences, as query")
        elif self.block_table is None and self.cum_seq_k is None:
            raise ArgumentError("cum_seq_k", "None", "where the keys of each sequence start, or a block_table")
        elif self.cum_seq_k is None and self.seqused_k is None:
            raise ArgumentError("seqused_k", "None", "the length of each sequence: block_table needs it, or cum_seq_k")
