"""`with quire.checked(results=True):` compares the result of every call with the exact computation at run time, and names the
fault as the kit would. It is slow: use it to find a wrong call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quire.conformance.recording.record import Launch, Recorded, is_mixture, refuse_capture
from quire.conformance.recording.replay import Verdict, judge
from quire.contract.call import Call
from quire.contract.check import recording
from quire.contract.rule import Violation
from quire.dispatch.decision import Decision
from quire.errors import QuireError


class WrongResult(QuireError):
    """A result differs from the exact computation by more than its precision allows."""

    def __init__(self, verdict: Verdict):
        self.verdict, self.finding = verdict, verdict.finding
        reason = str(verdict.finding) if verdict.finding is not None else verdict.reason
        super().__init__(f"quire.attend: {verdict.of} is wrong in {verdict.wrong} elements\n  {reason}")


class Judge:
    """Checks the result of every call. Another observer, such as a recording, is called first."""

    def __init__(self, other: Any = None):
        self.other = other

    def refused(self, operation: str, call: Call, broken: Sequence[Violation]) -> None:
        if self.other is not None:
            self.other.refused(operation, call, broken)

    def around(self, operation: str, launcher: Launch, decision: Decision) -> Launch:
        """A launcher of attention whose results are compared with the exact computation; others are unchanged."""
        if self.other is not None:
            launcher = self.other.around(operation, launcher, decision)
        if operation != "attend":
            return launcher
        name = decision.chosen.name if decision.chosen is not None else "no kernel"

        def run(call: Call) -> None:
            # A cached launcher may be called after the context has ended.
            watched = recording() is self and not is_mixture(call)
            q, out, lse = call.q, call.out, call.lse
            assert q is not None and out is not None
            if watched:
                refuse_capture(q)
            launcher(call)
            if not watched:
                return
            new = call.new if call.new is None or call.cache.v_in_k is None else (call.new[0], None)
            pages, metadata = torch.arange(call.cache.pages, device="cpu"), {"lse": lse is not None}
            seen = Recorded(call.cache, call.batch, q, call.options, new, out, lse, {}, pages, metadata)

            def copy(to: Any) -> None:
                to.out[: to.live] = out[: to.live]
                if to.lse is not None and lse is not None:
                    to.lse[: to.live] = lse[: to.live]

            verdict = judge(seen, name, copy, with_lse=lse is not None)
            if verdict.status != "correct":
                raise WrongResult(verdict)

        return run
