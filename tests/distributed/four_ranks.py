"""Checks that run on four ranks: heads over two and keys over two, heads over four, keys over four; and at the end ranks die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import quire
from distributed.cases import LAYERS
from distributed.layer import Layer
from distributed.ranks import STOPS
from quire.distributed import CommunicationError, ContextParallel, RankFailed, RankMismatch, TensorParallel

TIMEOUT = 60.0
SHORT = 3.0
"""The timeout of collectives with a rank that is stopped."""


def tensor_parallel() -> dict[str, float]:
    """As many KV heads as ranks, half as many, and one."""
    found = {}
    for kv_heads in (4, 2, 1):
        tp = TensorParallel(q_heads=8, kv_heads=kv_heads, timeout=TIMEOUT)
        assert (tp.q_heads, tp.kv_heads, tp.replicas) == (2, 1, 4 // kv_heads)
        for name in ("alibi", "sinks", "fp8-head", "int8-token", "all"):
            found[f"{name}, {kv_heads} KV heads"] = replace(LAYERS[name], kv_heads=kv_heads).on_ranks(tp, None)
    return found


def context_parallel() -> dict[str, float]:
    """Keys over four ranks: with an interleave of 16, two or three of them have no key of a short sequence."""
    found = {}
    for interleave in (1, 16):
        cp = ContextParallel(interleave=interleave, timeout=TIMEOUT)
        found |= {f"{name}, interleave {interleave}": layer.on_ranks(None, cp) for name, layer in LAYERS.items()}
    return found


def combined() -> dict[str, float]:
    """Heads over two ranks, keys over two: every rank of a pair has the queries of all of the pair's heads."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    tp = TensorParallel(mesh["tp"], q_heads=8, kv_heads=2, timeout=TIMEOUT)
    cp = ContextParallel(mesh["cp"], interleave=4, timeout=TIMEOUT)
    return {name: layer.on_ranks(tp, cp) for name, layer in LAYERS.items()}


def combined_with_own_heads() -> dict[str, float]:
    """The same, with the query heads over all four ranks: fewer KV heads than ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    tp = TensorParallel(mesh["tp"], q_heads=8, kv_heads=2, timeout=TIMEOUT)
    cp = ContextParallel(mesh["cp"], interleave=4, split_heads=True, chunks=2, timeout=TIMEOUT)
    every = TensorParallel(q_heads=8, kv_heads=2, timeout=TIMEOUT)
    assert (every.q_heads, every.kv_heads, every.replicas) == (2, 1, 2)
    return {name: layer.on_ranks(tp, cp, split=every) for name, layer in LAYERS.items()}


def numbers_of_ranks() -> tuple[str, list[int], str, list[int]]:
    """What errors say of the other rank of a pair: of ranks 2 and 3, too, which are 0 and 1 in their group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    found: list[Any] = []
    for value in (4 + dist.get_rank() % 2, 0 if dist.get_rank() % 2 else 4):
        try:
            ContextParallel(mesh["cp"], interleave=value, timeout=TIMEOUT)
        except (RankMismatch, RankFailed, quire.ArgumentError) as error:
            found += [str(error), list(getattr(error, "ranks", ()))]
    return tuple(found)


CHECKS = {
    check.__name__: check for check in (tensor_parallel, context_parallel, combined, combined_with_own_heads, numbers_of_ranks)
}


def LAST(send: Callable[[Any], None]) -> None:
    """Rank 2 is killed, rank 3 stopped, each during a step; their partners report what they see, and end."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("end", "pair"))  # ranks 0 and 2, and 1 and 3, share "end"
    cp = ContextParallel(mesh["end"], interleave=4, timeout=SHORT)
    tp = TensorParallel(mesh["end"], q_heads=8, kv_heads=2, timeout=SHORT)
    layer = Layer(seed=30)
    layer.on_ranks(None, cp)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        send(("last", STOPS))
        os.kill(os.getpid(), signal.SIGSTOP)
    seen = []
    for call in (partial(layer.on_ranks, None, cp), partial(layer.on_ranks, None, cp), lambda: tp.reduce(torch.ones(4))):
        try:
            call()
        except CommunicationError as error:
            seen.append((str(error), error.collective, error.timeout))
    send(("last", seen))
    dist.destroy_process_group()
