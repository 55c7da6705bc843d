"""Replacements of stages that several groups of faults use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, BatchSequence, SequenceResult, Stages, Work

TILES = (16, 32, 64, 128, 8)
"""Usual sizes of tiles of keys, the most common first."""


def has(name: str) -> Any:
    return lambda call: getattr(call, name) is not None


def with_visibility(change: Any) -> Stages:
    """Replaces the visibility mask by `change(w, sequence, distances)`, given the distances q_pos - k_pos [queries, keys]."""

    def visibility(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor:
        q_pos, k_pos = oracle.token_positions(w, sequence, keys)
        return change(w, sequence, q_pos[:, None] - k_pos[None, :])

    return PLAIN.replace(visibility=visibility)


def with_sink(change: Any) -> Stages:
    """Replaces the sinks by `change(w, sinks [q_heads, 1, 1], logits)`; -inf means no sink."""

    def softmax(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        extra = change(w, oracle.sink(w), logits).expand(*logits.shape[:2], 1)
        full = oracle.softmax(without_sink(w), torch.cat((logits, extra), -1), torch.cat((v, v.new_zeros(1, *v.shape[1:]))), heads)
        return full

    return PLAIN.replace(softmax=softmax)


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
    """Replaces the outcome of a call by `change(w, outcome)`."""
    return PLAIN.replace(finish=change)
