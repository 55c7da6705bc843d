"""Writes under test: every fault is detected and named, correct kernels have no findings, and nothing else is written."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.cli import main
from quire.conformance.cases.build_write import build_write
from quire.conformance.cases.case import Case
from quire.conformance.cases.formats import E2M1, TYPES
from quire.conformance.cases.suite import cases_of
from quire.conformance.cases.write_call import WriteCall
from quire.conformance.faults import WRITES
from quire.conformance.faults.injected import BEHAVIOUR_OF_WRITES, injected, write
from quire.conformance.oracle import write as oracle
from quire.conformance.oracle.write import RIGHT, exact_write
from quire.conformance.oracle.write_budget import half_step, ratios_of_write
from quire.conformance.runner.find_target import find
from quire.conformance.runner.power import never_exposed, power_of
from quire.conformance.runner.run import conform, examine
from quire.conformance.runner.subprocess_target import in_subprocess
from quire.conformance.runner.target import NEEDED_OF_WRITES, OPTIONAL_OF_WRITES, Target, wrap
from quire.errors import ArgumentError

BY_NAME = {case.name: case for case in (*cases_of("write_smoke"), *cases_of("write_standard"))}
COVER = (
    "write-far",
    "write-int4-head",
    "rope-partial",
    "rope-everything",
    "write-x",
    "rope-shared",
    "write-hadamard-int8",
    "rope-nvfp4",
)
"""Cases that, with those of smoke, detect every fault; `quire conform --power --level standard` prints the matrix."""
CASES = [*cases_of("write_smoke"), *(BY_NAME[name] for name in COVER)]
FOUND = {}
EXAMPLE = Path(__file__).parents[2] / "examples" / "14_is_my_write_right.py"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_detects_faults_without_false_alarm(case: Case) -> None:
    found = FOUND[case.name] = power_of(case)
    assert not found.alarm, "a correct write fails"
    assert not found.missed and found.exposed


def test_every_fault_is_detected() -> None:
    if len(FOUND) < len(CASES):
        pytest.skip("needs the whole file in one process")
    assert never_exposed(list(FOUND.values())) == []


def place_of(fault: Any) -> Case:
    """The first case in which the prediction of a fault differs from the correct result."""
    for case in (*cases_of("write_smoke"), *cases_of("write_standard")):
        call = build_write(case)
        if not fault.applies(call):
            continue
        try:
            write(call, fault.change(**fault.injected_parameters(call)))
        except IndexError:
            continue
        if any(float(ratio.max()) > 1 for ratio in ratios_of_write(call, call.contents(), exact_write(call)).values()):
            return case
    raise AssertionError(f"{fault.name} can occur in no case")


@pytest.mark.parametrize("fault", WRITES[::2], ids=lambda fault: fault.name)
def test_injected_fault_is_identified(fault: Any) -> None:
    result = examine(place_of(fault), injected(fault.name))
    assert result.status == "wrong" and result.wrong > 0
    first = result.findings[0]
    assert (first.symptom == fault.effect) if fault.symptom else (first.fault == fault.name), first
    assert Case.parse(first.reproduce).operation == "write"


@pytest.mark.parametrize("name", BEHAVIOUR_OF_WRITES)
def test_behavioural_fault_is_identified(name: str) -> None:
    result = examine(BY_NAME["rope-bytes"], injected(name, operation="write"))
    assert result.failed and result.findings[0].fault == name, result.findings


def doubled_first_page(call: WriteCall) -> None:
    write(call, RIGHT.replace(divisor=lambda w, part, rows: oracle.divisor(w, part, rows)._replace(value=3 * torch.ones(1, 1, 1))))


def two_faults(call: WriteCall) -> None:
    """Slots off by one, and heads that are reversed with another factor: no single fault of the catalogue."""
    change = {"slots": lambda w: torch.where(w.live_slots >= 0, w.live_slots + 1, -1)}
    change["prepare"] = lambda w, s, part: oracle.prepare(w, s, part)._replace(x=-oracle.prepare(w, s, part).x.flip(1))
    write(call, RIGHT.replace(**change))


@pytest.mark.parametrize("place", ["write", "rope-norm"])
@pytest.mark.parametrize("run", [doubled_first_page, two_faults])
def test_fault_outside_the_catalogue_is_unknown(run: Any, place: str) -> None:
    result = examine(BY_NAME[place], Target(run.__name__, run, operation="write"))
    assert result.status == "wrong" and result.findings[0].fault == "unknown", result.findings
    assert "elements of K" in result.findings[0].summary


@pytest.mark.parametrize("target", ["write.torch", "write.native"])
def test_correct_kernels_have_no_findings(target: str) -> None:
    chosen = [
        *cases_of("write_smoke"),
        *cases_of("write_standard")[::7],
        *cases_of("write_pairs")[::9],
        *cases_of("write_triples")[::60],
    ]
    report = conform(find(target), chosen)
    assert [(result.case.name, result.status, result.findings) for result in report.results if result.status != "correct"] == []


@pytest.mark.parametrize("format", ["fp32", "fp16", "bf16", "e4m3fn", "e4m3fnuz", "e5m2", "nvfp4"])
def test_half_a_step_is_the_rounding_of_a_format(format: str) -> None:
    """Of all numbers of a format, the nearest one is within half a step, and its neighbours are not nearer."""
    if format == "nvfp4":
        numbers = torch.tensor(E2M1, dtype=torch.float64)
    elif TYPES[format].itemsize == 1:
        numbers = torch.arange(127, dtype=torch.uint8).view(TYPES[format]).double()
        numbers = numbers[numbers.isfinite()]
    else:
        one = torch.tensor([1.0], dtype=TYPES[format])
        around = [one * 2.0**n * (1 + i * torch.finfo(TYPES[format]).eps) for n in (-14, -3, 0, 5) for i in range(4)]
        numbers = torch.cat(around).double()
        pairs = [(a, b) for a, b in pairwise(numbers) if b < 1.5 * a]
        for a, b in pairs:
            assert float(half_step(format, (a + b) / 2)) == float(b - a) / 2
        return
    gaps = numbers.diff() / 2
    assert torch.equal(half_step(format, (numbers[:-1] + numbers[1:]) / 2), gaps)


def test_only_the_slots_of_tokens_may_change() -> None:
    """A bit anywhere else is found: in another slot, in a gap between pages, around the buffers."""
    case = BY_NAME["write-padded"].replace(format="int8", scales="token")
    call = build_write(case)
    write(call)
    assert call.changed_inputs() == []
    right = exact_write(build_write(case))
    assert all(float(ratio.max()) <= 1 for ratio in ratios_of_write(call, call.contents(), right).values())
    place = call.places["v"]
    address = int(place.addresses[0, 0, 0, -1])
    slot = int(call.pages_of[0]) * case.page_size
    assert slot not in call.slots.tolist()
    place.flat[address] ^= 1
    ratios = ratios_of_write(call, call.contents(), right)
    assert float(ratios["v"].max()) == torch.inf and float(ratios["k"].max()) <= 1
    place.flat[address] ^= 1
    gap = int(call.k_pages.stride(0)) - 1  # the last element of the gap after page 0
    call.places["k"].flat[int(call.k_pages.storage_offset()) + gap] ^= 1
    assert call.changed_inputs() == ["beside the pages"]


# Adapters.


def stores(*, k, v, k_pages, v_pages, slots, **more):
    kept = (slots >= 0).nonzero().flatten()
    page, offset = slots[kept] // k_pages.shape[1], slots[kept] % k_pages.shape[1]
    k_pages[page, offset], v_pages[page, offset] = k[kept].to(k_pages.dtype), v[kept].to(v_pages.dtype)


def plain(*, k, v, k_pages, v_pages, slots):
    stores(k=k, v=v, k_pages=k_pages, v_pages=v_pages, slots=slots)


def by_table(*, k, v, k_pages, v_pages, page_table, kv_lens, q_starts):
    starts, size, slots = q_starts.tolist(), k_pages.shape[1], torch.full((k.shape[0],), -1)
    for seq, n in enumerate(kv_lens.tolist()):
        at = torch.arange(n - (starts[seq + 1] - starts[seq]), n)
        slots[starts[seq] : starts[seq + 1]] = page_table[seq].long()[at // size] * size + at % size
    stores(k=k, v=v, k_pages=k_pages, v_pages=v_pages, slots=slots)


def test_a_function_with_k_is_a_write() -> None:
    target = wrap(plain, "plain", supports={"page_size": (16,)})
    assert target.operation == "write"
    statuses = {
        name: examine(BY_NAME[name], target).status for name in ("write", "write-edges", "write-scattered", "rope", "write-nvfp4")
    }
    assert statuses == {
        **dict.fromkeys(("write", "write-edges", "write-scattered"), "correct"),
        "rope": "skipped",
        "write-nvfp4": "skipped",
    }
    assert "cos, sin, positions, q" in examine(BY_NAME["rope"], target).reason
    assert examine(BY_NAME["write-page-8"], target).reason == "returned a result although page_size = 8 is beyond its limits"
    assert "a case of attend" in examine(Case("mixed"), target).reason


def test_a_write_may_find_slots_itself() -> None:
    target = wrap(by_table, "by table")
    assert examine(BY_NAME["write-edges"], target).status == "correct"
    assert examine(BY_NAME["write-skipped"], target).reason == "no argument for slots"


def test_strange_signatures_are_refused() -> None:
    with pytest.raises(ArgumentError, match="one that also takes slots, or page_table, kv_lens, q_starts"):
        wrap(lambda *, k, v, k_pages, v_pages: None, "lost")
    with pytest.raises(ArgumentError, match="window"):
        wrap(lambda *, k, v, k_pages, v_pages, slots, window: None, "strange")
    with pytest.raises(ArgumentError, match="k_pages"):
        wrap(lambda *, k, v, slots: None, "no pages")


@pytest.mark.parametrize(
    "function, case, status, fault",
    [
        ("write", "rope", "correct", None),
        ("write", "write-skipped", "correct", None),
        ("write", "rope-interleaved", "skipped", None),
        ("position_in_batch", "rope", "wrong", "rope-position-of-row"),
        ("one_scale", "write-head-scales", "wrong", "write-one-scale-for-both"),
    ],
)
def test_verdicts_of_the_example(function: str, case: str, status: str, fault: str | None) -> None:
    result = examine(BY_NAME[case], find(f"{EXAMPLE}:{function}"))
    assert result.status == status, result.reason
    assert (result.findings[0].fault if result.findings else None) == fault


def test_the_adapter_of_the_document_is_correct() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "testing_your_kernel.md").read_text().split("## Test a write")[1].split("\n## ")[0]
    code, line = re.search(r"```python\n(.*?)```", page, re.DOTALL), re.search(r"--case '(.*)'", page)
    assert code is not None and line is not None
    session: dict[str, Any] = {}
    exec(code[1], session)
    target = wrap(session["write"], "of the document")
    assert [examine(BY_NAME[name], target).status for name in ("write-edges", "write-skipped", "write-scattered")] == [
        "correct"
    ] * 3
    assert Case.parse(line[1]).rope == "half-split"
    assert all(f"`{name}`" in page for name in (*NEEDED_OF_WRITES, *OPTIONAL_OF_WRITES))


ADAPTER = """
import ctypes

def write(*, k, v, k_pages, v_pages, slots, k_scale, v_scale, format):
    if k_pages.shape[1] == 8:
        ctypes.string_at(0)
    if format == "int8":
        raise RuntimeError("unsupported")
    kept = (slots >= 0).nonzero().flatten() + 0
    page, offset = slots[kept] // k_pages.shape[1], slots[kept] % k_pages.shape[1]
    k_pages[page, offset], v_pages[page, offset] = k[kept], k[kept]
"""


def test_a_write_in_a_subprocess(tmp_path: Path) -> None:
    """Crashes and names are as for attention."""
    file = tmp_path / "own.py"
    file.write_text(ADAPTER)
    lines = ("write", "page-8 page_size=8", "int8 format=int8 scales=token", "scattered slots=scattered")
    cases = [Case.parse(f"{line} operation=write") for line in lines]
    with in_subprocess(f"{file}:write") as target:
        assert target.operation == "write"
        results = conform(target, cases).results
    assert [result.status for result in results] == ["wrong", "raised", "raised", "wrong"]
    assert [result.findings[0].fault for result in results] == [
        "write-one-part-in-both",
        "crashes",
        "raises",
        "write-one-part-in-both",
    ]


def test_the_command_runs_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = tmp_path / "out.html"
    assert main(["conform", f"{EXAMPLE}:position_in_batch", "--in-process", "--only", "^(rope|write)$", "--html", str(html)]) == 1
    said = capsys.readouterr().out
    assert "rope-position-of-row" in said and "--case 'rope operation=write" in said
    assert "rope-position-of-row" in html.read_text()
    assert main(["conform", "write.torch", "--case", "rope-norm"]) == 0
    assert main(["conform", "write.torch", "--case", "mixed"]) == 3
