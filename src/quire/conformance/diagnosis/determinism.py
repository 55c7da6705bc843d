"""Whether a call returns the same bits again: at once, after another call, and for a sequence alone where that is promised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from quire.conformance.cases.build import build
from quire.conformance.cases.call import KernelCall, bytes_of
from quire.conformance.cases.case import Case
from quire.conformance.diagnosis.attempt import Attempt
from quire.conformance.faults import BY_NAME
from quire.conformance.runner.target import Failure, Target
from quire.conformance.runner.threads import all_threads

REPEATS = 8
"""How often a call is repeated before it counts as deterministic."""
OTHER = Case("other", q_lens=(3, 1), kv_lens=(9, 70), seed=7)
"""A call to make between two others."""
KEPT = (
    *("kv_heads", "group", "head_dim", "v_head_dim", "v_in_k", "page_size", "layout", "x", "format"),
    *("scales", "storage", "q_dtype", "index", "strides"),
)
"""Fields that such a call takes from the case under test."""


def check_repetition(case: Case, target: Target, first: Attempt) -> tuple[str, str] | None:
    """Repeats a correct call, at once and after another call. If the bits differ, the fault's name and a description."""
    again = repeated(case, target)
    if isinstance(again, Failure) or not same(first.call, again):
        return check_determinism(case, target, first) or (
            "two-runs-differ",
            f"{BY_NAME['two-runs-differ'].effect}, once in {REPEATS + 2} calls",
        )
    for other in others(case):
        if not call_other(other, target):
            continue
        after = repeated(case, target)
        if isinstance(after, Failure):
            return after.fault, f"after another call: {after}"
        if not same(first.call, after):
            return check_determinism(case, target, replace(first, call=after)) or ("state-leaks", BY_NAME["state-leaks"].effect)
    return check_batch_invariance(case, target, first) if case.batch_invariant else None


def check_batch_invariance(case: Case, target: Target, first: Attempt) -> tuple[str, str] | None:
    """Calls each sequence of the batch alone. If its bits differ from those in the batch, the fault's name and where."""
    starts = first.call.q_starts.tolist()
    for seq, q_len in enumerate(case.q_lens):
        alone = repeated(case.replace(only=seq), target) if q_len else None
        if isinstance(alone, Failure):
            return alone.fault, f"sequence {seq} alone: {alone}"
        if alone is None:
            continue
        mine = slice(starts[seq], starts[seq + 1])
        pairs = [(first.call.out, alone.out)]
        if first.call.lse is not None and alone.lse is not None:
            pairs.append((first.call.lse, alone.lse))
        changed = sum(int((batch[mine] != single).sum()) for batch, single in pairs)
        if changed:
            effect = BY_NAME["depends-on-batch"].effect
            return "depends-on-batch", f"{effect}: sequence {seq}, {changed} of {sum(s.numel() for _, s in pairs)} elements"
    return None


def check_determinism(case: Case, target: Target, first: Attempt) -> tuple[str, str] | None:
    """Repeats a call. If the bits differ, the fault's name and a description."""
    again = [repeated(case, target) for _ in range(REPEATS)]
    gone = next((call for call in again if isinstance(call, Failure)), None)
    if gone is not None:
        return gone.fault, f"it fails only in some calls: {gone}; the command may need several tries to show it"
    calls = [call for call in again if isinstance(call, KernelCall)]
    if all(same(first.call, call) for call in calls):
        return None
    agree = all(same(calls[0], call) for call in calls)
    if agree and _depends_on_other_call(case, target, calls[0]):
        return "state-leaks", BY_NAME["state-leaks"].effect
    changed = sum(not same(first.call, call) for call in calls)
    seen = f"{changed} of {REPEATS} repeated calls returned other bits"
    if agree:
        seen = f"the {REPEATS} calls after the first agree with each other, but not with it"
    return "two-runs-differ", f"{BY_NAME['two-runs-differ'].effect}: {seen}; the command may need several tries to show it"


def _depends_on_other_call(case: Case, target: Target, usual: KernelCall) -> bool:
    """Whether another call changes the result of a case, each time and in the same way. A race would not."""
    return any(_changes(case, target, usual, other) for other in others(case))


def _changes(case: Case, target: Target, usual: KernelCall, other: Case) -> bool:
    after = []
    for _ in range(REPEATS - 1):
        if not call_other(other, target):
            return False
        call = repeated(case, target)
        if isinstance(call, Failure) or same(usual, call):
            return False
        after.append(call)
    return all(same(after[0], call) for call in after)


def others(case: Case) -> Iterator[Case]:
    """Calls to make between two calls of a case, which every target of the case can run: one of short sequences, and one of the
    same shape with other pages and numbers, which leaves the same kind of state behind."""
    lens = {"q_lens": (1,) * case.seqs, "kv_lens": tuple(5 + n for n in range(case.seqs))}
    yield OTHER.replace(**{name: getattr(case, name) for name in KEPT}, **lens)
    yield case.replace(seed=case.seed + 1)


def repeated(case: Case, target: Target) -> KernelCall | Failure:
    """A case run again, without the exact computation."""
    call = build(case, target.device)
    try:
        with all_threads():
            target.run(call)
    except Exception as error:
        return Failure.of(error)
    return call


def call_other(other: Case, target: Target) -> bool:
    """Makes another call; False if the target cannot."""
    call = build(other, target.device)
    if target.missing(call) is not None or target.limits(call) is not None:
        return False
    try:
        with all_threads():
            target.run(call)
    except Exception:
        return False
    return True


def same(a: KernelCall, b: KernelCall) -> bool:
    """Whether two calls gave the same bits, of the output and of the LSE."""
    live = a.live
    if a.lse is not None and b.lse is not None and not torch.equal(bytes_of(a.lse[:live]), bytes_of(b.lse[:live])):
        return False
    return bool(torch.equal(bytes_of(a.out[:live]), bytes_of(b.out[:live])))
