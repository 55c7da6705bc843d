"""Context parallelism: the keys of every sequence are divided over the ranks, and partial results are merged by their LSE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, NoReturn, overload
from weakref import WeakKeyDictionary

import torch

from quire.attend import Result
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.cache.pool import PagePool
from quire.cache.sequence import Sequence
from quire.contract.check import Level
from quire.distributed.agreement import (
    FAILED,
    STATUS,
    Facts,
    agree,
    compare,
    facts_of,
    header_of,
    numbers_of,
    option_facts,
    refusal,
)
from quire.distributed.call_order import CallOrder, Place, ordered
from quire.distributed.chunks import can_be_divided, check_chunks, row_ranges, rows_of
from quire.distributed.context_call import TYPES, ContextCall, LayerPlan, checked_arguments, is_on_host, stored
from quire.distributed.exchange import DividedExchange, Exchange, GatherExchange, OwnHeadsExchange, PartialShape
from quire.distributed.group import TIMEOUT, Group, RankGroup
from quire.distributed.pool_step import POOL_STEP, step_of_all
from quire.errors import ArgumentError, describe
from quire.keywords import refuse_unknown
from quire.options import PLAIN, Options
from quire.write import write

DIVIDED_FROM = 3 << 20
"""Bytes of the partial results of other ranks from which merging is divided over the ranks: from there on, traffic costs more than
two more collectives (measured with gloo)."""
MOST_HEADERS = 1024
"""Of calls with different arguments on a GPU: one for each number of tokens and layer with other options."""
ATTEND = "ContextParallel.attend"


class ContextParallel:
    """The keys of this rank. Rank r holds the keys of positions p with `p // interleave % ranks == r`, so a sequence grows by turns
    on every rank and all ranks hold nearly the same number of keys. A rank may hold no key of a short sequence.

    Make pools and batches with `shard=cp.shard`, write with `quire.write` as without ranks (it skips the keys of other ranks), and
    call `cp.attend` or `cp.step` in place of `quire.attend` and `quire.step`. Lengths, `q_starts`, q, k and v are those of all
    tokens on every rank.

    All ranks of the group make the value together, and make the same calls in the same order.

    Args:
        group: A `ProcessGroup`, one dimension of a `DeviceMesh` such as `mesh["cp"]`, or None for all ranks.
        interleave: How many neighbouring positions are on one rank; a multiple or divisor of the page size is practical, but any
            number is allowed.
        split_heads: False: every rank brings the queries of all heads and gets their results. True: the query heads are divided
            over the ranks, in order; each brings its own, and gets the results of its own. Each sends its queries to all others;
            outputs go only to the rank that needs them. This is for tensor parallelism in which these ranks have the same KV heads.
        dtype: In which type outputs of partial results are exchanged. fp32 loses nothing; bf16 or fp16 halves the traffic and
            rounds each partial result once. They are merged in fp32 anyway.
        chunks: The rows of a call are computed in this many parts, and the partial results of one part are exchanged while the next
            is computed. Calls with a tree mask, and calls that are not causal, are computed in one part.
        timeout: Seconds after which a collective fails; it is set on the group, for all its later collectives. None leaves the
            group's own (torch's default is 30 minutes for gloo, 10 for NCCL).

    Raises:
        ArgumentError: An argument is not allowed.
        RankMismatch: Ranks have different arguments.
        CommunicationError: A rank did not answer within the timeout.

    Example:
        >>> import torch, torch.distributed as dist, quire
        >>> from quire.distributed import ContextParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> cp = ContextParallel(interleave=16)
        >>> pool = quire.PagePool(pages=8, page_size=16, shard=cp.shard)
        >>> cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64)
        >>> batch = pool.step({pool.sequence(): 5})
        >>> q, k, v = torch.randn(5, 12, 64, dtype=torch.bfloat16).split((8, 2, 2), dim=1)
        >>> cp.step(q, k, v, cache, batch).shape
        torch.Size([5, 8, 64])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        group: Group = None,
        *,
        interleave: int = 16,
        split_heads: bool = False,
        dtype: torch.dtype = torch.float32,
        chunks: int = 1,
        timeout: float | None = TIMEOUT,
    ):
        self._group = RankGroup(group)
        self.interleave, self.split_heads, self.dtype, self.chunks = interleave, split_heads, dtype, chunks
        self._plans: WeakKeyDictionary[Options, LayerPlan] = WeakKeyDictionary()
        self._headers: dict[tuple[int, ...], torch.Tensor] = {}
        self._agreed: set[tuple[int, ...]] = set()
        agree("ContextParallel", partial(self._own_facts, timeout), self._group)
        self._order = CallOrder(self._group.process_group)

    def _own_facts(self, timeout: float | None) -> Facts:
        """What all ranks must have in common, checked."""
        if not isinstance(self.interleave, int) or isinstance(self.interleave, bool) or self.interleave < 1:
            raise ArgumentError("interleave", describe(self.interleave), "an int of 1 or more")
        if not isinstance(self.split_heads, bool):
            raise ArgumentError("split_heads", describe(self.split_heads), "True or False")
        if self.dtype not in TYPES:
            raise ArgumentError("dtype", describe(self.dtype), ", ".join(map(str, TYPES)))
        check_chunks(self.chunks)
        self._group.set_timeout(timeout)
        own = {"interleave": self.interleave, "split_heads": self.split_heads, "dtype": self.dtype, "chunks": self.chunks}
        return facts_of(ranks=self._group.size, **own)

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self._group.rank

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._group.size

    @property
    def shard(self) -> tuple[int, int, int]:
        """`(rank, ranks, interleave)`, for `PagePool(shard=...)` and `Batch(shard=...)`."""
        return self._group.rank, self._group.size, self.interleave

    @overload
    def attend(
        self, q: torch.Tensor, cache: KVCache, batch: Batch, options: Options | None = ..., *,
        out: torch.Tensor | None = ..., lse: Literal[False] = ..., kernel: str | None = ..., check: Level = ...,
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def attend(
        self, q: torch.Tensor, cache: KVCache, batch: Batch, options: Options | None = ..., *,
        out: torch.Tensor | None = ..., lse: Literal[True] | torch.Tensor, kernel: str | None = ..., check: Level = ...,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
    @ordered
    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        options: Options | None = None,
        *,
        out: torch.Tensor | None = None,
        lse: bool | torch.Tensor = False,
        kernel: str | None = None,
        check: Level = "auto",
        **unknown: NoReturn,
    ) -> Result:
        """`quire.attend` over the keys of all ranks. The cache holds all tokens, each on its rank (full form).

        Args:
            q: Queries `[tokens, q_heads, head_dim]`: of all heads, or with `split_heads` of this rank's heads.
            cache: The keys and values of this rank.
            batch: The sequences, with `shard=cp.shard`; the same lengths on every rank.
            options: The options, the same on every rank; `alibi` and `sinks` for the heads of all ranks of this group.
            out, lse: As in `quire.attend`, for the heads of q.
            kernel: As in `quire.attend`; ranks may choose different ones.
            check: As in `quire.attend`. Arguments are compared between the ranks: in host memory in every call, with the lengths;
                on a GPU when they are new, and with "full" in every call with the lengths.

        Returns:
            `out`, or `(out, lse)`.

        Raises:
            RankMismatch: Ranks have different arguments.
            CommunicationError: A collective failed or timed out.
            RankFailed: Another rank raised an error (in host memory; on a GPU it is noticed by the timeout).
            ArgumentError, ContractError, KernelError, StaleBatch: As `quire.attend`, on this rank.
        """
        if unknown:
            refuse_unknown(ContextParallel.attend, unknown)
        call = self._checked_call(q, cache, batch, options, out, lse, check)
        return self._run(call, kernel)

    @overload
    def step(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, options: Options | None = ..., *,
        out: torch.Tensor | None = ..., lse: Literal[False] = ..., check: Level = ...,
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def step(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, options: Options | None = ..., *,
        out: torch.Tensor | None = ..., lse: Literal[True] | torch.Tensor, check: Level = ...,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
    @ordered
    def step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        options: Options | None = None,
        *,
        out: torch.Tensor | None = None,
        lse: bool | torch.Tensor = False,
        check: Level = "auto",
        **unknown: NoReturn,
    ) -> Result:
        """Writes the new keys and values of this rank to its cache, then computes attention over the keys of all ranks. With
        `split_heads` the queries are sent meanwhile.

        Args:
            q, cache, batch, options, out, lse, check: As in `attend`.
            k, v: The new keys and values of all tokens, `[tokens, kv_heads, dim]`.

        Returns:
            `out`, or `(out, lse)`.

        Raises:
            RankMismatch, RankFailed, CommunicationError: As `attend`.
            ArgumentError, ContractError, KernelError, StaleBatch: As `quire.write` and `quire.attend`, on this rank.
        """
        if unknown:
            refuse_unknown(ContextParallel.step, unknown)
        call = self._checked_call(q, cache, batch, options, out, lse, check)
        return self._run(call, None, partial(write, k, v, cache, batch, check=check))

    @ordered
    def pool_step(self, pool: PagePool, new_tokens: Mapping[Sequence, int]) -> Batch:
        """`pool.step` on every rank, or on none. Ranks hold different numbers of keys, so one can be out of pages while the others
        are not; if each called `pool.step` by itself, the others would wait for it in the next call. This is one small collective,
        which waits for the device on a GPU.

        Args:
            pool: The pool of this rank, with `shard=cp.shard`.
            new_tokens: As in `PagePool.step`: for each sequence, in the same order and with the same counts on every rank.

        Returns:
            The `Batch` of this rank.

        Raises:
            OutOfPages: A rank has too few free pages: on every rank, with the numbers of that rank. No pool is changed.
            RankMismatch: Ranks have different numbers of sequences or of new tokens. No pool is changed.
            RankFailed: Another rank raised another error. No pool is changed.
            ArgumentError: As `PagePool.step`, or the pool has another shard, on this rank.
            CommunicationError: The collective failed or timed out. No pool is changed.
        """
        self._order.has_answered = True  # whatever happens, it tells the other ranks
        return step_of_all(pool, new_tokens, self.shard, self._order.place(), self._group)

    def _refuse(self, method: str) -> None:
        """Tells the other ranks that this one refused its arguments, in host memory."""
        self._order.has_answered = True
        if self._group.device.type == "cpu":
            caller = POOL_STEP if method == "pool_step" else ATTEND
            self._group.all_gather(refusal(caller, self._order.place())).wait()

    def _checked_call(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        options: Options | None,
        out: torch.Tensor | None,
        lse: bool | torch.Tensor,
        check: Level,
    ) -> ContextCall:
        """The arguments of a call with what all ranks must have in common."""
        options = PLAIN if options is None else options
        dtype = checked_arguments(q, cache, batch, options, out, lse, self.shard)
        self._group.check_device("q", q)
        plan = self._plan(options)
        facts = plan.facts | facts_of(
            tokens=q.shape[0],
            q_heads=q.shape[1],
            head_dim=q.shape[2],
            v_head_dim=cache.v_head_dim,
            kv_heads=cache.kv_heads,
            q_type=q.dtype,
            out_type=dtype,
        )
        if is_on_host(q) or check == "full":
            facts |= facts_of(kv_lens=batch.kv_lens.long().cpu(), q_starts=batch.q_starts.long().cpu())
            place = self._order.place(cache)
            header = header_of(ATTEND, facts, place).to(q.device)
        else:
            place = self._order.always()
            header = self._header(facts, place, q.device)
        return ContextCall(q, cache, batch, options, plan, facts, place, header, dtype, out, lse, check)

    def _header(self, facts: Facts, place: Place, device: torch.device) -> torch.Tensor:
        """The header of a call on a device. There it is kept, so that a CUDA graph can be captured after a first call."""
        key = numbers_of(facts)
        if key not in self._headers:
            if len(self._headers) >= MOST_HEADERS:
                self._headers.clear()
                self._agreed.clear()
            self._headers[key] = header_of(ATTEND, facts, place).to(device)
        return self._headers[key]

    def _plan(self, options: Options) -> LayerPlan:
        if options not in self._plans:
            sinks = options.sinks if self.rank == 0 else None
            own = replace(options, sinks=sinks, out_scale=None)
            self._plans[options] = LayerPlan(own, option_facts(options))
        return self._plans[options]

    def _run(self, call: ContextCall, kernel: str | None, before: Callable[[], None] | None = None) -> Result:
        """Calls `before`, computes the rows of a call in parts, and exchanges each part while the next is computed."""
        gathering, q, on_host = None, call.q, is_on_host(call.q)
        if self.split_heads:
            self._agree(call)
            gathering = self._group.all_gather(q.contiguous())
        ranges = row_ranges(q.shape[0], self.chunks if can_be_divided(call.options, call.batch) else 1)
        error = None if before is None else _error_of(before)
        if gathering is not None:
            # Of all ranks, [ranks, tokens, heads, head_dim], as the heads of the group.
            q = gathering.wait().transpose(0, 1).flatten(1, 2)
        under_way: list[Exchange] = []
        for i, rows in enumerate(ranges):
            shape = PartialShape(rows.stop - rows.start, q.shape[1], call.cache.v_head_dim, self.dtype, q.device)
            exchange = self._exchange(call, shape)
            if error is None:
                batch = call.batch if len(ranges) == 1 else rows_of(call.batch, rows)
                error = _error_of(partial(call.attend_to_own_keys, q[rows], batch, exchange.out, exchange.lse, kernel))
            if i == 0 and (on_host or not self.split_heads):
                self._agree(call, error)
            if error is not None and not on_host:
                raise error
            exchange.start()
            under_way.append(exchange)
        if on_host and len(ranges) > 1:
            # A rank with an error in a later part takes part to the end, so that no other waits for it.
            self._agree(call, error)
        parts = [exchange.finish() for exchange in under_way]
        out, lse = parts[0] if len(parts) == 1 else (torch.cat(each) for each in zip(*parts))
        return stored(call, out, lse)

    def _exchange(self, call: ContextCall, shape: PartialShape) -> Exchange:
        if self.split_heads:
            return OwnHeadsExchange(self._group, shape, call.finished)
        kind = DividedExchange if shape.bytes * (self.ranks - 1) >= DIVIDED_FROM else GatherExchange
        return kind(self._group, shape, call.finished)

    def _agree(self, call: ContextCall, error: Exception | None = None) -> None:
        """Compares the arguments of all ranks, and whether one of them raised an error: nothing is exchanged then. On a GPU this
        waits for the device, so it is done once for equal arguments."""
        header = call.header
        if error is not None:
            header = header.clone()
            header[STATUS] = FAILED
        self._order.has_answered = True
        headers = self._group.all_gather(header).wait()
        if not is_on_host(call.q) and call.check != "full" and error is None:
            key = numbers_of(call.facts)
            if key in self._agreed or (call.q.is_cuda and torch.cuda.is_current_stream_capturing()):
                return
            self._agreed.add(key)
        compare(ATTEND, call.facts, call.place, headers, self._group, error)
        self._order.accept(call.cache)

    def __repr__(self) -> str:
        return f"ContextParallel(rank {self.rank} of {self.ranks}, interleave={self.interleave}, split_heads={self.split_heads})"


def _error_of(action: Callable[[], None]) -> Exception | None:
    """The error that an action raises: all ranks are told before it is raised, so that none of them waits."""
    try:
        action()
    except Exception as error:
        return error
    return None
