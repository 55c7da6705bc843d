"""Checks on two ranks of calls that only one of them makes, makes otherwise, or cannot make."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import quire
from quire.distributed import ContextParallel, RankFailed, RankMismatch, TensorParallel

TIMEOUT = 60.0


def refused(kind: type[Exception], call: Any) -> str:
    """The message of the error that a call raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


class EqualLayers:
    """Three layers with equal arguments and different keys, and a cache that was not used before."""

    def __init__(self, **given: Any):
        self.cp = ContextParallel(interleave=4, timeout=TIMEOUT, **given)
        self.pool = quire.PagePool(pages=50, page_size=4, shard=self.cp.shard)
        self.caches = [quire.KVCache.allocate(self.pool, kv_heads=2, head_dim=16, dtype=torch.float32) for _ in range(4)]
        self.batch = self.pool.step({self.pool.sequence(): 20})
        q, *keys = torch.randn(20, 12, 16, generator=torch.Generator().manual_seed(1)).split((4, 2, 2, 2, 2), dim=1)
        self.q = q
        for key, cache in zip(keys, self.caches):
            quire.write(key, key, cache, self.batch)
        self.want = [self.attend(i) for i in range(3)]

    def attend(self, layer: int, **given: Any) -> torch.Tensor:
        return self.cp.attend(self.q, self.caches[layer], self.batch, **given)

    def check(self) -> None:
        """All layers give what they gave at first."""
        assert all(torch.equal(self.attend(i), want) for i, want in enumerate(self.want))


def a_call_is_missing() -> None:
    """A rank that leaves out a layer, calls another value, or repeats a layer, is at another call: no rank gets a result. Then all
    can make the same calls again."""
    rank = dist.get_rank()
    for given in ({}, {"split_heads": True}, {"chunks": 3}):
        layers, other = EqualLayers(**given), ContextParallel(interleave=4, timeout=TIMEOUT, **given)
        for layer in (0, 1):
            message = refused(RankMismatch, partial(layers.attend, layer + rank))
            assert "the call differs between the ranks" in message
            assert f"with cache {layer + 2 - rank} of pool 1) at rank" in message
        layers.check()
        cp = other if rank else layers.cp
        assert "another call (" in refused(RankMismatch, partial(cp.attend, layers.q, layers.caches[0], layers.batch))
        layers.check()
        assert other.attend(layers.q, layers.caches[0], layers.batch).equal(layers.want[0])


def the_first_call_is_missing() -> None:
    """Caches of a pool are numbered by when they were made, so a layer that a rank leaves out is missed in the first step, too."""
    rank = dist.get_rank()
    cp = ContextParallel(interleave=4, timeout=TIMEOUT)
    for first in range(2):
        pool = quire.PagePool(pages=50, page_size=4, shard=cp.shard)
        caches = [quire.KVCache.allocate(pool, kv_heads=2, head_dim=16, dtype=torch.float32) for _ in range(3)]
        q, batch = torch.ones(20, 2, 16), pool.step({pool.sequence(): 20})
        message = refused(RankMismatch, partial(cp.step, q, q, q, caches[rank], batch))
        assert f"with cache {rank + 1} of pool {first + 1} here" in message
        assert f"with cache {2 - rank} of pool {first + 1}) at rank {1 - rank}" in message
        for cache in caches:
            assert cp.step(q, q, q, cache, batch).shape == q.shape
    # Without a pool caches are numbered by first use: a layer that is left out is seen when one was used before.
    caches = [quire.KVCache.wrap(cache.k.clone(), cache.v.clone(), layout="nhd") for cache in caches]
    shard = quire.Batch(*batch.clone()._tensors().values(), shard=cp.shard)
    for cache in caches:
        cp.step(q, q, q, cache, shard)
    message = refused(RankMismatch, partial(cp.attend, q, caches[rank], shard))
    assert f"with cache {3 + rank} here" in message


def a_call_is_refused() -> None:
    """Whatever one rank raises, the other is told, and the next call is the same on both: also if it was the first with a cache."""
    for given in ({}, {"split_heads": True, "chunks": 2}):
        refused_calls(EqualLayers(**given), dist.get_rank())


def refused_calls(layers: EqualLayers, rank: int) -> None:
    wrong: dict[type[Exception], Callable[[], Any]] = {
        quire.ArgumentError: partial(layers.attend, 3, windw=3),
        TypeError: lambda: layers.cp.attend(layers.q),
        AttributeError: lambda: layers.cp.attend(layers.q, layers.caches[3], Broken(*layers.batch._tensors().values())),
        quire.ContractError: lambda: layers.cp.attend(layers.q.clone().requires_grad_(), layers.caches[3], layers.batch),
    }
    for kind, call in wrong.items():
        for failing in (0, 1):
            if rank == failing:
                refused(kind, call)
            else:
                assert f"rank {failing} of the group" in refused(RankFailed, partial(layers.attend, 3))
            layers.check()
    refused(TypeError if rank else RankFailed, lambda: layers.cp.pool_step(layers.pool, *([] if rank else [{}])))
    assert layers.attend(3).shape == layers.q.shape


class Broken(quire.Batch):
    """A batch that raises an error which is not Quire's."""

    shard = property(lambda self: self.no_such_attribute, lambda self, value: None)


def values_are_refused() -> None:
    """If one rank gives an argument that is not allowed, the others are told."""
    rank = dist.get_rank()
    for name, value in {"interleave": 0, "split_heads": 1, "dtype": torch.int8, "chunks": 0, "timeout": -1}.items():
        wrong = {"timeout": TIMEOUT} | {name: value}
        make = partial(ContextParallel, **(wrong if rank else {"timeout": TIMEOUT}))
        assert ("rank 1 of" if rank == 0 else f"{name}: given") in refused(quire.ArgumentError if rank else RankFailed, make)
    make = partial(TensorParallel, q_heads=8, kv_heads=2, timeout=-1 if rank else TIMEOUT)
    refused(quire.ArgumentError if rank else RankFailed, make)
    EqualLayers().check()


def edges() -> None:
    """A step without sequences, an option beyond 63 bits, and a sink of +inf give what a single process gives."""
    for given in ({}, {"split_heads": True}):
        layers = EqualLayers(**given)
        cp, cache, q = layers.cp, layers.caches[0], layers.q
        want = layers.want[0]
        got = cp.attend(q, cache, layers.batch, quire.Options(softcap=10**20))
        torch.testing.assert_close(got, want)
        other = quire.Options(softcap=10**20 + dist.get_rank())
        assert "options.softcap" in refused(RankMismatch, partial(cp.attend, q, cache, layers.batch, other))
        sinks = torch.tensor([torch.inf, 0.0, -torch.inf, 1.0] * (cp.ranks if given else 1))
        out, lse = cp.attend(q, cache, layers.batch, quire.Options(sinks=sinks), lse=True)
        assert (out[:, 0] == 0).all() and (lse[:, 0] == torch.inf).all() and out.isfinite().all() and lse[:, 1:].isfinite().all()
        assert torch.equal(out[:, 2], want[:, 2])
        nothing = layers.pool.step({})
        empty, lse = cp.step(q[:0], q[:0, :2], q[:0, :2], cache, nothing, lse=True)
        assert empty.shape == (0, 4, 16) and lse.shape == (0, 4)


def pages_run_out() -> None:
    """Sequences of 10 tokens have keys on rank 0 alone. When it has no more pages both ranks raise, and no pool is changed."""
    rank = dist.get_rank()
    cp = ContextParallel(interleave=16, timeout=TIMEOUT)
    pool = quire.PagePool(pages=3, page_size=16, shard=cp.shard)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=16, dtype=torch.float32)
    q = torch.ones(10, 1, 16)
    sequences = [pool.sequence() for _ in range(4)]
    for sequence in sequences[:3]:
        batch = cp.pool_step(pool, {sequence: 10})
        assert cp.step(q, q, q, cache, batch).shape == q.shape
    before = pool.usage()
    message = refused(quire.OutOfPages, lambda: cp.pool_step(pool, {sequences[3]: 10}))
    assert "needs 1 more, 0 of 3 are free" in message and pool.usage() == before
    assert cp.attend(q, cache, batch).shape == q.shape, "the batch before it is still that of the latest step"
    pool.rollback(batch)
    assert cp.step(q, q, q, cache, cp.pool_step(pool, {sequences[3]: 10})).shape == q.shape
    before = pool.usage()
    assert "new_tokens differs" in refused(RankMismatch, lambda: cp.pool_step(pool, {sequences[0]: 1 + rank}))
    kind, count = (quire.ArgumentError, -1) if rank else (RankFailed, 1)
    refused(kind, lambda: cp.pool_step(pool, {sequences[0]: count}))
    other = quire.PagePool(pages=3, page_size=16)
    wrong = other if rank else pool
    refused(quire.ArgumentError if rank else RankFailed, lambda: cp.pool_step(wrong, {}))
    assert pool.usage() == before
    assert cp.pool_step(pool, {}).kv_lens.shape == (0,)


CALL_CHECKS = (a_call_is_missing, the_first_call_is_missing, a_call_is_refused, values_are_refused, edges, pages_run_out)
