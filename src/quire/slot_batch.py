"""The batch of a write that is given slots only, as in vLLM: its tokens are one sequence without a page table."""

from __future__ import annotations

from functools import lru_cache

import torch

from quire.batch import Batch

ANY = 2**31 - 1
"""An upper bound of the tokens of a write."""

_Constants = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def slots_batch(tokens: int, slots: torch.Tensor) -> Batch:
    """The batch of a write of `tokens` tokens at given slots.

    On a GPU its tensors do not depend on the number of tokens and are cached, so that nothing is launched to make them. The cache
    is per stream, because another stream may not have filled its tensors yet. Under graph capture they are made for the graph."""
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
    """A page table without columns, the length of one sequence, and its q_starts."""
    lens = torch.full((1,), tokens, dtype=torch.int32, device=device)
    starts = torch.zeros(2, dtype=torch.int32, device=device)
    starts[1:] = tokens
    return torch.zeros(1, 0, dtype=torch.int32, device=device), lens, starts
