"""Every case can fail: it sees every fault that can occur in it but those it says it does not, and honest kernels pass."""

from __future__ import annotations

import pytest

from quire.conformance.blind import BLIND
from quire.conformance.case import Case
from quire.conformance.faults import CATALOGUE
from quire.conformance.power import never_exposed, power_of
from quire.conformance.suite import SMOKE, STANDARD

COVER = (
    *("very-far", "hints-low", "fp8-context", "e5m2-tensor", "e4m3fnuz-tensor", "e4m3fn-tokens", "fp8-queries", "scale"),
    *("everything", "tree-window", "window-both-sides", "causal-mixed", "sinks", "int64-needle", "heads-4-3", "long-random"),
    *("cross", "fp32", "extreme", "strided", "strided-context"),
)
"""Cases that, with those of smoke, expose every fault there is; the whole matrix is `quire conform --power --level standard`."""
CASES = [*SMOKE, *(case for case in STANDARD if case.name in COVER)]
FOUND = {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_sees_what_it_says(case: Case) -> None:
    found = FOUND[case.name] = power_of(case)
    assert not found.alarm, "an honest kernel fails"
    assert set(found.passed) <= set(BLIND.get(case.name, ()))


def test_every_fault_is_exposed() -> None:
    if len(FOUND) < len(CASES):
        pytest.skip("needs the whole file in one process")
    assert never_exposed(list(FOUND.values())) == []


def test_the_catalogue() -> None:
    names = [fault.name for fault in CATALOGUE]
    assert len(names) >= 60 and len(set(names)) == len(names)
    assert {name for passed in BLIND.values() for name in passed} <= set(names)
    assert set(BLIND) <= {case.name for case in (*SMOKE, *STANDARD)}


def test_a_case_without_power_is_noticed() -> None:
    """Numbers of ±0.001: the softmax is flat, and a doubled scale passes."""
    weak = Case("weak", data="weak", q_dtype="bf16", format="bf16", poison="zero")
    assert {"scale-doubled", "exp2-without-log2e"} <= set(power_of(weak).passed)
