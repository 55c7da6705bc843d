"""From a wrong answer to a name.

Every fault of the catalogue predicts what a kernel that has it would give for the same inputs. The one whose prediction is within
the budget at every element is the finding. Poison is replaced by plain numbers first, so that whatever a kernel reads, the
prediction is a number. Where several faults predict the same, cases that separate them are made and run. Where none does, the
answer is `unknown`, with the place of the error and the smallest case that shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from quire.conformance import exact as x
from quire.conformance import precision
from quire.conformance.budget import Truth, distance, honest_losses, lse_ratios, ratios, truth
from quire.conformance.build import build
from quire.conformance.call import Call, bytes_of
from quire.conformance.case import Case
from quire.conformance.exact import PLAIN, Stages
from quire.conformance.faults import BY_NAME, CATALOGUE, Fault, Parameters, Seen
from quire.conformance.faults.solve import OPEN
from quire.conformance.report import UNKNOWN, Finding, Where
from quire.conformance.target import Failure, Target
from quire.conformance.threads import all_threads

NEAR = 64.0
"""A prediction this many budgets away gets a budget of its own: a fault may make a computation coarser."""
COARSEST = 256.0
"""How much coarser, at most."""
CONFIRMING = 3
"""How many other cases must bear a finding out."""
FEW = 0.02
"""The share of elements that a prediction may miss in one of them."""
OTHER_NUMBERS = "other numbers"
KINDS: dict[str, Callable[[int, int], bool]] = {
    "one new token": lambda q_len, kv_len: q_len == 1,
    "several new tokens": lambda q_len, kv_len: q_len > 1,
    "several new tokens after others": lambda q_len, kv_len: 1 < q_len < kv_len,
    "new tokens only": lambda q_len, kv_len: q_len == kv_len,
}
"""Sequences, by their lengths, that operators give to kernels of their own."""
OTHER = Case("other", q_lens=(3, 1), kv_lens=(9, 70), seed=7)
"""A call to run between two others."""
KEPT = (
    *("kv_heads", "group", "head_dim", "v_head_dim", "page_size", "layout", "x", "format", "scales", "storage", "q_dtype", "index"),
    "strides",
)
"""What such a call has from the case beside it."""
REPEATS = 8
"""How often a call is made again before its answer is believed to be the only one."""


class Match(NamedTuple):
    fault: Fault
    parameters: Parameters
    distance: float


@dataclass
class Attempt:
    """A call that was run, and what it should have given."""

    call: Call
    right: Truth
    losses: tuple[float, float]
    failure: Failure | None = None

    @property
    def error(self) -> str:
        return "" if self.failure is None else str(self.failure)

    @property
    def off(self) -> float:
        return max(self.distances) if not self.error else torch.inf

    @property
    def distances(self) -> tuple[float, float]:
        return distance(self.out, self.lse, self.bare, self.right, self.call.live)

    def to(self, stages: Stages) -> float:
        """How far the answer is from what these stages predict."""
        if self.worst is not None and stages.finish is x.finish and (near := self._to(stages, self.losses, self.worst)) > NEAR:
            return near
        near = self._to(stages, self.losses)
        return near if not 1 < near <= NEAR else self._coarse(stages)

    def _coarse(self, stages: Stages) -> float:
        """The distance with a budget of the prediction's own: a fault may make a computation coarser. If what is right is as near
        by that budget, the answer does not speak for the fault."""
        own = honest_losses(self.call, stages)
        losses = tuple(min(max(a, b), COARSEST * b + 1e-12) for a, b in zip(own, self.losses))
        near = self._to(stages, (losses[0], losses[1]))
        return near if near > 1 or self._to(PLAIN, (losses[0], losses[1])) > 4 else torch.inf

    def missed(self, stages: Stages) -> float:
        """The share of elements that are not what these stages predict."""
        want = truth(self.call, stages, self.losses)
        off = ratios(self.out, self.bare, want, self.call.live)
        return float((off > 1).double().mean()) if off.numel() else 0.0

    @cached_property
    def seen(self) -> Seen:
        return Seen(self.call, self.right)

    @cached_property
    def worst(self) -> int | None:
        """The sequence that is farthest off: whoever cannot explain it need not try the others."""
        live = self.call.live
        if not live or self.call.seqs < 2:
            return None
        row = int(ratios(self.out, self.bare, self.right, live).amax((1, 2)).argmax())
        if self.lse is not None and self.distances[1] > self.distances[0]:
            row = int(lse_ratios(self.lse, self.right, live).amax(1).argmax())
        starts = self.call.q_starts.tolist()
        return next(i for i in range(self.call.seqs) if starts[i] <= row < starts[i + 1])

    @cached_property
    def out(self) -> torch.Tensor:
        return self.call.out.cpu()

    @cached_property
    def lse(self) -> torch.Tensor | None:
        return None if self.call.lse is None else self.call.lse.cpu()

    @cached_property
    def bare(self) -> torch.Tensor:
        return self.call.unwritten().cpu()

    def _to(self, stages: Stages, losses: tuple[float, float], only: int | None = None) -> float:
        """The LSE is as predicted, or right: a fault of the output need not be one of the LSE, which is often stored on its own."""
        want, live = truth(self.call, stages, losses, only), self.call.live
        if not live:
            return 0.0
        starts = self.call.q_starts.tolist()
        rows = slice(0, live) if only is None else slice(starts[only], starts[only + 1])
        off = float(ratios(self.out, self.bare, want, live)[rows].max())
        if self.lse is None:
            return off
        return max(off, min(float(lse_ratios(self.lse, each, live)[rows].max()) for each in (want, self.right)))


def attempt(case: Case, target: Target, call: Call | None = None) -> Attempt:
    """Builds a case and runs a target on it."""
    call = build(case, target.device) if call is None else call
    losses = honest_losses(call)
    done = Attempt(call, truth(call, losses=losses), losses)
    try:
        with all_threads():
            target.run(call)
    except Exception as error:
        done.failure = Failure.of(error)
    return done


def can_run(case: Case, target: Target) -> bool:
    call = build(case, target.device)
    return target.missing(call) is None and target.limits(call) is None


def asking(target: Target) -> precision.Answer:
    """Puts cases to a target."""

    def ask(case: Case) -> tuple[Call, Truth] | None:
        if not can_run(case, target):
            return None
        done = attempt(case, target)
        return None if done.error else (done.call, done.right)

    return ask


# Predictions.


def matches(done: Attempt, faults: tuple[Fault, ...] = CATALOGUE) -> tuple[list[Match], list[tuple[str, float]]]:
    """The faults that explain an answer, the most specific first, and how far all others are."""
    found: list[Match] = []
    far: list[tuple[str, float]] = []
    for fault in faults:
        if not fault.predicted or not fault.applies(done.call):
            continue
        best = min(_tries(fault, done), key=lambda match: match.distance, default=None)
        if best is not None:
            far.append((fault.name, best.distance))
            if best.distance <= 1:
                found.append(best)
    # A fault whose numbers were read off the answer explains less than one that had none to choose.
    found.sort(key=lambda match: (match.fault.solve is not None, len(match.parameters) > 0))
    return found, sorted(far, key=lambda row: row[1])


def _tries(fault: Fault, done: Attempt) -> Iterator[Match]:
    assert fault.change is not None
    proposals: list[Parameters] = list(fault.tries)
    if fault.solve is not None:
        try:
            proposals += fault.solve(done.seen)
        except (RuntimeError, IndexError, ValueError):
            # A solver looks at numbers that may be anything: what it cannot make sense of, it does not explain.
            proposals = list(fault.tries)
    for parameters in proposals:
        off = done.to(fault.change(**parameters))
        yield Match(fault, parameters, off)
        if off <= 1:
            return


def confirm(found: list[Match], case: Case, target: Target) -> tuple[list[Match], list[str]]:
    """Runs other cases. A fault that was found must explain the first few of them too, or it was chance; where several explain
    everything so far, more cases are run until one is left."""
    said: list[str] = []
    right: list[str] = []
    strikes = 0
    for n, (what, other) in enumerate(variants(case)):
        if not found or (len(found) < 2 and n >= CONFIRMING):
            break
        if not can_run(other, target):
            continue
        done = attempt(other, target)
        if done.error or done.off <= 1:
            right += [] if done.error else [what]
            if not done.error and what == OTHER_NUMBERS:
                # Lengths are the same, and nothing is wrong: a fault that does not depend on a place in the call would show.
                gone = [
                    m.fault.name for m in found if m.fault.solve is None and m.fault.applies(done.call) and not _carries(m, done)
                ]
                found = [match for match in found if match.fault.name not in gone]
                said += [f"{what}: right, so not {', '.join(gone)}"] if gone else []
            continue
        kept = [match for match in found if _holds(match, done)]
        if n < CONFIRMING and any(match.fault.solve is None for match in found if match not in kept):
            # What had nothing to choose explained the first answer as well, by chance. So may what has to choose anew each time.
            kept = [match for match in kept if match.fault.solve is None or _carries(match, done)]
        if not kept and n < CONFIRMING and not strikes:
            # Some faults make numbers that a rounding decides: one that had nothing to choose may miss a few of them, once.
            strikes, kept = 1, [match for match in found if match.fault.solve is None and _nearly(match, done)]
        if len(kept) < len(found) and (kept or n < CONFIRMING):
            gone = [match.fault.name for match in found if match not in kept]
            said.append(f"{what}: not {', '.join(gone)}")
            found = kept
    return found, [*said, *([f"right with {', with '.join(right)}"] if right else [])]


def _holds(match: Match, done: Attempt) -> bool:
    """Whether a fault explains another wrong answer too."""
    if not match.fault.applies(done.call):
        return False
    return _carries(match, done) or (not match.fault.lasting and any(one.distance <= 1 for one in _tries(match.fault, done)))


def _carries(match: Match, done: Attempt) -> bool:
    """Whether it does so with the same parameters."""
    assert match.fault.change is not None
    try:
        return done.to(match.fault.change(**match.parameters)) <= 1
    except (RuntimeError, IndexError):
        return False  # rows or pages that the other call does not have


def _nearly(match: Match, done: Attempt) -> bool:
    """Whether a fault explains almost every element of another wrong answer."""
    if not match.fault.applies(done.call):
        return False
    assert match.fault.change is not None
    return done.missed(match.fault.change(**match.parameters)) <= FEW


def variants(case: Case) -> Iterator[tuple[str, Case]]:
    """Cases on which faults that look alike come apart, and chance does not strike twice."""
    size = case.page_size
    plain = case.replace(poison="decoy", tail="page")
    short = tuple(max(min(n, 150 + 7 * i) + 3 + i, q) for i, (q, n) in enumerate(zip(case.q_lens, case.kv_lens)))
    if "int64" in case.index:
        yield "indices in int32", plain.replace(index=("int32",) * 3, seed=case.seed + 2)
    yield "other numbers and lengths", plain.replace(seed=case.seed + 1, poison="decoy2", kv_lens=short, data="random")
    yield OTHER_NUMBERS, plain.replace(seed=case.seed + 2, poison="decoy2")
    longer = tuple(n + size + 3 + i for i, n in enumerate(case.kv_lens))
    yield "longer sequences", plain.replace(kv_lens=longer)
    shorter = tuple(max(n - size // 2 - 1, q, 1) for q, n in zip(case.q_lens, case.kv_lens))
    yield "shorter sequences", plain.replace(kv_lens=shorter)
    queries = tuple(min(q + 1, n) for q, n in zip(case.q_lens, case.kv_lens))
    yield "one more query each", plain.replace(q_lens=queries)
    if case.kv_heads * case.group < 16 and case.table not in ("far", "very-far"):
        yield "more heads", plain.replace(kv_heads=case.kv_heads * 2)
    if case.form == "full" and case.table == "shuffled":
        yield "one sequence more", plain.replace(q_lens=(*case.q_lens, 2), kv_lens=(*case.kv_lens, 3 * size - 1))


# The whole way.


@dataclass
class Diagnosis:
    finding: Finding
    matches: list[Match] = field(default_factory=list)


def diagnose(
    case: Case, target: Target, first: Attempt, *, trusted: frozenset[str] = frozenset(), probes: bool = True, shrinks: bool = True
) -> Finding:
    """What is wrong with a target, given an answer of its own that is wrong. Faults that were found and borne out before are
    `trusted`: where one of them explains the answer, it is not asked about again."""
    said: list[str] = []
    if first.failure is not None:
        return _finding(first.failure.fault, first, case, summary=first.error)
    moody = unsteady(case, target, first)
    if moody is not None:
        return _finding(moody[0], first, case, summary=moody[1])
    done, here = first, case
    if case.poison not in ("decoy", "decoy2"):
        here = case.replace(poison="decoy")
        done = attempt(here, target)
        if not done.error and done.off <= 1:
            # A kernel that is wrong now and then may have been right just now.
            moody = unsteady(here, target, done) or unsteady(case, target, first)
            if moody is not None:
                return _finding(moody[0], first, case, summary=moody[1])
            said.append(f"right when don't-care slots hold numbers, wrong when they hold {case.poison}")
            return _finding("nan-leak", first, case, summary=BY_NAME["nan-leak"].looks, evidence=said)
        said.append(f"wrong too when don't-care slots hold numbers instead of {case.poison}")
    if here.tail != "page" and (done.error or done.off > 1):
        here = here.replace(tail="page")
        done = attempt(here, target)
        if not done.error and done.off <= 1:
            said.append("right when cells behind a sequence's end hold ids of pages, wrong when they hold -1")
            return _finding("table-tail-read", first, case, summary=BY_NAME["table-tail-read"].looks, evidence=said)
    if done.failure is not None:
        return _finding(done.failure.fault, first, here, summary=done.error, evidence=said)
    bare = done.call.unwritten()[: done.call.live]
    if bool(bare.any()):
        again = attempt(here.replace(stamp=0x7A), target)
        if not again.error:
            same = bool((again.call.unwritten()[: done.call.live] == bare).all())
            kept = f"{int(bare.sum())} elements keep either of two stamps"
            said.append(kept if same else "other elements are unwritten with another stamp")
    bits = precision.products(here, done.call, asking(target)) if probes else None
    if bits is not None:
        return _of_bits(bits, done, here, said)
    found, far = matches(done)
    # What was borne out before need not be again, unless something explains this that has less to choose.
    simplest = [match for match in found if match.fault.solve is None] or found
    if any(match.fault.name in trusted for match in simplest):
        found = [match for match in found if match.fault.name in trusted]
    elif probes:
        found, more = confirm(found, here, target)
        said += more
    alike = tuple(match.fault.name for match in found)
    bits = precision.sums(here, done.call, asking(target)) if probes and not found else None
    if bits is not None:
        return _of_bits(bits, done, here, said)
    if not found and probes:
        apart = _of_one_kind(here, target, done, trusted, said)
        if apart is not None:
            return apart
    if not found:
        return _unknown(case, here, target, first, done, far, said, shrinks)
    best = found[0]
    others = [off for name, off in far if name not in alike]
    assert best.fault.change is not None
    return _finding(
        best.fault.name,
        done,
        here if here.poison != case.poison else case,
        alike=alike,
        parameters=_plain(best.parameters),
        off=best.distance,
        margin=min(others, default=torch.inf),
        summary=best.fault.looks,
        evidence=said,
        ranking=far,
        stages=best.fault.change(**best.parameters),
    )


def _of_one_kind(case: Case, target: Target, done: Attempt, trusted: frozenset[str], said: list[str]) -> Finding | None:
    """The fault of one of the kernels that share a batch out: all sequences of one kind are right. The others are asked alone."""
    rows = ratios(done.out, done.bare, done.right, done.call.live).amax((1, 2)) > 1
    if done.lse is not None:
        rows |= lse_ratios(done.lse, done.right, done.call.live).amax(1) > 1
    parts = rows.split(list(case.q_lens)) if case.live else ()
    asked = {i for i, part in enumerate(parts) if part.numel()}
    wrong = {i for i in asked if bool(parts[i].any())}
    for kind, belongs in KINDS.items():
        mine = {i for i in asked if belongs(case.q_lens[i], case.kv_lens[i])}
        alone = _keep(case, tuple(sorted(mine)))
        if not wrong <= mine < asked or not can_run(alone, target):
            continue
        again = attempt(alone, target)
        if again.error or again.off <= 1:
            continue
        found = diagnose(alone, target, again, trusted=trusted, shrinks=False)
        if found.fault != UNKNOWN:
            evidence = (*said, f"only rows of {kind} are wrong, and they are so without the others", *found.evidence)
            return replace(found, evidence=evidence, parameters={"only": f"rows of {kind}", **found.parameters})
    return None


def _of_bits(bits: precision.Found, done: Attempt, case: Case, said: list[str]) -> Finding:
    looks = BY_NAME[bits.fault].looks
    return _finding(bits.fault, done, case, parameters=bits.parameters, summary=looks, evidence=[*said, bits.said])


def unsteady(case: Case, target: Target, first: Attempt) -> tuple[str, str] | None:
    """The name of a fault that shows in making a call again, and what one sees."""
    again = [repeated(case, target) for _ in range(REPEATS)]
    gone = next((call for call in again if isinstance(call, Failure)), None)
    if gone is not None:
        return gone.fault, f"it answers, but not each time: {gone}; the line may need several tries to show it"
    calls = [call for call in again if isinstance(call, Call)]
    if all(same(first.call, call) for call in calls):
        return None
    alike = all(same(calls[0], call) for call in calls)
    if alike and _comes_back(case, target, calls[0]):
        return "state-leaks", BY_NAME["state-leaks"].looks
    changed = sum(not same(first.call, call) for call in calls)
    seen = f"{changed} of {REPEATS} repeated calls gave other bits"
    if alike:
        seen = f"the {REPEATS} calls after the first agree with each other, and not with it"
    return "two-runs-differ", f"{BY_NAME['two-runs-differ'].looks}: {seen}; the line may need several tries to show it"


def _comes_back(case: Case, target: Target, usual: Call) -> bool:
    """Whether another call changes what a case gives, each time, and in the same way: chance would not."""
    return any(_changes(case, target, usual, other) for other in others(case))


def _changes(case: Case, target: Target, usual: Call, other: Case) -> bool:
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
    """Calls to make between two of a case, which whoever can do the case can do too: one of short rows; and the same with other
    pages and numbers, which leaves behind whatever a call of this shape leaves."""
    lens = {"q_lens": (1,) * case.seqs, "kv_lens": tuple(5 + n for n in range(case.seqs))}
    yield OTHER.replace(**{name: getattr(case, name) for name in KEPT}, **lens)
    yield case.replace(seed=case.seed + 1)


def repeated(case: Case, target: Target) -> Call | Failure:
    """A case run again, without working out what is right."""
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


def same(a: Call, b: Call) -> bool:
    """Whether two calls gave the same bits."""
    live = a.live
    return bool(torch.equal(bytes_of(a.out[:live]), bytes_of(b.out[:live])))


def _unknown(
    case: Case,
    here: Case,
    target: Target,
    first: Attempt,
    done: Attempt,
    far: list[tuple[str, float]],
    said: list[str],
    shrinks: bool,
) -> Finding:
    small = shrink(here, target) if shrinks else here
    nearest = ", ".join(f"{name} ({off:.3g} budgets away)" for name, off in [row for row in far if row[1] > 1][:2])
    # What explains this answer, and not those to other cases like it, is chance, or something else that looks like it here.
    refuted = ", ".join(name for name, off in far if off <= 1)
    here_only = f"{refuted} would, but not other cases like it; " if refuted else ""
    return _finding(
        UNKNOWN,
        done,
        small,
        margin=far[0][1] if far else torch.inf,
        summary=f"no fault of the catalogue explains it; {here_only}nearest: {nearest or 'none'}; {spread(done)}",
        evidence=said,
        ranking=far,
    )


def spread(done: Attempt) -> str:
    """Where errors sit, in words."""
    live = done.call.live
    off = ratios(done.call.out.cpu(), done.call.unwritten().cpu(), done.right, live)
    of_lse = _lse_alone(done, off)
    wrong = (off if of_lse is None else of_lse[..., None]) > 1
    rows, heads, dims = (wrong.any(a).any(b) for a, b in ((2, 1), (2, 0), (1, 0)))
    starts = done.call.q_starts.tolist()
    seqs = [i for i in range(done.call.seqs) if bool(rows[starts[i] : starts[i + 1]].any())]
    words = [
        f"{int(wrong.sum())} of {wrong.numel()} " + ("elements" if of_lse is None else "LSEs, while the output is right"),
        f"sequences {_some(seqs, done.call.seqs)}",
        f"rows {_some(rows.nonzero().flatten().tolist(), live)}",
        f"heads {_some(heads.nonzero().flatten().tolist(), done.call.q_heads)}",
        _one_step(done, wrong[..., 0])
        if of_lse is not None
        else f"dims {_some(dims.nonzero().flatten().tolist(), wrong.shape[2])}",
    ]
    return ", ".join(word for word in words if word)


def _one_step(done: Attempt, wrong: torch.Tensor) -> str:
    """By how much LSEs are off, if it is the same everywhere."""
    assert done.lse is not None
    steps = (done.lse[: done.call.live].double() - done.right.outcome.lse[: done.call.live])[wrong]
    same = float(steps.max() - steps.min()) <= 2 * float(done.right.lse_budget.max())
    return f"each by {float(steps.mean()):+.4g}" if same else ""


def _some(numbers: list[int], of: int) -> str:
    if len(numbers) == of:
        return "all"
    return ",".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def shrink(case: Case, target: Target) -> Case:
    """A smaller case that fails too, and whose fault has no name either."""

    def nameless(smaller: Case, done: Attempt) -> bool:
        return diagnose(smaller, target, done, shrinks=False).fault == UNKNOWN

    # Most of the time the smallest that fails will do: each step is only asked about where it does not.
    small = _smaller(case, target, lambda smaller, done: True)
    return small if small == case or nameless(small, attempt(small, target)) else _smaller(case, target, nameless)


def _smaller(case: Case, target: Target, keeps: Callable[[Case, Attempt], bool], most: int = 16) -> Case:
    steps: list[Callable[[Case], Case]] = [
        *(lambda c, i=i: _keep(c, (i,)) for i in range(case.seqs)),
        lambda c: c.replace(padding=0),
        lambda c: c.replace(q_lens=tuple(min(q, 1) for q in c.q_lens)),
        lambda c: c.replace(kv_lens=tuple(max(n // 2, q) for q, n in zip(c.q_lens, c.kv_lens))),
        lambda c: c.replace(kv_lens=tuple(max(n // 4, q) for q, n in zip(c.q_lens, c.kv_lens))),
        lambda c: c.replace(group=1),
        lambda c: c.replace(kv_heads=1),
        lambda c: c.replace(lse=False),
    ]
    for step in steps[:most]:
        try:
            smaller = step(case)
            if smaller == case or not can_run(smaller, target):
                continue
            done = attempt(smaller, target)
        except (IndexError, ValueError):
            continue
        if not done.error and done.off > 1 and keeps(smaller, done):
            case = smaller
    return case


def _keep(case: Case, seqs: tuple[int, ...]) -> Case:
    return case.replace(q_lens=tuple(case.q_lens[i] for i in seqs), kv_lens=tuple(case.kv_lens[i] for i in seqs))


def _finding(
    name: str,
    done: Attempt,
    case: Case,
    *,
    alike: tuple[str, ...] = (),
    parameters: dict[str, Any] | None = None,
    off: float = 0.0,
    margin: float = 0.0,
    summary: str = "",
    evidence: list[str] | None = None,
    ranking: list[tuple[str, float]] | None = None,
    stages: Stages | None = None,
) -> Finding:
    return Finding(
        name,
        alike or (name,),
        parameters or {},
        off,
        margin,
        where(done, stages),
        summary,
        str(case),
        tuple(evidence or ()),
        tuple((ranking or [])[:8]),
    )


def _plain(parameters: Parameters) -> dict[str, Any]:
    """Parameters that JSON can hold."""
    plain: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            value = {", ".join(map(str, key)) if isinstance(key, tuple) else str(key): v for key, v in value.items()}
        plain[name] = "the end" if value == OPEN else value
    return plain


def where(done: Attempt, stages: Stages | None = None) -> Where:
    """The worst element, and the key at fault if the fault has one."""
    call, live = done.call, done.call.live
    if done.error or not live:
        return Where()
    off = ratios(call.out.cpu(), call.unwritten().cpu(), done.right, live)
    of_lse = _lse_alone(done, off)
    if of_lse is not None:
        (row, head), dim = divmod(int(of_lse.argmax()), of_lse.shape[1]), None
    else:
        row, rest = divmod(int(off.argmax()), off.shape[1] * off.shape[2])
        head, dim = divmod(rest, off.shape[2])
    starts, lens = call.q_starts.tolist(), call.kv_lens.tolist()
    seq = max((i for i in range(call.seqs) if starts[i] <= row), default=0)
    token = lens[seq] - (starts[seq + 1] - starts[seq]) + row - starts[seq]
    key, page, slot = _key(call, seq, row - starts[seq], stages)
    return Where(seq, row, token, head, dim, key, page, slot)


def _lse_alone(done: Attempt, off: torch.Tensor) -> torch.Tensor | None:
    """Error over budget of every LSE, if it is wrong and the output is not."""
    if done.call.lse is None or bool((off > 1).any()):
        return None
    found = lse_ratios(done.call.lse.cpu(), done.right, done.call.live)
    return found if bool((found > 1).any()) else None


def _key(call: Call, seq: int, query: int, stages: Stages | None) -> tuple[int | None, int | None, int | None]:
    """The first key that a fault treats otherwise: one it sees or hides, or one it reads elsewhere."""
    if stages is None:
        return None, None, None
    w = x.Work(call)
    at = x.read(w)
    row = x.rows(w, at)[seq]
    key: int | None = None
    try:
        n = row.kv_len
        positions = torch.arange(n)
        if stages.see is not x.see:
            hidden = (stages.see(w, row, n)[query] != x.see(w, row, n)[query]).nonzero().flatten()
            key = int(hidden[0]) if hidden.numel() else None
        elif stages.locate is not x.locate or stages.read is not x.read:
            theirs = stages.read(w)
            a, b = x.locate(w, at, row, positions), stages.locate(w, theirs, row, positions)
            moved = ((a[0] != b[0]) | (a[1] != b[1])).nonzero().flatten()
            key = int(moved[0]) if moved.numel() else None
    except (RuntimeError, IndexError):
        return None, None, None
    if key is None:
        return None, None, None
    column = key // call.page_size
    page = int(call.page_table[seq, column]) if column < call.page_table.shape[1] else None
    return key, page, key % call.page_size


def cell(finding: Finding, call: Call) -> tuple[int, int] | None:
    """Sequence and column of the page at fault, where one is known."""
    place = finding.where
    if place.sequence is None or place.key is None:
        return None
    return place.sequence, place.key // call.page_size
