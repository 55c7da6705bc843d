"""Divides cases over processes: on a GPU most of the time is compilation, which then runs in parallel.

Each process takes the next case when it has finished one. It has its own target, which may run in a further subprocess
(`subprocess_target`). The report is the same as that of one process: results are in the order of the cases, and a fault that was
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
from quire.conformance.runner.find_target import find, is_ours
from quire.conformance.runner.run import Diagnoses, facts_of, failed, report_of, survive, time_limit, with_contrast
from quire.conformance.runner.subprocess_target import SECONDS, in_subprocess
from quire.conformance.runner.target import Failure, is_lost
from quire.conformance.runner.worker import SubprocessWorker, begin_child
from quire.errors import ArgumentError

SECONDS_TO_END = 2.0
"""How long a process may take to exit when there are no more cases."""


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
    """As `conform`, in `jobs` processes. `known` returns the known failures of a target by its name."""
    start = time.perf_counter()
    arguments = (text, device, seconds, in_process, max(torch.get_num_threads() // jobs, 1))
    workers = [CaseWorker(arguments) for _ in range(min(jobs, len(cases)))]
    try:
        facts = workers[0].facts()
        results = _share(workers, cases, known(facts["target"]), each, start, within)
        report = report_of(facts, results, level, time.perf_counter() - start)
        return report if report.not_started else with_contrast(report, workers[0].run_case)
    finally:
        _stop(workers)


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
    reported = 0
    waiting = list(range(len(cases)))[::-1]
    while len(done) < len(cases):
        try:
            if time.perf_counter() - start > within:
                done |= {number: Result(cases[number], "skipped", time_limit(within)) for number in waiting}
                waiting.clear()
            for worker in workers:
                if worker.case is None and waiting:
                    worker.case = waiting.pop()
                    worker.request((cases[worker.case], diagnoses.trusted))
            busy = {worker.connection: worker for worker in workers if worker.case is not None}
            for connection in wait([one for one in busy if one is not None]) if busy else ():
                worker = busy[connection]  # type: ignore[index]
                if not worker.is_ready:
                    worker.facts()
                    continue
                assert worker.case is not None
                number, worker.case = worker.case, None
                result = worker.result(cases[number])
                done[number] = replace(result, known=known.get(cases[number].name, ""))
                diagnoses.add(result)
        except KeyboardInterrupt:
            done = {number: Result(case, "skipped", INTERRUPTED) for number, case in enumerate(cases)} | done
        while reported in done:
            each(done[reported])
            reported += 1
    return [done[n] for n in range(len(cases))]


class CaseWorker(SubprocessWorker):
    """A process that runs cases, one at a time."""

    def __init__(self, arguments: tuple[Any, ...]):
        super().__init__(_serve, arguments, daemon=False)  # a daemon could not start a process for its target
        self.case: int | None = None
        """The number of the case that it runs."""
        self.start()

    def facts(self) -> dict[str, str]:
        """Name, device and version of the target, from the process's first message."""
        try:
            facts: dict[str, str] = self.ready_message()
        except EOFError:
            raise ArgumentError("target", f"{self.arguments[0]}, whose process died", "a target that can be imported") from None
        return facts

    def run_case(self, case: Case) -> bool | None:
        """Whether a case passes; None if the target cannot run it."""
        self.request((case, None))
        return {"correct": True, "wrong": False}.get(self.result(case).status)

    def result(self, case: Case) -> Result:
        """The result of the case that the process ran. If the process died, or lost its device, another one is started."""
        try:
            result: Result = self.receive()
        except (EOFError, OSError):
            result = failed(case, Failure(f"the process died with status {self.exit_code()}", "crashes"))
        if result.status == "raised" and (not self.process.is_alive() or is_lost(result.reason)):
            self.stop(SECONDS_TO_END)
            self.start()
        return result


def _stop(workers: Sequence[CaseWorker]) -> None:
    for worker in workers:
        worker.close()  # all of them exit at the same time
    deadline = time.monotonic() + SECONDS_TO_END
    for worker in workers:
        worker.stop(max(deadline - time.monotonic(), 0))


def _serve(connection: Connection, text: str, device: str | None, seconds: float, in_process: bool, threads: int) -> None:
    begin_child()
    torch.set_num_threads(threads)
    # A broken connection means that the parent has ended.
    with ExitStack() as stack, suppress(EOFError, OSError):
        try:
            target = (
                find(text, device) if in_process or is_ours(text) else stack.enter_context(in_subprocess(text, device, seconds))
            )
        except ArgumentError as error:
            connection.send((error.argument, str(error.given), error.allowed))
            return
        connection.send(facts_of(target))
        while True:
            case, trusted = connection.recv()
            connection.send(survive(case, target, trusted))
