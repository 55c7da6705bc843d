"""Runs a call of a vLLM operator as one call of Quire: checked by the contract, dispatched like any other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.compat.vllm.strict import missing_tokens
from quire.contract.call import Call
from quire.contract.check import enforce
from quire.errors import ArgumentError, ContractError, describe
from quire.launch import launcher_for
from quire.options import Options
from quire.problem import ANY

EVERY, DECODE, PREFILL = (0, ANY), (1, 1), (2, ANY)
"""The ranges of new tokens of the sequences that a call computes; vLLM's decode sequences have one."""

New = tuple[torch.Tensor, torch.Tensor] | None


@dataclass
class MixedFormCall(Call):
    """A call that mixes the two forms: sequences with at least `context_from` new tokens read them from `new`, the others from the
    cache. Sequences outside of `only` are not computed."""

    @cached_property
    def taken(self) -> torch.Tensor:
        """The sequences that are computed, bool `[seqs]`."""
        return (self.q_lens >= max(self.only[0], 1)) & (self.q_lens <= self.only[1])

    @cached_property
    def lens_bound(self) -> torch.Tensor:
        return super().lens_bound & self.taken

    @cached_property
    def end_needed(self) -> torch.Tensor:
        dense = self.q_lens >= self.context_from if self.new is not None else torch.zeros_like(self.taken)
        return torch.where(self.taken, torch.where(dense, self.context, self.kv_lens), 0)


def attend(
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options,
    new: New,
    out: torch.Tensor,
    *,
    context_from: int = 1,
    only: tuple[int, int] = EVERY,
    strict: bool = False,
) -> None:
    """Writes `out`. Values are checked in host memory; elsewhere with `strict` and in `quire.checked()`."""
    for name, tensor in (("q", q), ("out", out)):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(name, describe(tensor), "a tensor")
    call = MixedFormCall(cache, batch, q, options, new, out, context_from=context_from, only=only)
    enforce("attend", call, "full" if strict else "auto")
    launcher = launcher_for("attend", call)
    if strict and new is not None:
        missing = missing_tokens(call)
        if missing:
            raise ContractError("attend", missing)
    launcher(call)


def new_tokens(key: torch.Tensor | None, value: torch.Tensor | None) -> New:
    """The dense keys and values of the new tokens; None if all of them are in the cache."""
    if key is None and value is None:
        return None
    if key is None or value is None:
        raise ArgumentError("new[1]" if value is None else "new[0]", None, "both key and value, or neither")
    return key, value


def batch_of(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int | None,
    max_seq_len: int | None,
    addresses_in: torch.Tensor | None = None,
) -> Batch:
    """The batch over vLLM's index tensors. `addresses_in` is the key cache, if the table contains addresses of its
    blocks."""
    for name, tensor in (("page_table", block_table), ("kv_lens", seq_lens)):
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            raise ArgumentError(name, describe(tensor), "a tensor of int32 or int64")
    if block_table.shape[0] > seq_lens.shape[0]:
        block_table = block_table[: seq_lens.shape[0]]  # engines keep their tables at the size of the largest batch
    if addresses_in is not None:
        # An address outside of the cache, or not at the start of a block, becomes an invalid page id, which no kernel uses.
        size = addresses_in.stride(0) * addresses_in.element_size()
        offset = block_table.long() - addresses_in.data_ptr()
        pages = torch.div(offset, size, rounding_mode="floor")
        block_table = torch.where(offset == pages * size, pages, -1)
    return Batch(block_table, seq_lens, query_start_loc, max_q_len=max_query_len, max_kv_len=max_seq_len)
