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
