"""Cases like a failing one, on which faults that predict the same result there predict different ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quire.conformance.cases.case import Case

LONG = 261
"""So many more keys reach the second tile or split of most kernels."""


class Probe(NamedTuple):
    """A case to run, and what it has that the failing one has not."""

    what: str
    case: Case
    same_lengths: bool = False
    required: bool = False
    """Whether it is run for every name, or only to separate several."""


def probes(case: Case) -> Iterator[Probe]:
    """Required probes first: other indices, numbers and lengths."""
    if case.operation == "write":
        yield from _of_write(case)
        return
    size = case.page_size
    plain = case.replace(poison="decoy", tail="page")
    lens = list(zip(case.q_lens, case.kv_lens))
    # Every length changes, also where a prefill has no shorter one.
    short = tuple(max(min(n, 150 + 7 * i), q) + 3 + i for i, (q, n) in enumerate(lens))
    if "int64" in case.index:
        yield Probe("indices in int32", plain.replace(index=("int32",) * 3, seed=case.seed + 2), True, True)
    other = plain.replace(seed=case.seed + 1, poison="decoy2", kv_lens=short, data="random")
    yield Probe("other numbers and lengths", other, required=True)
    yield Probe("other numbers", plain.replace(seed=case.seed + 2, poison="decoy2"), True, True)
    if case.table in ("far", "very-far"):
        yield Probe("page ids as high in a smaller cache", plain.replace(table="high", seed=case.seed + 4), True, True)
    if max(case.kv_lens, default=0) <= LONG:
        longer = tuple(n + LONG - 7 * i % 64 if q else n for i, (q, n) in enumerate(lens))
        yield Probe("much longer sequences", plain.replace(kv_lens=longer, seed=case.seed + 3, data="random"), required=True)
    yield Probe("longer sequences", plain.replace(kv_lens=tuple(n + size + 3 + i for i, (_, n) in enumerate(lens))))
    yield Probe("shorter sequences", plain.replace(kv_lens=tuple(max(n - size // 2 - 1, q, 1) for q, n in lens)))
    yield Probe("one more query each", plain.replace(q_lens=tuple(min(q + 1, n) for q, n in lens)))
    if case.kv_heads * case.group < 16 and case.table not in ("far", "very-far"):
        yield Probe("more heads", plain.replace(kv_heads=case.kv_heads * 2))
    if case.form == "full" and case.table == "shuffled":
        more = plain.replace(q_lens=(*case.q_lens, 2), kv_lens=(*case.kv_lens, 3 * size - 1))
        yield Probe("one sequence more", more)


def _of_write(case: Case) -> Iterator[Probe]:
    """The same for a write."""
    plain = case.replace(poison="decoy", tail="page")
    lens = list(zip(case.q_lens, case.kv_lens))
    other = tuple(q + 1 + i % 2 if q else 0 for i, q in enumerate(case.q_lens))
    longer = tuple(n + 7 + 3 * i for i, (_, n) in enumerate(lens))
    yield Probe("other numbers", plain.replace(seed=case.seed + 2), True, True)
    yield Probe("other numbers and lengths", plain.replace(seed=case.seed + 1, q_lens=other, kv_lens=longer), required=True)
    yield Probe("one new token each", plain.replace(q_lens=(1,) * case.seqs, kv_lens=tuple(max(n, 1) for n in case.kv_lens)))
    yield Probe("new tokens without context", plain.replace(kv_lens=case.q_lens))
    yield Probe("a longer context", plain.replace(kv_lens=tuple(n + LONG for n in case.kv_lens), seed=case.seed + 3))
    if case.kv_heads * case.group < 16:
        yield Probe("more heads", plain.replace(kv_heads=case.kv_heads + 1, seed=case.seed + 4))
    if case.rotated:
        yield Probe("given positions", plain.replace(positions="given", seed=case.seed + 5))
        yield Probe("keys alone", plain.replace(queries=False))
    if case.slots == "batch":
        yield Probe("tokens that are skipped", plain.replace(slots="skipped"))
    yield Probe("larger pages", plain.replace(page_size=case.page_size * 2))
