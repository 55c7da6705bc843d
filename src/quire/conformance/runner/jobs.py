"""Cases shared among processes: on a GPU most of the time goes into compiling, and that waits for nobody.

Each process takes the next case when it is done with one. It has a target of its own, which may again have a process of its own
(`subprocess_target`). The report is the same as that of one process: results come in the order of the cases, and what was
confirmed in one process is trusted in all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from quire.conformance.cases.case import Case
from quire.conformance.reporting.report import INTERRUPTED, Report, Result
from quire.conformance.runner.run import Diagnoses, facts_of, failed, over, report_of, survive
from quire.conformance.runner.subprocess_target import SECONDS, apart
from quire.conformance.runner.target import Failure, find, is_lost, is_ours
from quire.conformance.runner.worker import SubprocessWorker, begin_child
from quire.errors import ArgumentError

SECONDS_TO_END = 2.0
"""How long a process may take to end when there are no more cases."""


def conform_in(
    jobs: int,
    text: str,
    cases: Sequence[Case],
    level: str = "",
    *,
    device: str | None = None,
    seconds: float = SECONDS,
    in_process: bool = False,
    known: Callable[[str], dict[str, str]] = lambda name: {},
    each: Callable[[Result], None] = lambda result: None,
    within: float = math.inf,
) -> Report:
    """As `conform`, in so many processes. `known` gives the failures that are known of a target of this name."""
    start = time.perf_counter()
    how = (text, device, seconds, in_process, max(torch.get_num_threads() // jobs, 1))
    workers = [CaseWorker(how) for _ in range(min(jobs, len(cases)))]
    try:
        facts = workers[0].facts()
        results = _share(workers, cases, known(facts["target"]), each, start, within)
    finally:
        _stop(workers)
    return report_of(facts, results, level, time.perf_counter() - start)


def _share(
    workers: list[CaseWorker],
    cases: Sequence[Case],
    known: dict[str, str],
    each: Callable[[Result], None],
    start: float,
    within: float,
) -> list[Result]:
    done: dict[int, Result] = {}
    diagnoses = Diagnoses()
    told = 0
    waiting = list(range(len(cases)))[::-1]
    while len(done) < len(cases):
        try:
            if time.perf_counter() - start > within:
                done |= {number: Result(cases[number], "unsupported", over(within)) for number in waiting}
                waiting.clear()
            for worker in workers:
                if worker.case is None and waiting:
                    worker.case = waiting.pop()
                    worker.ask((cases[worker.case], diagnoses.trusted))
            busy = {worker.connection: worker for worker in workers if worker.case is not None}
            for ready in wait([line for line in busy if line is not None]) if busy else ():
                worker = busy[ready]  # type: ignore[index]
                if worker.greeting is None:
                    worker.facts()
                    continue
                assert worker.case is not None
                number, worker.case = worker.case, None
                result = worker.result(cases[number])
                done[number] = replace(result, known=known.get(cases[number].name, ""))
                diagnoses.note(result)
        except KeyboardInterrupt:
            done = {number: Result(case, "unsupported", INTERRUPTED) for number, case in enumerate(cases)} | done
        while told in done:
            each(done[told])
            told += 1
    return [done[n] for n in range(len(cases))]


class CaseWorker(SubprocessWorker):
    """A process that runs cases, one at a time."""

    def __init__(self, arguments: tuple[Any, ...]):
        super().__init__(_serve, arguments, daemon=False)  # a daemon could not start a process for its target
        self.case: int | None = None
        """The number of the case that it runs."""
        self.start()

    def facts(self) -> dict[str, str]:
        """What the process says about its target: the first thing it sends."""
        try:
            facts: dict[str, str] = self.introduce()
        except EOFError:
            raise ArgumentError("target", f"{self.arguments[0]}, whose process died", "a target that can be imported") from None
        return facts

    def result(self, case: Case) -> Result:
        """The answer that is there, or what a death says; then another process takes over."""
        try:
            answer: Result = self.receive()
        except (EOFError, OSError):
            answer = failed(case, Failure(f"the process died with status {self.exit_code()}", "crashes"))
        if answer.status == "raised" and (not self.process.is_alive() or is_lost(answer.reason)):
            self.stop(SECONDS_TO_END)
            self.start()
        return answer


def _stop(workers: Sequence[CaseWorker]) -> None:
    for worker in workers:
        worker.close()  # all of them end at the same time
    deadline = time.monotonic() + SECONDS_TO_END
    for worker in workers:
        worker.stop(max(deadline - time.monotonic(), 0))


def _serve(line: Connection, text: str, device: str | None, seconds: float, in_process: bool, threads: int) -> None:
    begin_child()
    torch.set_num_threads(threads)
    # A broken connection means that nobody asks any more: the parent was interrupted.
    with ExitStack() as stack, suppress(EOFError, OSError):
        try:
            target = find(text, device) if in_process or is_ours(text) else stack.enter_context(apart(text, device, seconds))
        except ArgumentError as error:
            line.send((error.argument, str(error.given), error.allowed))
            return
        line.send(facts_of(target))
        while True:
            case, trusted = line.recv()
            line.send(survive(case, target, trusted))
