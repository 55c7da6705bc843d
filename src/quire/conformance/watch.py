"""Results under watch: `with quire.checked(results=True):` compares what every call gave with the exact computation, at run time,
and names the fault as the kit would. Slow, and made for the one call that nobody believes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.conformance.record import Recorded, is_mixture, refuse_capture
from quire.conformance.replay import Verdict, judge
from quire.contract.call import Call
from quire.contract.check import recording
from quire.contract.rule import Violation
from quire.dispatch.decision import Decision
from quire.errors import QuireError
from quire.options import Options


class WrongResult(QuireError):
    """A kernel gave something else than the exact computation, beyond what its precision may lose."""

    def __init__(self, verdict: Verdict):
        self.verdict, self.finding = verdict, verdict.finding
        said = str(verdict.finding) if verdict.finding is not None else verdict.reason
        super().__init__(f"quire.attend: {verdict.of} is wrong in {verdict.wrong} elements\n  {said}")


class Judge:
    """Told about every call, it looks at the result. Whoever else is told (a recording) is told first."""

    def __init__(self, other: Any = None):
        self.other = other

    def writer(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        return launch if self.other is None else self.other.writer(launch)

    def refused(self, operation: str, call: Call, broken: Sequence[Violation]) -> None:
        if self.other is not None:
            self.other.refused(operation, call, broken)

    def attending(self, launch: Callable[..., Any], decision: Decision, how: dict[str, Any]) -> Callable[..., Any]:
        if self.other is not None:
            launch = self.other.attending(launch, decision, how)
        if is_mixture(how):
            return launch
        name = decision.chosen.name if decision.chosen is not None else "no kernel"

        def run(q: torch.Tensor, cache: KVCache, batch: Batch, options: Options, new: Any, out: torch.Tensor, lse: Any) -> None:
            # An operator that keeps its launchers may call one that was made under watch when nobody watches any more.
            watched = recording() is self
            if watched:
                refuse_capture(q)
            launch(q, cache, batch, options, new, out, lse)
            if not watched:
                return
            seen = Recorded(
                cache, batch, q, options, new, out, lse, {}, torch.arange(cache.pages, device="cpu"), {"lse": lse is not None}
            )

            def give(call: Any) -> None:
                call.out[: call.live] = out[: call.live]
                if call.lse is not None:
                    call.lse[: call.live] = lse[: call.live]

            verdict = judge(seen, name, give, with_lse=lse is not None)
            if verdict.status != "right":
                raise WrongResult(verdict)

        return run
