"""Unseen faults: the kernel that they are derived from is correct, and a few of them are detected without a false name.

The whole measurement is `python tests/conformance/unseen/run.py`; docs/power.md has its figures.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "unseen"))

import run as unseen  # noqa: E402

from quire.conformance.cases.case import Case  # noqa: E402
from quire.conformance.cases.suite import cases, cases_of  # noqa: E402
from quire.conformance.runner.find_target import adapter  # noqa: E402
from quire.conformance.runner.run import conform  # noqa: E402

LENS = {"q_lens": (1, 5, 20), "kv_lens": (37, 40, 20)}
CASES = (
    Case("plain", **LENS),
    Case("page-24", **LENS, page_size=24),
    Case("capped", **LENS, softcap=3.0),
    Case("alibi", **LENS, alibi=True, lse=True),
)
"""Small cases with and without what the faults below depend on."""


def test_the_kernel_without_a_fault_is_correct() -> None:
    chosen = [*cases_of("smoke")[:6], *cases("standard")[60::30]]
    report = conform(adapter(f"{HERE / 'unseen' / 'attention.py'}:correct"), chosen)
    assert [result.case.name for result in report.results if result.failed] == []


@pytest.mark.parametrize(
    "name, described",
    [
        ("page_by_shift", "only with a page size that is no power of two"),
        ("alibi_in_first_tile", "only with ALiBi"),
    ],
)
def test_a_fault_is_described_and_gets_no_false_name(name: str, described: str) -> None:
    report = conform(adapter(f"{HERE / 'unseen' / 'unseen_kernels.py'}:{name}"), CASES)
    found = unseen.judge(name, report)
    assert found.failing and not found.false, found
    assert described in found.contrast, found.contrast


def test_there_are_forty_and_the_document_has_each() -> None:
    assert len(unseen.KERNELS) >= 40
    text = (HERE.parents[1] / "docs" / "power.md").read_text()
    assert measured(text, "attention") == sorted(unseen.KERNELS)
    assert measured(text, "writes") == sorted(unseen.WRITES)


def measured(text: str, of: str) -> list[str]:
    part = text.split(unseen.MARKERS[of])[1].split("\n## ")[0]
    return sorted(line.split("`")[1] for line in part.splitlines() if line.startswith("| `"))


def test_the_write_without_a_fault_is_correct() -> None:
    chosen = [*cases_of("write_smoke"), *cases_of("write_standard")[::9], *cases_of("write_pairs")[::14]]
    report = conform(adapter(f"{HERE / 'unseen' / 'writes.py'}:correct"), chosen)
    assert [result.case.name for result in report.results if result.failed] == []
    assert report.counts()["correct"] > 20


@pytest.mark.parametrize(
    "name, said",
    [
        ("norm_last", "norm-after-rotation"),
        ("skipped_at_slot_zero", "write-skipped-token-stored"),
        ("page_by_shift", "only with a page size that is no power of two"),
    ],
)
def test_an_unseen_write_is_described(name: str, said: str) -> None:
    lens = {"operation": "write", "q_lens": (1, 5, 20), "kv_lens": (37, 40, 27)}
    cases = [Case("plain", **lens), Case("page-24", **lens, page_size=24), Case("skipped", **lens, slots="skipped")]
    cases += [Case("rope", **lens, rope="half-split"), Case("norm", **lens, rope="half-split", norm="weight")]
    found = unseen.judge(name, conform(adapter(f"{HERE / 'unseen' / 'writes.py'}:{name}"), cases))
    assert found.failing and not found.false, found
    assert said in (*found.names, found.contrast.split(" (")[0]), found
