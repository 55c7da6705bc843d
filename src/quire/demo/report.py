"""The report of a run: the verdict and the evidence, as text and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from quire.contract.rule import Violation
from quire.demo.engine import DemoEngine
from quire.demo.model import LAYERS
from quire.demo.screen import speed, why
from quire.demo.verification import Verification


@dataclass(frozen=True)
class DemoReport:
    """A run, its verification, and the contract violations that ended it, if any."""

    engine: DemoEngine
    outputs: Verification
    tokens: Verification
    violations: tuple[Violation, ...] = ()

    @property
    def finished(self) -> bool:
        return all(request.state == "done" for request in self.engine.requests)

    @property
    def held(self) -> int:
        """Number of pages that are not free."""
        return self.engine.pool.pages - self.engine.pool.free_pages

    @property
    def correct(self) -> bool:
        return self.finished and not self.held and not self.violations and self.outputs.holds and self.tokens.holds

    def to_dict(self) -> dict[str, Any]:
        engine = self.engine
        kernels = [
            {
                "layer": layer,
                "summary": LAYERS[layer].summary,
                "kernel": kernel,
                "because": decision.because,
                "calls": calls,
                "problem": str(decision.problem),
            }
            for (layer, kernel), (calls, decision) in engine.decisions.items()
        ]
        return {
            "verdict": "correct" if self.correct else "wrong",
            "device": str(engine.pool.device),
            "requests": len(engine.requests),
            "injected": engine.injected,
            "steps": engine.step,
            "tokens": engine.tokens,
            "tokens_made": sum(len(request.made) for request in engine.requests),
            "tokens_per_second": round(engine.tokens / engine.seconds, 1),
            "max_error": _finite(self.outputs.worst.error),
            "budget": self.outputs.worst.allowed,
            "proofs": {
                name: {
                    "holds": proof.holds,
                    "compared": proof.compared,
                    "error": _finite(proof.worst.error),
                    "allowed": proof.worst.allowed,
                    "where": proof.where,
                }
                for name, proof in (("outputs", self.outputs), ("tokens", self.tokens))
            },
            "kernels": kernels,
            "violations": [violation.to_dict() for violation in self.violations],
            "pages": {"pool": engine.pool.pages, "high_water": engine.high_water, "held_at_end": self.held},
            "forks": engine.forks,
            "copies": engine.copies,
            "waits": engine.waits,
        }

    def __str__(self) -> str:
        engine, outputs, tokens = self.engine, self.outputs, self.tokens
        calls = sum(count for count, _ in engine.decisions.values())
        refused = f"; the last one, in step {engine.step}, was refused" if self.violations else ""
        pages = f"{engine.high_water} of {engine.pool.pages} in use at most, {self.held} "
        proved = (
            (not self.violations, "contract", f"checked in full before each of {calls} calls{refused}"),
            (outputs.holds, "outputs", f"{outputs.compared} numbers compared with the reference in float64: {outputs.worst}"),
            (tokens.holds, "tokens", f"{tokens.compared} sampled again with each request run alone, without pages: {tokens.worst}"),
            (self.finished and not self.held, "pages", pages + ("at the end" if self.finished else "when the run ended early")),
        )
        lines = [
            "",
            f"{engine.step} steps, {engine.tokens} tokens, {speed(engine)} on {engine.pool.device} with all checks; "
            f"forks: {engine.forks}, pages copied on write: {engine.copies}, waits for pages: {engine.waits}",
            *why(engine),
            *(f"{'ok   ' if good else 'WRONG'}  {name:9} {text}" for good, name, text in proved),
        ]
        if self.violations:
            lines += ["", str(self.violations[0])]
        if len(self.violations) > 1:
            lines.append(f"  and {len(self.violations) - 1} more violations of this call")
        lines += [text for proof in (outputs, tokens) if proof.where for text in ("", proof.where)]
        return "\n".join((*lines, "", f"verdict: {'correct' if self.correct else 'WRONG'}"))


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
