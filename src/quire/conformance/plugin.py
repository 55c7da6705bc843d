"""The suite in a team's own pytest: `pytest --quire-target my_kernels.attention:paged`. Every case is a test.

A case that the target declares not to support is skipped, with the reason. A failure says which fault it is, where, and how to see
it again. `--quire-known FILE` names failures that are known: they are expected, and one that passes is a failure. `--quire-apart`
gives the target a process of its own: if that dies, a test fails and the session goes on.
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
    group = parser.getgroup("quire", "quire: is a paged-attention function right?")
    group.addoption("--quire-target", metavar="TARGET", help="module:function, file.py:function, a kernel of Quire's or a peer")
    group.addoption("--quire-level", metavar="LEVEL", default="smoke", help="smoke (seconds), standard (minutes) or full (smoke)")
    group.addoption("--quire-device", metavar="NAME", help="where to run it; by default where the target says")
    group.addoption("--quire-apart", action="store_true", help="in a process of its own, which may crash: that is a failed test")
    group.addoption("--quire-known", metavar="FILE", help="failures that are known, a line each: target, case, why")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Adds the suite to whatever else the session collects, an empty folder included."""
    report = yield
    asked = collector.config.getoption("--quire-target")
    if asked and isinstance(collector, pytest.Session) and report.passed:
        report.result.append(Suite.of(collector, asked))
    return report


class Suite(pytest.Collector):
    """The cases of a level, for one target."""

    target: Target
    cases: Sequence[Case]
    known: dict[str, str]

    @classmethod
    def of(cls, session: pytest.Session, asked: str) -> Suite:
        from quire.conformance.cases import suite
        from quire.conformance.runner import known_failures as known
        from quire.conformance.runner.subprocess_target import apart
        from quire.conformance.runner.target import find
        from quire.errors import ArgumentError

        made: Suite = cls.from_parent(session, name=asked, nodeid=f"quire {asked}")
        option = session.config.getoption
        here = str(session.config.invocation_params.dir)
        if here not in sys.path:  # as `python -m pytest` would
            sys.path.insert(0, here)
        try:
            if option("--quire-apart"):
                stack = ExitStack()
                session.config.add_cleanup(stack.close)
                made.target = stack.enter_context(apart(asked, option("--quire-device")))
            else:
                made.target = find(asked, option("--quire-device"))
            made.cases = suite.cases(option("--quire-level"))
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
        if result.status == "unsupported":
            pytest.skip(result.reason)
        if result.failed and self.known:
            pytest.xfail(f"{self.known} ({_first(result)})")
        if result.failed:
            raise Wrong(result)
        if self.known:
            raise Mended(self.known)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, Wrong):
            return tell(excinfo.value.result, self.target.name)
        if isinstance(excinfo.value, Mended):
            return f"known to fail ({excinfo.value}), and it is right: take it off the list"
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Any, None, str]:
        return self.path, None, f"quire: {self.target.name}: {self.case.name}"


class Wrong(Exception):
    """The target gave a wrong answer, or none."""

    def __init__(self, result: Result):
        self.result = result
        super().__init__(_first(result))


class Mended(Exception):
    """A known failure that did not fail."""


def _first(result: Result) -> str:
    return str(result.findings[0]) if result.findings else result.reason


def tell(result: Result, target: str) -> str:
    """A failure for a person to act on."""
    from quire.conformance.reporting.report import brief
    from quire.contract.picture import row_picture

    lines = []
    for finding in result.findings:
        lines.append(f"{finding.fault}: {finding.summary}")
        if str(finding.where):
            lines.append(f"  at         {finding.where}")
        if finding.parameters:
            lines.append(f"  with       {brief(finding.parameters)}")
        others = [name for name in finding.alike if name != finding.fault]
        if others:
            lines.append(f"  or         {', '.join(others)}, which give the same result here")
        lines += [f"  probe      {line}" for line in finding.evidence]
        if len(finding.ranking) > 1:
            nearest = ", ".join(f"{name} ({off:.3g})" for name, off in finding.ranking[:3])
            lines.append(f"  nearest    {nearest}, in budgets: 1 or less explains it")
        picture = result.picture
        if picture is not None and picture.bad_cell is not None:
            seq, column = picture.bad_cell
            if column < len(picture.page_table[seq]):
                lines.append(row_picture(f"page_table[{seq}]", picture.page_table[seq], column, f"position {finding.where.key}"))
        if finding.reproduce:
            lines.append(f"  reproduce  quire conform {target} --case '{finding.reproduce}'")
    if not lines:
        lines.append(result.reason)
    return "\n".join(
        [*lines, f"  {result.wrong} elements are off, the worst by {result.error:.3g} budgets"] if result.wrong else lines
    )
