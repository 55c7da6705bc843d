"""The suite in a team's own pytest: `pytest --quire-target my_kernels.attention:paged`. Every case is a test.

A case that the target does not support is skipped, with the reason. A failure names the fault, its place, and the command that
reproduces it. `--quire-known FILE` lists known failures: they are expected, and one that passes is a failure. `--quire-subprocess`
runs the target in a subprocess: a crash is a failed test, and the session continues.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from quire.conformance.cases.case import Case
    from quire.conformance.reporting.report import Result
    from quire.conformance.runner.target import Target


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("quire", "quire: conformance tests of a paged-attention function")
    group.addoption("--quire-target", metavar="TARGET", help="module:function, file.py:function, a kernel of Quire or a peer")
    group.addoption(
        "--quire-level", metavar="LEVEL", default="smoke", help="smoke: seconds; standard: up to a minute; full: minutes (smoke)"
    )
    group.addoption("--quire-device", metavar="NAME", help="device (default: declared by the target)")
    group.addoption("--quire-subprocess", action="store_true", help="run the target in a subprocess; a crash is a failed test")
    group.addoption("--quire-known", metavar="FILE", help="known failures, one per line: target, case, reason")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Adds the suite to the tests that the session collects, also in an empty folder."""
    report = yield
    target = collector.config.getoption("--quire-target")
    if target and isinstance(collector, pytest.Session) and report.passed:
        report.result.append(Suite.of(collector, target))
    return report


class Suite(pytest.Collector):
    """The cases of a level, for one target."""

    target: Target
    cases: Sequence[Case]
    known: dict[str, str]

    @classmethod
    def of(cls, session: pytest.Session, target: str) -> Suite:
        from quire.conformance.cases import suite
        from quire.conformance.runner import known_failures as known
        from quire.conformance.runner.find_target import find
        from quire.conformance.runner.subprocess_target import in_subprocess
        from quire.errors import ArgumentError

        made: Suite = cls.from_parent(session, name=target, nodeid=f"quire {target}")
        option = session.config.getoption
        here = str(session.config.invocation_params.dir)
        if here not in sys.path:  # as `python -m pytest` would
            sys.path.insert(0, here)
        try:
            if option("--quire-subprocess"):
                stack = ExitStack()
                session.config.add_cleanup(stack.close)
                made.target = stack.enter_context(in_subprocess(target, option("--quire-device")))
            else:
                made.target = find(target, option("--quire-device"))
            made.cases = suite.cases(option("--quire-level"), made.target.operation)
            made.known = known.read(option("--quire-known"), made.target.name) if option("--quire-known") else {}
            for name in known.unmatched(made.known):
                session.config.issue_config_time_warning(pytest.PytestWarning(f"--quire-known: no case is named {name}"), 2)
        except ArgumentError as error:
            raise pytest.UsageError(f"--quire-{error}") from None
        return made

    def collect(self) -> Iterator[CaseItem]:
        for case in self.cases:
            item: CaseItem = CaseItem.from_parent(self, name=case.name)
            item.target, item.case, item.known = self.target, case, self.known.get(case.name, "")
            yield item


class CaseItem(pytest.Item):
    """One case as a test."""

    target: Target
    case: Case
    known: str

    def runtest(self) -> None:
        from quire.conformance.runner.run import survive

        result = survive(self.case, self.target)
        self.user_properties.append(("quire", result.status))
        if result.status == "skipped":
            pytest.skip(result.reason)
        if result.failed and self.known:
            pytest.xfail(f"{self.known} ({_first(result)})")
        if result.failed:
            raise Wrong(result)
        if self.known:
            raise UnexpectedPass(self.known)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, Wrong):
            return format_failure(excinfo.value.result, self.target.name)
        if isinstance(excinfo.value, UnexpectedPass):
            file = self.config.getoption("--quire-known")
            return f"known to fail ({excinfo.value}), but correct: remove it from {file}"
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Any, None, str]:
        return self.path, None, f"quire: {self.target.name}: {self.case.name}"


class Wrong(Exception):
    """The result is wrong, or the target raised."""

    def __init__(self, result: Result):
        self.result = result
        super().__init__(_first(result))


class UnexpectedPass(Exception):
    """A known failure that did not fail."""


def _first(result: Result) -> str:
    return str(result.findings[0]) if result.findings else result.reason


def format_failure(result: Result, target: str) -> str:
    """The text of a failed test."""
    from quire.conformance.reporting.report import BUDGETS, brief
    from quire.contract.picture import row_picture

    lines = []
    for finding in result.findings:
        lines.append(f"{finding.fault}: {finding.summary}")
        if str(finding.where):
            lines.append(f"  at         {finding.where}")
        if finding.parameters:
            lines.append(f"  with       {brief(finding.parameters)}")
        others = [name for name in finding.equivalent_faults if name != finding.fault]
        if others:
            lines.append(f"  or         indistinguishable in this case: {', '.join(others)}")
        lines += [f"  probe      {line}" for line in finding.evidence]
        if len(finding.ranking) > 1:
            nearest = ", ".join(f"{name} ({off:.3g})" for name, off in finding.ranking[:3])
            lines.append(f"  nearest    {nearest}: distance in error budgets, up to 1 explains the result")
        picture = result.picture
        if picture is not None and picture.bad_cell is not None:
            seq, column = picture.bad_cell
            if column < len(picture.page_table[seq]):
                lines.append(row_picture(f"page_table[{seq}]", picture.page_table[seq], column, f"position {finding.where.key}"))
        if finding.reproduce:
            lines.append(f"  reproduce  quire conform {target} --case '{finding.reproduce}'")
    if not lines:
        lines.append(result.reason)
    if result.wrong:
        lines += [f"  {result.wrong} elements are wrong, the worst by {result.error:.3g} error budgets", f"  {BUDGETS}"]
    return "\n".join(lines)
