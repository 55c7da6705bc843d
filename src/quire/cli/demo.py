"""`quire demo`: a small continuous-batching decoder on this machine, displayed as it runs, then verified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
import torch

import quire
from quire.cli.command import INTERRUPTED, Args, ChoiceOf, Command, Option, Whole, answer, flag, is_quiet
from quire.contract.rule import Violation
from quire.demo import requests
from quire.demo.engine import DemoEngine
from quire.demo.injected_faults import INJECTED_FAULTS
from quire.demo.model import HEAD_DIM, KV_HEADS, Q_HEADS, DemoModel
from quire.demo.report import DemoReport
from quire.demo.screen import screen
from quire.demo.verification import Verification, outputs, tokens
from quire.dispatch.choose import choose
from quire.errors import ArgumentError

HELP = """Runs a small decoder with continuous batching on a paged cache and checks every call against the contract. Then compares
every output with the reference and every token with a run without pages."""
EXAMPLES = """\
examples:
  quire demo                        a live table in a terminal, lines elsewhere
  quire demo --json                 for programs
  quire demo --inject drop-token    what a failure looks like: the fault is detected, located and shown

exit status: 0 if the run was correct, 1 if it was wrong, 2 invalid arguments, 130 interrupted: what was verified until then is
shown
"""

PAGES = 46
"""Few enough that some requests must wait for pages."""


_FAULTS = "; ".join(f"{name}: {fault.summary}" for name, fault in INJECTED_FAULTS.items())
PARAMETERS: list[click.Parameter] = [
    Option("--requests", type=Whole(1, 64), default=10, help="how many requests arrive (10)"),
    Option("--seed", type=Whole(0, 2**31 - 1), default=0, help="for weights, arrivals and sampling (0)"),
    Option("--inject", type=ChoiceOf(INJECTED_FAULTS), help=f"inject a fault during the run. {_FAULTS}"),
    Option("--plant", type=ChoiceOf(INJECTED_FAULTS), hidden=True),  # the earlier name
    flag("--quiet", "print only the verdict"),
]


def run(args: Args) -> int:
    with one_thread():
        report = demonstrate(args.requests, args.seed, args.inject or args.plant, quiet=args.quiet or is_quiet(args))
    interrupted = not report.finished and not report.violations
    found = report.to_dict() | {"interrupted": interrupted}
    if interrupted:
        found["verdict"] = "interrupted"
    text = str(report)
    if interrupted:
        calls = sum(count for count, _ in report.engine.decisions.values())
        text = f"interrupted in step {report.engine.step}: {report.engine.tokens} tokens, {calls} calls, each within the contract"
        text += "\n" + "\n".join(_proved(report))
    elif args.quiet and report.correct:
        text = text.splitlines()[-1]
    answer(args, found, text)
    return INTERRUPTED if interrupted else 0 if report.correct else 1


def _proved(report: DemoReport) -> Iterator[str]:
    """What was verified of an interrupted run."""
    for name, proof in (("outputs", report.outputs), ("tokens", report.tokens)):
        yield f"{'ok   ' if proof.holds else 'WRONG'}  {name:9} {proof.compared} compared: {proof.worst}"


def demonstrate(count: int, seed: int, fault: str | None = None, quiet: bool = True) -> DemoReport:
    """Runs the engine under the full contract, then verifies its outputs and tokens, also of a run that ended early."""
    prefix, arriving = requests.make(count, seed)
    engine = DemoEngine(DemoModel.make(seed, best_device()), prefix, arriving, PAGES, INJECTED_FAULTS[fault] if fault else None)
    violations: tuple[Violation, ...] = ()
    with screen(quiet) as show:
        try:
            with quire.checked():
                for _ in engine.run():
                    show(engine)
        except quire.ContractError as error:
            violations = error.violations
            show(engine)
        except KeyboardInterrupt:
            pass  # the steps until now are verified
    if fault and not engine.injected and all(request.state == "done" for request in engine.requests):
        raise ArgumentError("--inject", fault, "with more --requests: the run ended before a page was released")
    return DemoReport(engine, Verification.of(outputs(engine)), Verification.of(tokens(engine)), violations)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread: the matrix products of the demo are too small to divide over threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def best_device() -> str:
    """The accelerator, if there is one and a kernel for it; otherwise the CPU."""
    problem = quire.Problem(q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=16, q_dtype="fp32", device="cuda")
    return "cuda" if torch.cuda.is_available() and choose(problem, quire.Extent(), quire.Platform.detect("cuda")).chosen else "cpu"


COMMAND = Command("demo", run, HELP, PARAMETERS, EXAMPLES)
