"""Which call a rank is at. Ranks that are at different calls would merge results that do not belong together: with equal layers
their arguments are equal, too. So each call has a place, which is compared as its arguments are."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from quire.cache.kv_cache import KVCache
from quire.cache.pool import PagePool


class GroupCount:
    """What was counted for a process group."""

    values = 0
    """Values that all its ranks made."""
    calls = 0
    """Calls of them. Not of each value: after ranks called different ones by mistake, they would not be equal again."""


_COUNTS: WeakKeyDictionary[ProcessGroup, GroupCount] = WeakKeyDictionary()


OF_POOL = 1 << 32
"""More than the caches of any pool."""


class Place(NamedTuple):
    """Where a rank is. All numbers are equal on all ranks that make the same calls in the same order."""

    value: int = 0
    """Which ContextParallel of its group it is."""
    call: int = 0
    """Which call of all of them; 0 on a GPU, where calls are not compared one by one."""
    cache: int = 0
    """Which cache: its number in its pool, and `OF_POOL` times the number of the pool by first use. A cache without a pool is
    numbered as a pool is. 0 if the call has none."""

    def __str__(self) -> str:
        pool, number = divmod(self.cache, OF_POOL)
        cache = f"cache {number} of pool {pool}" if number else f"cache {pool}"
        return f"call {self.call} of the group, to its ContextParallel {self.value}, with {cache}"


class CallOrder:
    """Counts the calls of one value on this rank. It is made after all ranks agreed on the value."""

    def __init__(self, group: ProcessGroup):
        self._count = _COUNTS.setdefault(group, GroupCount())
        self._count.values += 1
        self._value = self._count.values
        self._owners: WeakKeyDictionary[KVCache | PagePool, int] = WeakKeyDictionary()
        self._seen = 0
        self.has_answered = False
        """Whether the other ranks know about this call: they do not wait for this rank any more."""

    def begin(self) -> None:
        """Begins a call; also one that is refused."""
        self._count.calls += 1
        self.has_answered = False

    def place(self, cache: KVCache | None = None) -> Place:
        """The place of the call that began last."""
        number = 0
        if cache is not None:
            owner = cache if cache.pool is None else cache.pool
            number = self._owners.get(owner, self._seen + 1) * OF_POOL + cache.number
        return Place(self._value, self._count.calls, number)

    def always(self) -> Place:
        """What is equal in all calls."""
        return Place(self._value)

    def accept(self, cache: KVCache) -> None:
        """Keeps the number of a cache's pool. Only after all ranks agreed on a call: then all of them do."""
        owner = cache if cache.pool is None else cache.pool
        if owner not in self._owners:
            self._seen += 1
            self._owners[owner] = self._seen


Method = TypeVar("Method", bound=Callable[..., Any])


def ordered(method: Method) -> Method:
    """Decorates a method that all ranks call together. It is counted on entry. If it raises before the other ranks were told
    anything they are told that it did, whatever the error is: an argument that is missing or unknown, too."""

    @wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        self._order.begin()
        try:
            return method(self, *args, **named)
        except Exception:
            if not self._order.has_answered:
                self._refuse(method.__name__)
            raise

    return cast(Method, call)
