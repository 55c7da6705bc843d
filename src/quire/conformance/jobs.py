"""Cases shared among processes: on a GPU most of the time goes into compiling, and that waits for nobody.

Each process takes the next case when it is done with one. It has a target of its own, which may again have a process of its own
(`quire.conformance.apart`). The report is the same as that of one process: results come in the order of the cases, and what was
borne out in one process is trusted in all.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from quire.conformance.apart import SECONDS, apart
from quire.conformance.case import Case
from quire.conformance.report import INTERRUPTED, Report, Result
from quire.conformance.run import Trust, facts_of, failed, over, report_of, survive
from quire.conformance.target import Failure, find, is_lost, is_ours
from quire.errors import ArgumentError


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
    workers = [_Worker(how) for _ in range(min(jobs, len(cases)))]
    try:
        facts = workers[0].facts()
        results = _share(workers, cases, known(facts["target"]), each, start, within)
    finally:
        _stop(workers)
    return report_of(facts, results, level, time.perf_counter() - start)


def _share(
    workers: list[_Worker],
    cases: Sequence[Case],
    known: dict[str, str],
    each: Callable[[Result], None],
    start: float,
    within: float,
) -> list[Result]:
    done: dict[int, Result] = {}
    trust = Trust()
    told = 0
    waiting = list(range(len(cases)))[::-1]
    while len(done) < len(cases):
        try:
            if time.perf_counter() - start > within:
                done |= {number: Result(cases[number], "unsupported", over(within)) for number in waiting}
                waiting.clear()
            for worker in workers:
                if worker.case is None and waiting:
                    worker.ask(waiting.pop(), cases, trust.names)
            busy = {worker.line: worker for worker in workers if worker.case is not None}
            for line in wait(list(busy)) if busy else ():
                worker = busy[line]  # type: ignore[index]
                if worker.said is None:
                    worker.facts()
                    continue
                assert worker.case is not None
                number, worker.case = worker.case, None
                result = worker.result(cases[number])
                done[number] = replace(result, known=known.get(cases[number].name, ""))
                trust.note(result)
        except KeyboardInterrupt:
            done = {number: Result(case, "unsupported", INTERRUPTED) for number, case in enumerate(cases)} | done
        while told in done:
            each(done[told])
            told += 1
    return [done[n] for n in range(len(cases))]


class _Worker:
    """The parent's side of one process."""

    def __init__(self, how: tuple[Any, ...]):
        self.how = how
        self.case: int | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, theirs = context.Pipe()
        # Not a daemon: it has to start a process itself.
        self.process = context.Process(target=_serve, args=(theirs, *self.how))
        self.process.start()
        theirs.close()
        self.said: Any = None

    def facts(self) -> dict[str, str]:
        """What the process says about its target: the first thing it sends."""
        if self.said is None:
            try:
                self.said = self.line.recv()
            except EOFError:
                raise ArgumentError("target", f"{self.how[0]}, whose process died", "a target that can be imported") from None
        if isinstance(self.said, tuple):
            raise ArgumentError(*self.said)
        facts: dict[str, str] = self.said
        return facts

    def ask(self, number: int, cases: Sequence[Case], trusted: frozenset[str]) -> None:
        self.case = number
        try:
            self.line.send((cases[number], trusted))
        except OSError:
            pass  # it died: there is no answer either

    def result(self, case: Case) -> Result:
        """The answer that is there, or what a death says; then another process takes over."""
        try:
            answer: Result = self.line.recv()
        except EOFError:
            self.process.join()
            answer = failed(case, Failure(f"the process died with status {self.process.exitcode}", "crashes"))
        if answer.status == "raised" and (not self.process.is_alive() or is_lost(answer.reason)):
            _stop([self])
            self._start()
        return answer


def _stop(workers: Sequence[_Worker], seconds: float = 2.0) -> None:
    for worker in workers:
        worker.line.close()  # it ends when there is nobody to ask
    deadline = time.monotonic() + seconds
    for worker in workers:
        worker.process.join(max(deadline - time.monotonic(), 0))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _serve(line: Connection, text: str, device: str | None, seconds: float, in_process: bool, threads: int) -> None:
    os.dup2(2, 1)  # the parent's standard output is a report
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        try:
            target = find(text, device) if in_process or is_ours(text) else stack.enter_context(apart(text, device, seconds))
        except ArgumentError as error:
            line.send((error.argument, str(error.given), error.allowed))
            return
        line.send(facts_of(target))
        while True:
            try:
                case, trusted = line.recv()
                line.send(survive(case, target, trusted))
            except (EOFError, OSError):
                return  # nobody asks any more
