"""A smaller case that fails too."""

from __future__ import annotations

from collections.abc import Callable

from quire.conformance.cases.case import Case
from quire.conformance.diagnosis.attempt import TriedCall, try_any
from quire.conformance.runner.target import Target


def shrink(case: Case, target: Target, has_no_name: Callable[[Case, TriedCall], bool]) -> Case:
    """A smaller case that fails too, and whose fault has no name either."""
    # Mostly the smallest case that fails has no name. Only otherwise is each step diagnosed.
    small = smaller(case, target, lambda smaller, done: True)
    if small == case:
        return case
    done = try_any(small, target)
    if done is not None and not done.error and has_no_name(small, done):
        return small
    return smaller(case, target, has_no_name)


def smaller(case: Case, target: Target, keeps: Callable[[Case, TriedCall], bool]) -> Case:
    """The case after every step that leaves it wrong, where `keeps` agrees."""
    steps: list[Callable[[Case], Case]] = [
        *(lambda c, i=i: keep(c, (i,)) for i in range(min(case.seqs, 8))),
        lambda c: c.replace(padding=0),
        lambda c: c.replace(q_lens=tuple(min(q, 1) for q in c.q_lens)),
        lambda c: c.replace(kv_lens=tuple(max(n // 2, q) for q, n in zip(c.q_lens, c.kv_lens))),
        lambda c: c.replace(kv_lens=tuple(max(n // 4, q) for q, n in zip(c.q_lens, c.kv_lens))),
        lambda c: c.replace(group=1),
        lambda c: c.replace(kv_heads=1),
        lambda c: c.replace(lse=False),
    ]
    for step in steps:
        try:
            less = step(case)
        except (IndexError, ValueError):
            continue
        done = None if less == case else try_any(less, target)
        if done is not None and not done.error and done.off > 1 and keeps(less, done):
            case = less
    return case


def keep(case: Case, seqs: tuple[int, ...]) -> Case:
    """The case with these sequences only."""
    return case.replace(q_lens=tuple(case.q_lens[i] for i in seqs), kv_lens=tuple(case.kv_lens[i] for i in seqs))
