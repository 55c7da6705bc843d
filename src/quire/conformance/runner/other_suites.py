"""How many faults other suites detect: their inputs and tolerances are rebuilt here, and the same faults are injected.

Lengths, sizes, types, values and tolerance are theirs. Of a large batch only some sequences and heads are used. A row that is never
written counts as detected, although fresh memory may hold zeros. None of the suites poisons unused slots, guards its outputs or
runs a call twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.cache.format import FORMATS
from quire.conformance.cases.build import build
from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.case import Case
from quire.conformance.faults import ATTENTION
from quire.conformance.faults.injected import compute
from quire.conformance.oracle.exact import exact
from quire.conformance.runner.threads import one_thread


@dataclass(frozen=True)
class OtherSuite:
    """A test of another project: its inputs and its tolerance."""

    name: str
    cases: tuple[Case, ...]
    atol: float
    rtol: float


TOLERANCES = {
    "vLLM test_prefix_prefill.py, fp16": (1e-4, 0.0),
    "vLLM test_prefix_prefill.py, fp8": (1e-3, 0.0),
    "vLLM test_triton_unified_attention.py": (1.5e-2, 1e-2),
    "FlashInfer's paged tests": (1e-2, 1e-2),
}
"""atol and rtol of each suite. Its cases follow its name in other_suites.txt."""


def other_suites() -> Iterator[OtherSuite]:
    """The suites with their cases."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    cases = {}
    for section in text.split("\n\n")[1:]:
        title, *lines = section.strip().splitlines()
        cases[title.removeprefix("# ")] = tuple(map(Case.parse, lines))
    return (OtherSuite(name, cases[name], atol, rtol) for name, (atol, rtol) in TOLERANCES.items())


def exposed_by(suite: OtherSuite) -> tuple[list[str], list[str]]:
    """The faults that can occur in a suite's cases, and those that it detects."""
    can: dict[str, None] = {}
    seen: dict[str, None] = {}
    with one_thread():
        for case in suite.cases:
            call = build(case)
            if case.data == "weak" and case.scales == "tensor":
                _unit_scales(call)
            right = exact(call).out[: call.live]
            for fault in ATTENTION:
                if not fault.predicted or not fault.applies(call):
                    continue
                can[fault.name] = None
                if fault.name in seen:
                    continue
                assert fault.change is not None
                call.take_checksums()
                compute(call, fault.change(**fault.injected_parameters(call)))
                off = (call.out[: call.live].double() - right).abs()
                if bool((~(off <= suite.atol + suite.rtol * right.abs())).any()):
                    seen[fault.name] = None
    return list(can), list(seen)


def _unit_scales(call: KernelCall) -> None:
    """Sets the scales of K and V to 1, as in that suite: values of ±0.001 become zeros in fp8, which hides faults of scales."""
    from quire.conformance.cases.build import flat_of

    for scale, pages in ((call.k_scale, call.k_pages), (call.v_scale, call.v_pages)):
        assert scale is not None
        flat = flat_of(pages)
        dtype = FORMATS[call.format].dtype
        flat.copy_((flat.view(dtype).float() * scale).to(dtype).view(torch.uint8))
        scale.fill_(1.0)
    call.memo.clear()


def comparison(tell: Callable[[str], None] = lambda name: None) -> list[dict[str, object]]:
    """A row for each suite."""
    rows: list[dict[str, object]] = []
    for suite in other_suites():
        tell(suite.name)
        can, seen = exposed_by(suite)
        rows.append({"suite": suite.name, "can": len(can), "exposed": len(seen), "missed": [n for n in can if n not in seen]})
    return rows
