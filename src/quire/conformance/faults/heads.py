"""Faults of heads and dims: which kv head and which dims a query head reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults import solve
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import ORDERS
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, Stages, Work


def _heads(change: Any) -> Stages:
    """Replaces the kv head of each query head by `change(call) -> [q_heads]`."""
    return PLAIN.replace(kv_head=lambda w: change(w.call))


def _query(by: int) -> Stages:
    """Each row uses the query of the row `by` further on, at its own position."""

    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        at = (torch.arange(q.shape[0]) + by).clamp(0, q.shape[0] - 1)
        return oracle.score(w, q[at], k, heads)

    return PLAIN.replace(score=score)


def _q_heads_as(change: Any) -> Stages:
    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return oracle.score(w, q[:, change(w.call)], k, heads)

    return PLAIN.replace(score=score)


def _dims(keep: Any) -> Stages:
    """q·k uses only some dims: `keep(head_dim) -> index`."""

    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        at = keep(q.shape[2])
        return oracle.score(w, q[..., at], k[..., at], heads)

    return PLAIN.replace(score=score)


def _several_heads(call: KernelCall) -> bool:
    return call.kv_heads > 1


def _groups(call: KernelCall) -> bool:
    return call.kv_heads > 1 and call.q_heads > call.kv_heads


def _long(call: KernelCall) -> bool:
    return call.seqs > 0 and int(call.q_starts.diff().max()) > 1


KEPT: dict[str, Callable[[int], torch.Tensor]] = {
    "all but last": lambda d: torch.arange(d - 1),
    "all but first": lambda d: torch.arange(1, d),
    "first half": lambda d: torch.arange(max(d // 2, 1)),
    "whole 16s": lambda d: torch.arange(max(d // 16 * 16 if d % 16 else d - 16, 1)),
    "whole 32s": lambda d: torch.arange(max(d // 32 * 32 if d % 32 else d - 32, 1)),
    "power of two": lambda d: torch.arange(1 << (d.bit_length() - 1)),
}


HEADS = (
    Fault(
        "kv-heads-interleaved",
        "heads",
        "most query heads read the keys of another kv head",
        "query head h reads kv head h % kv_heads instead of h // group",
        lambda: _heads(lambda call: torch.arange(call.q_heads) % call.kv_heads),
        _groups,
    ),
    Fault(
        "kv-head-wrong",
        "heads",
        "some query heads read the keys and values of another kv head",
        "the head index is relative to a group, a tile or a GPU",
        lambda heads: _heads(lambda call: torch.tensor(heads)),
        _several_heads,
        tries=(),
        solve=solve.head_map,
        lasting=True,
        inject=lambda call: {"heads": [0] * call.q_heads},
    ),
    Fault(
        "query-off-by-one",
        "heads",
        "each row is computed with the query of the next or the previous row",
        "an index into q that starts at 1",
        lambda by: _query(by),
        _long,
        ({"by": 1}, {"by": -1}),
    ),
    Fault(
        "query-heads-reversed",
        "heads",
        "each head is computed with the query of another head",
        "the heads of a group are packed in one order and unpacked in another",
        lambda order: _q_heads_as(ORDERS[order]),
        lambda call: call.q_heads > 1,
        ({"order": "reversed"}, {"order": "reversed in group"}, {"order": "group first"}, {"order": "kv head first"}),
    ),
    Fault(
        "dims-cut",
        "heads",
        "logits lack some dims, usually the last ones",
        "a head_dim that is not a multiple of the tile is rounded down",
        lambda keep: _dims(KEPT[keep]),
        lambda call: call.q.shape[2] > 1,
        tuple({"keep": name} for name in ("all but last", "first half", "whole 16s", "whole 32s", "power of two", "all but first")),
        issues=("vLLM #16808", "vLLM #12656"),
    ),
)
