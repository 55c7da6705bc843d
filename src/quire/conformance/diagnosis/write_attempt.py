"""One write of a target: what the cache holds after it, what it should hold, and the distance of a prediction from that."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from quire.conformance.cases.build_write import build_write
from quire.conformance.cases.case import Case
from quire.conformance.cases.formats import GROUP, numbers_of_scales
from quire.conformance.cases.write_call import WriteCall
from quire.conformance.oracle.write import WriteOutcome, WriteStages, exact_write
from quire.conformance.oracle.write_budget import codes_of, ratios_of_write
from quire.conformance.runner.target import Failure, Target
from quire.conformance.runner.threads import all_threads

NAMES = {"k": "K", "v": "V", "k_scale": "scales of K", "v_scale": "scales of V", "q": "queries"}
"""What a write changes, in words."""


class WrongElement(NamedTuple):
    """The worst element of a write."""

    what: str
    """k, v, k_scale, v_scale or q."""
    place: tuple[int, ...]
    """Number of the page among those with contents, offset, head and dim; row, head and dim of queries."""


@dataclass
class WriteAttempt:
    """A write that was run, and its exact result."""

    call: WriteCall
    truth: WriteOutcome
    failure: Failure | None = None

    @property
    def error(self) -> str:
        return "" if self.failure is None else str(self.failure)

    @cached_property
    def held(self) -> dict[str, torch.Tensor]:
        """What the cache and the queries are after the call."""
        return self.call.contents()

    @cached_property
    def ratios(self) -> dict[str, torch.Tensor]:
        """Error over budget of every element."""
        return ratios_of_write(self.call, self.held, self.truth)

    @property
    def off(self) -> float:
        """The largest error in budgets; at most 1 is correct."""
        return torch.inf if self.error else _largest(self.ratios)

    @property
    def is_correct(self) -> bool:
        return not self.error and self.off <= 1

    def numbers(self, part: str) -> torch.Tensor:
        """Stored elements of K or V in units of their scale, [pages with contents, page_size, kv_heads, dim]."""
        format, dim = self.call.case.formats[part], self.call.case.dims[part]
        held = self.held[part]
        number = codes_of(format, held, dim)[1]
        return number * numbers_of_scales(held[..., dim // 2 :]).repeat_interleave(GROUP[format], -1) if format in GROUP else number

    @property
    def wrong_elements(self) -> int:
        return sum(int((ratio > 1).sum()) for ratio in self.ratios.values())

    @property
    def seen(self) -> WriteAttempt:
        """What solvers of faults look at."""
        return self

    @cached_property
    def slots_wrong(self) -> torch.Tensor:
        """Slots with a wrong element of K or V, bool [pages with contents, page_size]."""
        cache = [ratio.flatten(2).amax(2) for what, ratio in self.ratios.items() if what != "q"]
        return torch.stack(cache).amax(0) > 1

    @cached_property
    def rows_wrong(self) -> torch.Tensor:
        """Tokens whose slot or query is wrong, bool [live]."""
        slot = self.call.slots[: self.call.live].cpu().long()
        size = self.call.case.page_size
        number = torch.searchsorted(self.call.pages_of, slot.clamp(min=0) // size).clamp(max=self.call.pages_of.numel() - 1)
        wrong = self.slots_wrong[number, slot % size] & (slot >= 0)
        return wrong | (self.ratios["q"].amax((1, 2)) > 1) if "q" in self.ratios else wrong

    @property
    def wrong_sequences(self) -> tuple[int, ...]:
        """Sequences with a wrong token."""
        parts = self.rows_wrong.split(list(self.call.case.q_lens))
        return tuple(i for i, part in enumerate(parts) if bool(part.any()))

    @property
    def worst(self) -> WrongElement:
        """The element with the largest error."""
        what = max(self.ratios, key=lambda name: float(self.ratios[name].max()) if self.ratios[name].numel() else 0.0)
        ratio = self.ratios[what]
        return WrongElement(what, tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape)))

    def distance_to(self, stages: WriteStages) -> float:
        """How far the result is from what these stages predict, in budgets."""
        return _largest(ratios_of_write(self.call, self.held, exact_write(self.call, stages)))

    def share_missed(self, stages: WriteStages) -> float:
        """The share of elements that are not what these stages predict."""
        ratios = ratios_of_write(self.call, self.held, exact_write(self.call, stages)).values()
        return sum(int((ratio > 1).sum()) for ratio in ratios) / max(sum(ratio.numel() for ratio in ratios), 1)


def _largest(ratios: dict[str, torch.Tensor]) -> float:
    return max((float(ratio.max()) for ratio in ratios.values() if ratio.numel()), default=0.0)


def attempt_write(case: Case, target: Target, call: WriteCall | None = None) -> WriteAttempt:
    """Builds a write and runs a target on it."""
    call = build_write(case, target.device) if call is None else call
    done = WriteAttempt(call, exact_write(call))
    try:
        with all_threads():
            target.run(call)
    except Exception as error:
        done.failure = Failure.of(error)
    return done
