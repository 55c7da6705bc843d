"""A name needs probes that confirm it; otherwise there is a symptom; two faults at once are separated; pictures of keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.case import Case
from quire.conformance.diagnosis.consistency import without_minority_names
from quire.conformance.diagnosis.pairs import combined
from quire.conformance.faults import BY_NAME
from quire.conformance.faults.injected import compute, injected
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, Stages
from quire.conformance.reporting.report import UNKNOWN, Finding, Report, Result
from quire.conformance.runner.run import conform, examine
from quire.conformance.runner.target import Target

CASE = Case("mixed", q_lens=(1, 5, 20), kv_lens=(37, 40, 20))


def kernel(stages: Callable[[KernelCall], Stages]) -> Target:
    return Target("kernel", lambda call: compute(call, stages(call)))


def hiding(which: Callable[[oracle.BatchSequence, torch.Tensor], torch.Tensor]) -> Target:
    def visibility(w: Any, sequence: oracle.BatchSequence, keys: int) -> torch.Tensor:
        return oracle.visibility(w, sequence, keys) & ~which(sequence, torch.arange(keys))[None, :]

    return kernel(lambda call: PLAIN.replace(visibility=visibility))


def test_a_solved_parameter_that_a_probe_refutes_is_not_reported() -> None:
    """A factor on the scores that depends on the length: each call has its own, and none has the next one's."""

    def stages(call: KernelCall) -> Stages:
        factor = 1 + int(call.kv_lens.max()) / 400
        return BY_NAME["scale-off-by-factor"].change(factor=factor)  # type: ignore[misc]

    finding = examine(CASE, kernel(stages)).findings[0]
    assert finding.fault == UNKNOWN and not finding.symptom, finding


@pytest.mark.parametrize("value, said", [(0.0, "is zero"), (torch.nan, "is NaN")])
def test_a_result_that_is_the_same_everywhere_has_a_symptom_and_no_name(value: float, said: str) -> None:
    def run(call: KernelCall) -> None:
        call.out[: call.live] = value

    finding = examine(CASE, Target("constant", run)).findings[0]
    assert finding.fault == UNKNOWN and said in finding.symptom
    assert str(finding).startswith("symptom: every element of the output")


def test_splits_of_a_fixed_size_are_named_in_a_batch() -> None:
    """The last split of each sequence is dropped; how many there are follows from each length."""
    case = Case("batch", q_lens=(1, 1, 1), kv_lens=(600, 300, 200), kv_heads=1, data="random")
    finding = examine(case, kernel(lambda call: BY_NAME["split-dropped"].change(size=256, split=-1))).findings[0]  # type: ignore[misc]
    assert (finding.fault, finding.parameters["size"]) == ("split-dropped", 256), finding


def test_two_faults_at_once_are_separated() -> None:
    stages = combined(BY_NAME["last-token-missing"].change(), BY_NAME["softcap-missing"].change())  # type: ignore[misc]
    assert stages is not None
    case = CASE.replace(softcap=2.0)

    def both(call: KernelCall) -> Stages:
        return stages if call.softcap is not None else BY_NAME["last-token-missing"].change()  # type: ignore[misc]

    found = examine(case, kernel(both)).findings
    assert [finding.fault for finding in found] == ["last-token-missing", "softcap-missing"]
    alone = Case.parse(found[0].reproduce)
    assert alone.softcap is None and examine(alone, kernel(both)).findings[0].fault == "last-token-missing"


def test_stages_that_both_change_are_not_combined() -> None:
    a, b = BY_NAME["last-token-missing"].change(), BY_NAME["own-token-missing"].change()  # type: ignore[misc]
    assert combined(a, b) is None


def test_the_picture_shows_the_keys_that_each_query_misses() -> None:
    target = hiding(lambda sequence, keys: keys % 7 == 3)
    finding = examine(Case("small", q_lens=(4,), kv_lens=(20,)), target).findings[0]
    lines = finding.picture.splitlines()
    assert lines[0].startswith("sequence 0, wrong queries by keys 0..")
    assert lines[-1].endswith("  ...x......x......x.."[: 2 + Case.parse(finding.reproduce).kv_lens[0]]), finding.picture
    assert finding.expected is not None and finding.actual is not None and finding.expected != finding.actual


def test_the_map_is_of_the_run_that_the_finding_describes() -> None:
    """The finding's own case is smaller than the one that failed, and so is the map."""
    result = examine(CASE, hiding(lambda sequence, keys: (keys % 7 == 3) & (sequence.kv_len == 40)))
    assert result.picture is not None
    again = Case.parse(result.findings[0].reproduce)
    assert tuple(result.picture.kv_lens) == again.kv_lens


def test_a_name_that_most_failing_cases_contradict_is_a_symptom() -> None:
    name = Finding("causal-ignored", ("causal-ignored",))
    unknown = Finding(UNKNOWN, (UNKNOWN,), evidence=("probed",))
    results = [Result(CASE.replace(name=f"case-{n}"), "wrong", findings=(unknown if n else name,)) for n in range(4)]
    kept = without_minority_names(results)
    assert kept[0].findings[0].fault == UNKNOWN and "causal-ignored" in kept[0].findings[0].symptom
    most = [replace(result, findings=(name,)) if n < 3 else result for n, result in enumerate(results)]
    assert without_minority_names(most)[0].findings[0].fault == "causal-ignored"


def test_findings_are_in_the_order_of_how_many_cases_they_explain() -> None:
    rare, often = Finding("causal-ignored", ("causal-ignored",)), Finding(UNKNOWN, (UNKNOWN,))
    results = [Result(CASE.replace(name=f"case-{n}"), "wrong", findings=(often if n else rare,)) for n in range(3)]
    assert [finding.fault for finding, _ in Report("t", "", "cpu", results).findings] == [UNKNOWN, "causal-ignored"]


def test_a_report_has_what_failing_cases_have_in_common() -> None:
    cases = [CASE, CASE.replace(name="capped", softcap=2.0), CASE.replace(name="window", window=(9, 0))]
    report = conform(injected("softcap-missing"), cases)
    assert report.contrast.startswith("only with softcap (capped passes without it")
    assert report.findings[0][0].contrast == report.contrast


def test_a_correct_probe_refutes_a_name() -> None:
    """The last key is lost only if the length is one more than a multiple of 64: in no other call is the last token missing."""

    def lost(sequence: oracle.BatchSequence, keys: torch.Tensor) -> torch.Tensor:
        return (keys == sequence.kv_len - 1) & (sequence.kv_len % 64 == 1)

    finding = examine(Case("one", q_lens=(1, 2), kv_lens=(65, 129)), hiding(lost)).findings[0]
    assert finding.fault == UNKNOWN, finding


def test_a_second_fault_without_an_effect_is_not_named() -> None:
    """Lengths of int64 are read as int32. In this case other faults would change nothing, or nothing by themselves."""
    case = Case("one", q_lens=(1, 1, 1), kv_lens=(37, 64, 100), index=("int64",) * 3, causal="no", window=(9, 5))
    findings = examine(case, injected("kv-lens-int64-as-int32")).findings
    assert {finding.fault for finding in findings} <= {"kv-lens-int64-as-int32", UNKNOWN}


def test_an_lse_that_differs_from_call_to_call_is_nondeterminism() -> None:
    """Also in a batch-invariant case, where a sequence alone gives other bits."""
    calls: list[int] = []

    def run(call: KernelCall) -> None:
        compute(call)
        calls.append(0)
        if call.lse is not None:
            call.lse[0, 0] += 1e-7 * len(calls)

    for case in (CASE.replace(lse=True), CASE.replace(lse=True, batch_invariant=True)):
        assert [finding.fault for finding in examine(case, Target("jitter", run)).findings] == ["two-runs-differ"]


def test_a_contrast_holds_for_failures_that_were_not_diagnosed() -> None:
    """A finding of one case with softcap; another failing case without it was not diagnosed."""
    from quire.conformance.reporting.report import NOT_DIAGNOSED
    from quire.conformance.runner.run import with_contrast

    finding = Finding(UNKNOWN, (UNKNOWN,))
    results = [
        Result(CASE.replace(name="capped", softcap=3.0), "wrong", error=9.0, findings=(finding,)),
        Result(CASE.replace(name="other", alibi=True), "wrong", NOT_DIAGNOSED, error=9.0),
        Result(CASE, "correct"),
    ]
    report = with_contrast(Report("kernel", "", "cpu", results))
    assert "softcap" not in report.findings[0][0].contrast


def test_a_wrong_lse_is_no_merge_of_splits() -> None:
    """Each query sees one key, so a merge of splits has no effect; the LSE alone is wrong."""

    def run(call: KernelCall) -> None:
        compute(call)
        assert call.lse is not None
        call.lse[: call.live] += 0.25

    case = Case("one", q_lens=(3, 1), kv_lens=(300, 700), window=(0, 0), lse=True)
    findings = examine(case, Target("shifted", run)).findings
    assert "split-merged-in-another-base" not in {name for finding in findings for name in finding.equivalent_faults}


def test_nondeterminism_is_no_state_leak() -> None:
    """Where one case shows that bits differ from call to call, others that differ after another call have the same fault."""
    results = [
        Result(CASE.replace(name=name), "wrong", findings=(Finding(fault, (fault,), summary=fault),))
        for name, fault in (("a", "two-runs-differ"), ("b", "state-leaks"), ("c", "depends-on-batch"), ("d", "row-zero"))
    ]
    found = [result.findings[0].fault for result in without_minority_names(results)]
    assert found[:3] == ["two-runs-differ"] * 3
    alone = [result.findings[0].fault for result in without_minority_names(results[1:2])]
    assert alone == ["state-leaks"]
