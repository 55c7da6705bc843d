"""A kernel that fails in every case is diagnosed only a few times; one that is correct somewhere is diagnosed further."""

from __future__ import annotations

from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.case import Case
from quire.conformance.reporting.report import NOT_DIAGNOSED
from quire.conformance.runner.run import Diagnoses, conform
from quire.conformance.runner.target import Target

CASES = [Case(f"small-{n}", q_lens=(1,), kv_lens=(3 + n,), kv_heads=1, group=1) for n in range(6)]


def test_failures_that_agree_are_diagnosed_three_times() -> None:
    def zeros(call: KernelCall) -> None:
        call.out[: call.live] = 0

    results = conform(Target("zeros", zeros), CASES).results
    assert [result.status for result in results] == ["wrong"] * 6
    assert [result.reason == NOT_DIAGNOSED for result in results] == [False] * 3 + [True] * 3


def test_after_a_correct_result_only_time_ends_the_diagnoses() -> None:
    diagnoses = Diagnoses(seconds=1.0)
    diagnoses.any_correct = True
    diagnoses.counts["unknown"] = 9
    assert diagnoses.trusted == frozenset()
    diagnoses.seconds = 0.0
    assert diagnoses.trusted is None
