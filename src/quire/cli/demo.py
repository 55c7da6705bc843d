"""`quire demo`: a small continuous-batching decoder on this machine, shown as it runs, then proved."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import quire
from quire.contract.rule import Violation
from quire.demo import requests
from quire.demo.engine import Engine
from quire.demo.model import HEAD_DIM, KV_HEADS, Q_HEADS, Model
from quire.demo.plants import PLANTS
from quire.demo.proof import Proof, outputs, tokens
from quire.demo.report import Report
from quire.demo.screen import screen
from quire.dispatch.choose import choose
from quire.errors import ArgumentError

HELP = "watch a small decoder use a paged cache, then see it proved right"
EXAMPLES = """\
examples:
  quire demo                        a live table in a terminal, lines elsewhere
  quire demo --json                 for programs
  quire demo --plant drop-token     what a failure looks like: the fault is found, named and drawn

exit status: 0 if the run was right, 1 if it was wrong
"""

PAGES = 46
"""Few enough that somebody has to wait."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=10, metavar="N", help="how many requests arrive (10)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="for weights, arrivals and sampling (0)")
    faults = "; ".join(f"{name}: {plant.summary}" for name, plant in PLANTS.items())
    parser.add_argument("--plant", choices=tuple(PLANTS), help=f"do something wrong in the middle of the run. {faults}")
    parser.add_argument("--quiet", action="store_true", help="show the verdict alone")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    for name, value, low, high in (("--requests", args.requests, 1, 64), ("--seed", args.seed, 0, 2**31 - 1)):
        if not low <= value <= high:
            raise ArgumentError(name, value, f"{low} to {high}")
    with one_thread():
        report = demonstrate(args.requests, args.seed, args.plant, quiet=args.quiet or args.json)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print(str(report).splitlines()[-1] if args.quiet and report.right else report)
    return 0 if report.right else 1


def demonstrate(count: int, seed: int, plant: str | None = None, quiet: bool = True) -> Report:
    """Runs the engine under the full contract, then proves what it did, as far as it came."""
    prefix, arriving = requests.make(count, seed)
    engine = Engine(Model.make(seed, best_device()), prefix, arriving, PAGES, PLANTS[plant] if plant else None)
    violations: tuple[Violation, ...] = ()
    with screen(quiet) as show:
        try:
            with quire.checked():
                for _ in engine.run():
                    show(engine)
        except quire.ContractError as error:
            violations = error.violations
            show(engine)
    if plant and not engine.planted:
        raise ArgumentError("--plant", plant, "with more --requests: the run ended before there was a page to misuse")
    return Report(engine, Proof.of(outputs(engine)), Proof.of(tokens(engine)), violations)


@contextmanager
def one_thread() -> Iterator[None]:
    """The products here are too small to share: waiting for a second thread, on a busy machine, takes longer than they do."""
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
