"""The result of choosing a kernel: the chosen one, why the others were refused, and what to change to get a faster one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from quire.dispatch.kernel import Kernel, LimitResult
from quire.platform import Platform
from quire.problem import Extent, Problem

COMPILE_SECONDS = {"attend_kernel": 2.0, "prefill_kernel": 4.0}
"""Approximate compile times on one core; all other kernels take less than half a second."""


class Candidate(NamedTuple):
    """A kernel and the results of its limits."""

    kernel: Kernel
    """The kernel."""
    findings: tuple[LimitResult, ...]
    """Each of its limits: `rule`, `given`, `allowed`, `holds`, and `change`, what the user can change to satisfy it."""

    @property
    def refusals(self) -> tuple[LimitResult, ...]:
        """The limits that do not hold."""
        return tuple(finding for finding in self.findings if not finding.holds)

    @property
    def changes(self) -> tuple[str, ...] | None:
        """What to change so that it runs; None if the machine cannot run it."""
        changes = tuple(refusal.change for refusal in self.refusals)
        return None if None in changes else tuple(change for change in changes if change)

    def to_dict(self) -> dict[str, Any]:
        """The candidate as JSON-compatible values."""
        refusals = [refusal.to_dict() for refusal in self.refusals]
        return {"kernel": self.kernel.name, "summary": self.kernel.summary, "refusals": refusals}


@dataclass(frozen=True)
class Decision:
    """Which kernel runs a call and why. `quire.explain` returns it. `str(decision)` is the explanation; `to_dict()` is for
    programs.

    Example:
        >>> import torch, quire
        >>> pool = quire.PagePool(pages=32, page_size=16)
        >>> cache = quire.KVCache.allocate(pool, kv_heads=8, head_dim=128)
        >>> q, batch = torch.zeros(400, 32, 128, dtype=torch.bfloat16), pool.step({pool.sequence(): 400})
        >>> decision = quire.explain(q, cache, batch, platform=quire.Platform.named("h100"))
        >>> decision.chosen.name, decision.because
        ('gluon-mixed', 'it is the first whose limits all hold')
    """

    problem: Problem
    """What a kernel is compiled for."""
    extent: Extent
    """The size of the batch."""
    platform: Platform
    """The machine that the choice is for."""
    operation: str
    """attend, write, step or audit."""
    chosen: Kernel | None
    """The kernel that runs the call; None if no kernel can."""
    candidates: tuple[Candidate, ...]
    """Every kernel of the operation, the most preferred first."""
    requested: str | None = None
    """The name of the kernel, if one was requested."""
    capturing: bool = False
    """Whether a CUDA graph is being captured."""
    related: tuple[Decision, ...] = ()
    """The decisions for the other kernels of the operation: the write of a step, the audit of a cache with a ledger."""

    @cached_property
    def compiled(self) -> tuple[str, ...]:
        """A key for each compiled kernel that the call needs: a hash of the inputs of `triton.compile`. Empty for kernels that are
        not compiled at run time. No device is needed."""
        keys = () if self.chosen is None else self.chosen.keys_for(self.problem, self.extent, self.platform)
        return tuple(dict.fromkeys((*keys, *(key for one in self.related for key in one.compiled))))

    @property
    def not_compiled(self) -> tuple[str, ...]:
        """The names of the kernels that a call would have to compile: neither this process nor the compile cache has them."""
        names = () if self.chosen is None else self.chosen.not_compiled(self.problem, self.extent, self.platform)
        return (*names, *(name for one in self.related for name in one.not_compiled))

    @property
    def next_better(self) -> Candidate | None:
        """The most preferred kernel before the chosen one that could run after the `changes` it lists; None if there is none."""
        for candidate in self.candidates:
            if candidate.kernel is self.chosen:
                return None
            if candidate.changes is not None:
                return candidate
        return None

    def to_dict(self) -> dict[str, Any]:
        """The decision as JSON-compatible values."""
        better = self.next_better
        return {
            "operation": self.operation,
            "problem": self.problem.to_dict(),
            "extent": self.extent._asdict(),
            "platform": self.platform.to_dict(),
            "requested": self.requested,
            "capturing": self.capturing,
            "chosen": self.chosen and self.chosen.name,
            "because": self.because,
            "compiled": list(self.compiled),
            "not_compiled": list(self.not_compiled),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "next_better": better and {"kernel": better.kernel.name, "changes": list(better.changes or ())},
        }

    @property
    def because(self) -> str:
        """Why the kernel was chosen, or why there is none."""
        if self.requested is not None:
            return f"{self.requested} was requested by name, and its limits {'all hold' if self.chosen else 'do not all hold'}"
        return "it is the first whose limits all hold" if self.chosen else "there is none whose limits all hold"

    @property
    def compile_state(self) -> str:
        """Whether the kernels that are compiled at run time are there already, or how long they will take."""
        missing = self.not_compiled
        if not missing:
            return "compiled"
        seconds = sum(COMPILE_SECONDS.get(name, 0.3) for name in missing)
        count = "" if len(missing) == len(self.compiled) else f"{len(missing)} of them "
        return f"{count}not compiled yet (about {max(1, round(seconds))} s)"

    def summary(self, width: int = 100) -> str:
        """In short: the choice, its reason, what would be faster, and the refusals by reason. `str(decision)` has every limit."""
        from quire.dispatch.summary import summary

        return "\n".join(part for line in summary(self) for part in line.wrapped(width))

    def __str__(self) -> str:
        chosen = f"{self.chosen.name} ({self.chosen.summary})" if self.chosen else "none"
        lines = [
            f"{self.operation}: {self.extent}, {self.problem}" + (", inside a CUDA graph" if self.capturing else ""),
            f"on {self.platform}",
            f"chosen: {chosen}, because {self.because}",
        ]
        if self.compiled:
            lines.append(f"kernels: {len(self.compiled)}, {self.compile_state}")
        for candidate in self.candidates:
            if candidate.refusals:
                lines.append(f"refused: {candidate.kernel.name} ({candidate.kernel.summary})")
                lines += [f"  {refusal}" for refusal in candidate.refusals]
            elif candidate.kernel is not self.chosen:
                lines.append(f"could also run: {candidate.kernel.name} ({candidate.kernel.summary})")
        better = self.next_better
        if better:
            changes = better.changes or (f"do not request {self.requested}",)
            lines.append(f"to get {better.kernel.name}: {'; '.join(changes)}")
        return "\n".join(lines)
