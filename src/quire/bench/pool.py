"""How long a page pool takes for the steps of a serving engine, and how much memory its bookkeeping needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from quire.bench.figures import Figure
from quire.cache.pool import PagePool
from quire.cache.sequence import Sequence

_PROMPT = 8192
"""Tokens of the prompts that the prefix cache is measured with."""


def measure_pool(pages: int = 1_000_000, page_size: int = 16, repeats: int = 8) -> Iterator[Figure]:
    """Every figure is the least of several repeats: other processes can only add to it."""
    decodes = [(256, 2048, 60e-6), (256, 16384, 60e-6), (1024, 2048, None), (4096, 2048, 0.7e-3)]
    for seqs, length, limit in decodes:
        if seqs * (length // page_size + 8) <= pages:
            yield from _measure_decode(pages, page_size, seqs, length, limit, repeats)
    if 1024 * 24 + _PROMPT // page_size <= pages:
        yield from _measure_shared(pages, page_size, 1024, repeats)
    if 256 * 2048 <= pages * page_size:
        yield Figure("step, prefill, 256 x 2048", min(_prefill(pages, page_size) for _ in range(repeats)), 1e-3)
    if 4096 * 2048 <= pages * page_size:
        yield Figure("free, 4096 x 2048", min(_free(pages, page_size) for _ in range(repeats)), 5e-3)
    pool, _ = _filled(pages, page_size, min(4096, pages), page_size)
    yield Figure("usage", _least(pool.usage, 100), None)
    if 3 * _PROMPT <= pages * page_size:
        yield from _measure_prefix_cache(pages, page_size, repeats)
    yield _memory(pages, page_size)


def _measure_decode(pages: int, page_size: int, seqs: int, length: int, limit: float | None, repeats: int) -> list[Figure]:
    """Steps of one token per sequence: usual ones, those in which every sequence needs a page, and those in another order."""
    pool, sequences = _filled(pages, page_size, seqs, length)
    orders = dict.fromkeys(sequences, 1), dict.fromkeys(sequences[::-1], 1)
    usual: list[float] = []
    paged: list[float] = []
    reordered: list[float] = []
    for _ in range(repeats):
        pool.step(orders[0])
        for _ in range(4 * page_size):
            needs = sequences[0].length % page_size == 0
            (paged if needs else usual).append(_timed(lambda: pool.step(orders[0])))
        reordered.append(_timed(lambda: pool.step(orders[1])))
        pool.trim(sequences[0], length)
        pool.step({sequences[0]: sequences[1].length - length})
        for sequence in sequences:
            pool.trim(sequence, length)
    name = f"step, one token, {seqs} x {length}"
    return [
        Figure(name, min(usual), limit),
        Figure(f"{name}, a page for each", min(paged), limit),
        Figure(f"{name}, other order", min(reordered), None),
    ]


def _measure_shared(pages: int, page_size: int, seqs: int, repeats: int) -> list[Figure]:
    """Steps that say what their sequences share: the first with these sequences, in which it is searched, and further ones."""
    pool, (prompt,) = _filled(pages, page_size, 1, _PROMPT)
    counts = {pool.fork(prompt): 1 for _ in range(seqs)}
    first: list[float] = []
    further: list[float] = []
    for _ in range(repeats):
        pool.free(pool.fork(prompt))  # the next step is laid out again
        first.append(_timed(lambda: pool.step(counts, share=True)))
        further += [_timed(lambda: pool.step(counts, share=True)) for _ in range(page_size)]
    name = f"step with share=True, {seqs} that share {_PROMPT}"
    return [Figure(name, min(further), None), Figure(f"{name}, first", min(first), None)]


def _prefill(pages: int, page_size: int) -> float:
    pool = PagePool(pages, page_size)
    tokens = {pool.sequence(): 2048 for _ in range(256)}
    return _timed(lambda: pool.step(tokens))


def _free(pages: int, page_size: int) -> float:
    pool, sequences = _filled(pages, page_size, 4096, 2048)
    return _timed(lambda: pool.free(*sequences))


def _measure_prefix_cache(pages: int, page_size: int, repeats: int) -> list[Figure]:
    """Prompts in a pool whose pages are all cached and free. Every further page is an evicted one."""
    pool, count = PagePool(pages, page_size), pages * page_size // _PROMPT
    registered, again, found, missed, evicted = [], [], [], [], []
    for number in range(count):
        prompt = _prompt(number)
        sequence = pool.match(prompt)
        pool.step({sequence: _PROMPT})
        register = partial(pool.register, sequence, prompt[:_PROMPT])
        registered.append(_timed(register))
        again.append(_timed(register))
        pool.free(sequence)
    each = pool.nbytes / pages
    for number in range(max(count - 4 * repeats, 0), count):
        found.append(_timed(partial(pool.match, _prompt(number))))
        missed.append(_timed(partial(pool.match, _prompt(number), "other")))
        pool.free(*pool.sequences)
    sequences = [pool.sequence() for _ in range(min(256, pages // repeats))]
    for _ in range(repeats):
        evicted.append(_timed(lambda: pool.step(dict.fromkeys(sequences, page_size))))
    name = f"{_PROMPT} tokens"
    return [
        Figure(f"match, {name}, all found", min(found), 1e-3),
        Figure(f"match, {name}, none found", min(missed), None),
        Figure(f"register, {name}", min(registered), None),
        Figure(f"register, {name}, again", min(again), None),
        Figure(f"step, {len(sequences)} pages evicted", min(evicted), None),
        Figure("bytes per page, all cached", each, None),
    ]


def _prompt(number: int) -> list[int]:
    """A prompt of full pages and one token."""
    return list(range(number * _PROMPT, (number + 1) * _PROMPT + 1))


def _memory(pages: int, page_size: int) -> Figure:
    """Bytes per page of a pool whose pages are nearly all held, by sequences of 2048 tokens."""
    length = min(2048, pages * page_size // 2)
    seqs = pages * page_size // length * 31 // 32
    pool, sequences = _filled(pages, page_size, seqs, length)
    pool.step(dict.fromkeys(sequences, 1))
    return Figure("bytes per page", pool.nbytes / pages, 64)


def _filled(pages: int, page_size: int, seqs: int, length: int) -> tuple[PagePool, list[Sequence]]:
    pool = PagePool(pages, page_size)
    sequences = [pool.sequence() for _ in range(seqs)]
    pool.step(dict.fromkeys(sequences, length))
    return pool, sequences


def _least(act: Callable[[], object], times: int) -> float:
    return min(_timed(act) for _ in range(times))


def _timed(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin
