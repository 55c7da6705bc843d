"""A step of the pools of all ranks, or of none. Ranks hold different numbers of keys, so one alone can be out of pages."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.batch import Batch
from quire.cache.pool import PagePool
from quire.cache.sequence import Sequence
from quire.distributed.agreement import DETAILS, FAILED, REFUSED, STATUS, compare, facts_of, header_of
from quire.distributed.call_order import Place
from quire.distributed.errors import RankFailed
from quire.distributed.group import RankGroup
from quire.errors import ArgumentError, OutOfPages, describe

POOL_STEP = "ContextParallel.pool_step"


def step_of_all(
    pool: PagePool, new_tokens: Mapping[Sequence, int], shard: tuple[int, int, int], place: Place, group: RankGroup
) -> Batch:
    """`pool.step` on every rank. If one of them fails the others undo theirs, and raise `OutOfPages` if it had too few pages."""
    batch, facts = None, facts_of()
    error: Exception | None = None
    try:
        _check(pool, new_tokens, shard)
        facts = facts_of(sequences=len(new_tokens), new_tokens=tuple(new_tokens.values()))
        batch = pool.step(new_tokens)
    except Exception as found:
        error = found
    header = header_of(POOL_STEP, facts, place)
    if isinstance(error, OutOfPages):
        header[STATUS] = FAILED
        header[DETAILS] = torch.tensor([error.needed, error.free, error.pages], device="cpu")
    elif error is not None:
        header[STATUS] = REFUSED
    try:
        headers = group.all_gather(header.to(group.device)).wait().cpu()
        compare(POOL_STEP, facts, place, headers, group, error)
    except Exception as found:
        if batch is not None:
            # The step before it can still be rolled back, as after a step that failed here.
            pool.rollback(batch)
        if isinstance(found, RankFailed):
            for row in headers.tolist():
                if row[STATUS] == FAILED:
                    raise OutOfPages(*row[DETAILS]) from found
        raise
    assert batch is not None
    return batch


def _check(pool: PagePool, new_tokens: Mapping[Sequence, int], shard: tuple[int, int, int]) -> None:
    if not isinstance(pool, PagePool):
        raise ArgumentError("pool", describe(pool), "a PagePool")
    if not isinstance(new_tokens, Mapping):
        raise ArgumentError("new_tokens", describe(new_tokens), "a dict with the number of new tokens of each sequence")
    given = (0, 1, shard[2]) if pool.shard is None else tuple(pool.shard)
    if given != shard:
        shown = "no shard" if pool.shard is None else f"shard={given}"
        raise ArgumentError("pool", shown, f"shard={shard}: make it with shard=cp.shard")
