"""Every case detects every fault of behaviour that can occur in it, and a correct kernel passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.conformance.cases.case import Case
from quire.conformance.cases.suite import cases_of
from quire.conformance.faults import CATALOGUE
from quire.conformance.runner.power import ALWAYS_SHOW, Power, never_exposed, power_of
from support.once import once

COVER = (
    *("very-far", "hints-low", "fp8-context", "e5m2-tensor", "e4m3fnuz-tensor", "e4m3fn-tokens", "fp8-queries", "scale"),
    *("everything", "tree-window", "window-both-sides", "causal-mixed", "sinks", "int64-needle", "heads-4-3", "long-random"),
    *("cross", "fp32", "extreme", "strided", "strided-context", "invariant", "shard-tokens", "shard-tree"),
    *("spans-any", "spans-prefix"),
    *("select-positions-heads", "select-columns-heads", "prefixes-tree", "latent"),
    *("int4-tokens", "int4-zero-points", "nvfp4-swizzled", "two-fp8-formats", "latent-ds-mla", "hadamard-context"),
)
"""Cases that, with those of smoke, detect every fault; `quire conform --power --level standard` prints the matrix."""
CASES = [*cases_of("smoke"), *(case for case in cases_of("standard") if case.name in COVER)]


@pytest.fixture(scope="session")
def power(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Power]:
    """`power(case)` is what a case detects, whichever worker finds it out."""

    def work(case: Case) -> list[Any]:
        found = power_of(case)
        return [found.exposed, found.passed, found.named, found.alarm]

    return lambda case: Power(case, *once(tmp_path_factory, f"power {case.name}", lambda: work(case)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_detects_faults_without_false_alarm(case: Case, power: Callable[[Case], Power]) -> None:
    found = power(case)
    assert not found.alarm, "a correct kernel fails"
    assert not found.missed


def test_every_fault_is_detected(power: Callable[[Case], Power]) -> None:
    assert never_exposed([power(case) for case in CASES]) == []


def test_names_of_the_catalogue_are_unique() -> None:
    names = [fault.name for fault in CATALOGUE]
    assert len(names) >= 60 and len(set(names)) == len(names)
    assert set(ALWAYS_SHOW) <= set(names)


def test_weak_data_do_not_detect_scale_faults() -> None:
    """Numbers of ±0.001: the softmax is flat, and a doubled scale passes."""
    weak = Case("weak", data="weak", q_dtype="bf16", format="bf16", poison="zero")
    assert {"scale-doubled", "exp2-without-log2e"} <= set(power_of(weak).passed)


@pytest.mark.parametrize("name", ["pair-002", "pair-008", "pair-028", "pair-037"])
def test_faults_that_a_case_cannot_have_are_left_out(name: str) -> None:
    """A case without a spare page, without keys, or without columns in its table."""
    case = next(case for case in cases_of("pairs") if case.name == name)
    found = power_of(case)
    assert not found.alarm and not found.missed and found.exposed


def test_sinks_of_a_sequence_without_keys() -> None:
    case = Case("empty", q_lens=(2, 3), kv_lens=(0, 9), causal="no", sinks=True, lse=True)
    assert {"sink-missing", "sink-scaled"} <= set(power_of(case).exposed)
