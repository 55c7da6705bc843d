"""Changes of stages that several themes share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.oracle import exact as x
from quire.conformance.oracle.exact import PLAIN, BatchSequence, SequenceResult, Stages, Work

TILES = (16, 32, 64, 128, 8)
"""Sizes that tiles of keys have in kernels, the usual ones first."""


def has(name: str) -> Any:
    return lambda call: getattr(call, name) is not None


def with_visibility(change: Any) -> Stages:
    """Another visibility: `change(w, sequence, far)` by distances [queries, keys]."""

    def see(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor:
        q_at, k_at = x.places(w, sequence, keys)
        return change(w, sequence, q_at[:, None] - k_at[None, :])

    return PLAIN.replace(see=see)


def with_sink(change: Any) -> Stages:
    """Another sink: `change(w, sinks [q_heads, 1, 1], logits)`; -inf is none."""

    def weigh(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        extra = change(w, x.sink(w), logits).expand(*logits.shape[:2], 1)
        full = x.weigh(without_sink(w), torch.cat((logits, extra), -1), torch.cat((v, torch.zeros_like(v[:1]))), heads)
        return full

    return PLAIN.replace(weigh=weigh)


def without_sink(w: Work) -> Work:
    bare = Work(dataclasses.replace(w.call, sinks=None), w.number, w.factors)
    return bare


ORDERS: dict[str, Callable[[KernelCall], torch.Tensor]] = {
    "kv head": lambda call: torch.arange(call.q_heads) // (call.q_heads // call.kv_heads),
    "within group": lambda call: torch.arange(call.q_heads) % (call.q_heads // call.kv_heads),
    "reversed": lambda call: torch.arange(call.q_heads).flip(0),
    "first": lambda call: torch.zeros(call.q_heads, dtype=torch.long),
    "reversed in group": lambda call: torch.arange(call.q_heads).view(call.kv_heads, -1).flip(1).reshape(-1),
    "group first": lambda call: torch.arange(call.q_heads).view(call.kv_heads, -1).T.reshape(-1),
    "kv head first": lambda call: torch.arange(call.q_heads).view(-1, call.kv_heads).T.reshape(-1),
}


def finished(change: Any) -> Stages:
    """Changes the whole result: `change(w, outcome)`."""
    return PLAIN.replace(finish=change)
