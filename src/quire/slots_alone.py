"""Writes that know nothing but slots, as an engine's layers do: their tokens as one sequence without a page table."""

from __future__ import annotations

from functools import lru_cache

import torch

from quire.batch import Batch

ANY = 2**31 - 1
"""More tokens than any write has."""

_Constants = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def slots_batch(tokens: int, slots: torch.Tensor) -> Batch:
    """The batch of a write of `tokens` rows at given slots.

    On a GPU its tensors are constants, whatever the number of tokens, so that nothing is launched to make them. Each stream has its
    own: another stream's may not be filled yet. What is made while a graph is captured belongs to that graph."""
    device = slots.device
    if device.type != "cuda":
        constants = _one_sequence(tokens, device)
    elif torch.cuda.is_current_stream_capturing():
        constants = _one_sequence(ANY, device)
    else:
        constants = _kept(device, torch.cuda.current_stream(device).cuda_stream)
    return Batch(*constants, slots=slots, max_q_len=tokens, max_kv_len=tokens)


@lru_cache(maxsize=256)
def _kept(device: torch.device, stream: int) -> _Constants:
    return _one_sequence(ANY, device)


def _one_sequence(tokens: int, device: torch.device) -> _Constants:
    """A table without columns, one sequence's length, and where its tokens start and end."""
    lens = torch.full((1,), tokens, dtype=torch.int32, device=device)
    starts = torch.zeros(2, dtype=torch.int32, device=device)
    starts[1:] = tokens
    return torch.zeros(1, 0, dtype=torch.int32, device=device), lens, starts
