"""Few cases in which every two values of different factors meet at least once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

Case = dict[str, str]
Pair = tuple[str, str, str, str]


def pairs_of(case: Case) -> set[Pair]:
    return {(a, case[a], b, case[b]) for a, b in combinations(case, 2)}


def cover(factors: dict[str, Sequence[str]], allowed: Callable[[Case], bool] = lambda case: True, tries: int = 40) -> list[Case]:
    """Cases, each a value for every factor, until all pairs that are allowed occur. The same on every machine.

    Greedy: a case begins with a pair that is still missing; the rest of it is the best of some random choices."""
    rng = random.Random(0)
    missing: dict[Pair, None] = {
        (a, x, b, y): None for a, b in combinations(factors, 2) for x in factors[a] for y in factors[b] if allowed({a: x, b: y})
    }
    cases: list[Case] = []
    while missing:
        a, x, b, y = next(iter(missing))
        chosen: list[Case] = []
        for _ in range(50 * tries):
            case = {name: rng.choice(values) for name, values in factors.items()} | {a: x, b: y}
            if allowed(case):
                chosen.append(case)
            if len(chosen) == tries:
                break
        assert chosen, f"nothing allows {a} {x} beside {b} {y}"
        best = max(chosen, key=lambda case: sum(pair in missing for pair in pairs_of(case)))
        for pair in pairs_of(best):
            missing.pop(pair, None)
        cases.append(best)
    return cases


def name_of(case: dict[str, Any]) -> str:
    return "-".join(case.values())
