"""Starts engines as processes of their own, and compares what came out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models import reference_logits

HERE = Path(__file__).parent
SAFETY_FACTOR = 2.0
"""How many times the error of the stock backend is allowed: what the conformance kit allows over a straightforward computation."""


class Run(NamedTuple):
    """What an engine gave."""

    results: list[dict[str, Any]]
    """For each request: prompt, tokens, and the logits from which each token was taken."""
    counts: dict[str, int]
    """What the scheduler and the plugin did."""


class Started(NamedTuple):
    """An engine that is running."""

    process: subprocess.Popen[str]
    result: Path

    def text(self) -> str:
        """Waits for the process, which has to fail, and returns what it printed."""
        printed, _ = self.process.communicate(timeout=500)
        assert self.process.returncode, "the engine ran to its end, and should have failed"
        return printed

    def wait(self) -> Run:
        """Waits for the process, which has to succeed."""
        printed, _ = self.process.communicate(timeout=500)
        assert not self.process.returncode, printed[-6000:]
        return Run(**torch.load(self.result, weights_only=False))


def start(folder: Path, name: str, request: dict[str, Any], script: str = "engine_run.py", **environment: str) -> Started:
    """Starts an engine with a request and further environment variables."""
    folder.mkdir(parents=True, exist_ok=True)
    asked, result = folder / f"{name}.json", folder / f"{name}.pt"
    asked.write_text(json.dumps(request))
    command = (sys.executable, str(HERE / script), str(asked), str(result))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("QUIRE_")}
    # The thread settings of the test session are not those of an engine.
    for key in ("OMP_NUM_THREADS", "LD_PRELOAD"):
        inherited.pop(key, None)
    process = subprocess.Popen(
        command, env=inherited | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
    )
    return Started(process, result)


def start_both(folder: Path, name: str, request: dict[str, Any], **environment: str) -> tuple[Run, Run]:
    """The same requests with the stock backend and with Quire in its place."""
    stock = start(folder, f"{name}-stock", request, **environment)
    quire = start(folder, f"{name}-quire", request, **environment, QUIRE_VLLM_OVERRIDE="CPU_ATTN")
    return stock.wait(), quire.wait()


def largest_error(run: Run, model: Path) -> float:
    """The largest distance of a logit from the reference in float64, each at its own prefix."""
    worst = 0.0
    for result in run.results:
        first = len(result["prompt"]) - 1
        right = reference_logits(model, result["prompt"] + result["tokens"])[first:-1]
        worst = max(worst, float((result["logits"] - right).abs().max()))
    return worst


class Comparison(NamedTuple):
    """How two runs of the same requests differ."""

    stock_error: float
    """The largest error of a logit with the stock backend, against the reference in float64."""
    quire_error: float
    """The same with Quire."""
    unexplained: list[str]
    """Tokens that differ though the two largest logits are further apart than the budget."""
    compared: int
    """Tokens compared: those up to the first that differs, in every request."""

    @property
    def budget(self) -> float:
        """The error that Quire may have."""
        return SAFETY_FACTOR * self.stock_error

    @property
    def agrees(self) -> bool:
        """Whether logits are within the budget, and tokens equal wherever the budget decides them."""
        return self.quire_error <= self.budget and not self.unexplained


def compare(stock: Run, quire: Run, model: Path) -> Comparison:
    """Compares the logits of both runs with the reference, and their tokens with each other."""
    stock_error, quire_error = largest_error(stock, model), largest_error(quire, model)
    unexplained, compared = [], 0
    for i, (a, b) in enumerate(zip(stock.results, quire.results, strict=True)):
        assert a["prompt"] == b["prompt"]
        for at, (left, right) in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
            compared += 1
            if left != right:
                first, second = a["logits"][at].topk(2).values.tolist()
                if first - second > SAFETY_FACTOR * stock_error:
                    unexplained.append(f"request {i}, token {at}: {left} and {right}, the largest logits {first - second} apart")
                # From here on the prompts are different.
                break
    return Comparison(stock_error, quire_error, unexplained, compared)
