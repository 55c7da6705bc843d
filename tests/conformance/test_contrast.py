"""What all failing cases have in common and no passing case has: from results alone, and confirmed by running cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from quire.cli.conform import _summary
from quire.conformance.cases.case import Case
from quire.conformance.diagnosis.contrast import contrast_of
from quire.conformance.diagnosis.facts import queried
from quire.conformance.reporting.html_report import html_report
from quire.conformance.reporting.report import NOT_DIAGNOSED, Finding, Report, Result
from quire.conformance.runner.run import with_contrast

LENS = {"q_lens": (1, 5), "kv_lens": (37, 40)}
CASES = (
    Case("plain", **LENS),
    Case("capped", **LENS, softcap=3.0),
    Case("capped-window", **LENS, softcap=3.0, window=(8, 0)),
    Case("window", **LENS, window=(8, 0)),
    Case("int64", **LENS, index=("int64", "int64", "int64")),
    Case("int64-table", **LENS, index=("int64", "int32", "int32")),
    Case("context", **LENS, form="context"),
    Case("context-window", **LENS, form="context", window=(8, 0)),
    Case("group-3", **LENS, group=3),
    Case("group-5", **LENS, group=5),
    Case("group-8", **LENS, group=8),
    Case("page-24", **LENS, page_size=24),
    Case("page-32", **LENS, page_size=32),
    Case("long", q_lens=(1, 1), kv_lens=(1025, 90)),
    Case("longer", q_lens=(1,), kv_lens=(2000,)),
    Case("middle", q_lens=(1,), kv_lens=(700,)),
    Case("full-pages", q_lens=(1, 4), kv_lens=(32, 37)),
)
Fails = Callable[[Case], bool]


def results(fails: Fails, sequences: Callable[[Case, int], bool] | None = None) -> list[Result]:
    def one(case: Case) -> Result:
        wrong = tuple(i for i in queried(case) if sequences(case, i)) if sequences and fails(case) else ()
        return Result(case, "wrong" if fails(case) else "correct", wrong_sequences=wrong)

    return [one(case) for case in CASES]


@pytest.mark.parametrize("asks", [False, True], ids=["observed", "confirmed"])
@pytest.mark.parametrize(
    "fails, said",
    [
        (lambda case: case.softcap is not None, "only with softcap"),
        (lambda case: "int64" in case.index, "only with int64 indices (correct with int32 indices"),
        (lambda case: case.index[1] == "int64", "only with int64 kv_lens"),
        (lambda case: case.page_size == 24, "only with a page size that is no power of two"),
        (lambda case: case.group % 2 and case.group > 1, "only with an odd group of query heads"),
        (lambda case: case.form == "context" and case.window[0] is not None, "only with a window and in the context form"),
    ],
    ids=["softcap", "int64", "int64 lens", "page 24", "odd group", "pair"],
)
def test_fact(fails: Fails, said: str, asks: bool) -> None:
    found = contrast_of(results(fails), (lambda case: not fails(case)) if asks else None)
    if "kv_lens" in said and not asks:
        pytest.skip("one case alone cannot tell the three index tensors apart")
    assert set(found.split(" (")[0].split()) >= set(said.split(" (")[0].split()), found
    assert ("passes without" in found) == asks


def test_a_fact_of_latent_caches() -> None:
    """Changes that such a case cannot have, such as a head_dim of its v_in_k, are not run."""
    latent = Case("latent", **LENS, kv_heads=1, head_dim=96, v_in_k=80)
    found = [*results(lambda case: False), Result(latent, "wrong")]
    assert contrast_of(found, lambda case: case.v_in_k == 0).startswith("only with a head_dim that is no power of two")
    found.append(Result(Case("wide", **LENS, head_dim=96), "correct"))
    assert contrast_of(found, lambda case: case.v_in_k == 0).startswith("only with values that are a part of keys")


def test_threshold_is_bisected() -> None:
    def fails(case: Case) -> bool:
        return max(case.kv_lens) > 1024

    def long(case: Case, i: int) -> bool:
        return case.kv_lens[i] > 1024

    assert contrast_of(results(fails, long)).startswith("only from kv_len 1025 on (correct up to 700")
    far = [result for result in results(fails, long) if result.case.name != "long"]
    found = contrast_of(far, lambda case: not fails(case))
    assert found.startswith("only from kv_len 1025 on (correct up to 1024"), found


def test_wrong_and_correct_sequences_of_a_failing_case_are_distinguished() -> None:
    """Only sequences that fill their last page are wrong; the others of the same case are correct."""

    def full(case: Case, i: int) -> bool:
        return case.kv_lens[i] % case.page_size == 0

    def fails(case: Case) -> bool:
        return any(full(case, i) for i in queried(case))

    assert "fill their last page" in contrast_of(results(fails, full), lambda case: not fails(case))


def test_a_fact_that_merely_coincides_is_refuted() -> None:
    """Only one case fails. It is the only one of its page size, and fails for its length."""
    cases = [*CASES, Case("both", q_lens=(1,), kv_lens=(5000,), page_size=128)]

    def fails(case: Case) -> bool:
        return max(case.kv_lens) >= 3000

    given = [Result(case, "wrong" if fails(case) else "correct") for case in cases]
    found = contrast_of(given, lambda case: not fails(case))
    assert found.startswith("only from kv_len 3000 on"), found


def test_a_fact_that_some_passing_cases_share_is_necessary() -> None:
    """A fault that data hide in one case."""
    given = [
        Result(case, "wrong" if case.softcap is not None and case.name != "capped" else "correct")
        for case in (*CASES, Case("third", **LENS, softcap=9.0, window=(9, 0)))
    ]
    found = contrast_of(given, lambda case: case.softcap is None)
    assert "only" in found and "softcap" in found, found


def test_without_passing_or_failing_cases() -> None:
    assert contrast_of([Result(case, "correct") for case in CASES]) == ""
    everywhere = [Result(case, "wrong") for case in CASES]
    assert contrast_of(everywhere) == f"in all {len(CASES)} cases that were run"
    refused = Result(Case("refused", head_dim=512), "refused")
    assert contrast_of([*everywhere, refused]) == f"in all {len(CASES)} cases that were run and not refused"


def test_a_finding_in_some_failing_cases_does_not_claim_all() -> None:
    """Two of the failing cases were diagnosed."""
    finding = Finding("nan-leak", ("nan-leak",), summary="NaN")
    diagnosed = [Result(case, "wrong", findings=(finding,)) for case in CASES[:2]]
    rest = [Result(case, "wrong", NOT_DIAGNOSED) for case in CASES[2:]]
    report = with_contrast(Report("target", "", "cpu", [*diagnosed, *rest]))
    ((found, names),) = report.findings
    assert names == [case.name for case in CASES[:2]]
    assert found.contrast == f"in 2 of {len(CASES)} failing cases" and found.undiagnosed == report.undiagnosed == len(CASES) - 2
    assert report.contrast == f"in all {len(CASES)} cases that were run"
    summary = _summary(report)
    assert f"nan-leak, in 2 of {len(CASES)} failing cases\n" in summary
    note = f"{len(CASES) - 2} failing cases were not diagnosed: they may have this fault or others"
    assert note in summary and note in html_report(report)
    padding = replace(finding, fault="writes-padding-rows")  # checked in every case
    results = [replace(diagnosed[0], findings=(padding,)), *rest]
    assert with_contrast(replace(report, results=results)).findings[0][0].undiagnosed == 0
