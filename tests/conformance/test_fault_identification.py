"""An injected fault is identified, an unknown fault gets no wrong name, and a correct kernel has no findings."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from quire.conformance.cases.build import build
from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.case import Case
from quire.conformance.cases.suite import cases_of
from quire.conformance.faults import ATTENTION
from quire.conformance.faults.injected import BEHAVIOUR, compute, injected
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, SequenceResult, Stages
from quire.conformance.reporting.report import Finding
from quire.conformance.runner.find_target import ours
from quire.conformance.runner.run import examine
from quire.conformance.runner.target import Target

BY_NAME = {case.name: case for case in (*cases_of("smoke"), *cases_of("standard"))}
PLACES = (
    *("mixed", "fp8-head-scales", "window-needle", "context-form", "int64", "softcap-alibi", "sinks-window-lse", "tree", "edges"),
    *("window-both-sides", "x-packed-int8-tokens", "high-pages", "far", "very-far", "hints-low", "everything", "e5m2-tensor"),
    *("e4m3fnuz-tensor", "x-packed", "fp8-queries", "scale", "causal-mixed", "tree-window", "fp8-context", "long-random"),
    *("alibi-sinks", "extreme", "strided", "strided-context", "shard-tokens", "shard-tree", "spans-images", "cross"),
    *("int4-tokens", "int4-zero-points", "nvfp4", "nvfp4-swizzled", "two-fp8-formats", "select-positions-heads"),
    *("select-columns-heads", "prefixes-tree", "latent", "latent-ds-mla", "hadamard-context"),
)
CHAOTIC = ("fp16-read-as-bf16", "lse-without-log", "accumulated-in-16-bits")
"""Outputs that overflow, or consist of rounding errors: no prediction is within the budget everywhere."""


def place_of(name: str) -> Case | None:
    """The first case in which a fault can occur."""
    fault = next(fault for fault in ATTENTION if fault.name == name)
    return next((BY_NAME[place] for place in PLACES if fault.applies(_built(place))), None)


@cache
def _built(place: str) -> KernelCall:
    return build(BY_NAME[place])


FAULT = {fault.name: fault for fault in ATTENTION}
FAULTS = [fault.name for fault in ATTENTION if fault.predicted and fault.name not in CHAOTIC]


@pytest.mark.parametrize("name", FAULTS[::6])
def test_injected_fault_is_identified(name: str) -> None:
    case = place_of(name)
    assert case is not None
    result = examine(case, injected(name))
    assert result.status == "wrong"
    first = result.findings[0]
    assert _is_named(name, first), first
    assert Case.parse(first.reproduce)


def _is_named(name: str, found: Finding) -> bool:
    """Whether a finding has this name; a symptom has no name, but its effect is reported."""
    fault = FAULT[name]
    return (
        (found.fault, found.symptom) == ("unknown", fault.effect)
        if fault.symptom
        else name in (found.fault, *found.equivalent_faults)
    )


@pytest.mark.parametrize("name", BEHAVIOUR)
def test_behavioural_fault_is_identified(name: str) -> None:
    place = "fp32" if name.startswith("products") else "invariant" if name == "depends-on-batch" else "edges"
    result = examine(BY_NAME[place], injected(name))
    assert result.failed
    assert result.findings[0].fault == name


def _with_softmax(change: Any) -> Stages:
    def softmax(w: Any, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        return change(w, logits, v, heads)

    return PLAIN.replace(softmax=softmax)


INVENTED = {
    "outputs shifted": PLAIN.replace(finish=lambda w, into: _with(into, into.out + 0.05)),
    "outputs clipped": PLAIN.replace(finish=lambda w, into: _with(into, into.out.clamp(-0.3, 0.3))),
    "negative logits dropped": _with_softmax(
        lambda w, s, v, h: oracle.softmax(w, torch.where(s > -torch.inf, s.clamp(min=0), s), v, h)
    ),
    "values squared": _with_softmax(lambda w, s, v, h: oracle.softmax(w, s, v * v, h)),
    "values of the next key": _with_softmax(lambda w, s, v, h: oracle.softmax(w, s, v.roll(1, 0), h)),
    "two faults at once": _with_softmax(
        lambda w, s, v, h: oracle.softmax(w, torch.cat((s[..., :-1] * 2, s[..., -1:] - torch.inf), -1), v, h)
    ),
}


def _with(into: Any, out: torch.Tensor) -> Any:
    into.out = out
    return into


@pytest.mark.parametrize(("name", "place"), list(zip(INVENTED, 3 * ("mixed", "window-needle"))))
def test_fault_outside_the_catalogue_is_unknown(name: str, place: str) -> None:
    def run(call: KernelCall) -> None:
        compute(call, INVENTED[name])

    result = examine(BY_NAME[place], Target(name, run))
    assert result.status == "wrong"
    first = result.findings[0]
    assert first.fault == "unknown", first
    smaller = Case.parse(first.reproduce)
    assert smaller.live <= BY_NAME[place].live
    assert "sequences" in first.summary


@pytest.mark.parametrize("case", [*cases_of("smoke"), *cases_of("standard")[::3]], ids=lambda case: case.name)
def test_correct_kernel_has_no_findings(case: Case) -> None:
    result = examine(case, ours("torch"))
    assert result.status == "correct", result.findings


def test_location_of_a_finding_is_the_wrong_key() -> None:
    """The location contains the page of the key and its offset."""
    case = Case("one-decode", q_lens=(1, 1), kv_lens=(20, 40))
    result = examine(case, injected("last-token-missing"))
    where = result.findings[0].where
    call = build(case)
    assert (where.key, where.offset) in ((19, 3), (39, 7))
    assert where.sequence is not None and where.key is not None
    assert where.page == int(call.page_table[where.sequence, where.key // 16])
    assert result.picture is not None and result.picture.bad_cell == (where.sequence, where.key // 16)


@pytest.mark.parametrize(
    "kind, belongs",
    [
        ("several new tokens", lambda q_len, kv_len: q_len > 1),
        ("one new token", lambda q_len, kv_len: q_len == 1),
        ("several new tokens and a context", lambda q_len, kv_len: 1 < q_len < kv_len),
    ],
)
def test_fault_of_one_of_two_kernels_is_identified(kind: str, belongs: Callable[[int, int], bool]) -> None:
    """Operators for mixed batches are often two kernels, and only one of them has the fault."""
    case = Case("window", q_lens=(1, 30, 9, 20), kv_lens=(80, 40, 33, 20), window=(15, 0))

    def run(call: KernelCall) -> None:
        compute(call)
        right, starts = call.out.clone(), call.q_starts.tolist()
        injected("window-ignored").run(call)
        for start, end, kv_len in zip(starts, starts[1:], call.kv_lens.tolist()):
            if not belongs(end - start, kv_len):
                call.out[start:end] = right[start:end]

    first = examine(case, Target("two kernels", run)).findings[0]
    assert (first.fault, first.parameters["only"]) == ("window-ignored", f"sequences of {kind}")
    again = Case.parse(first.reproduce)
    assert all(belongs(*lens) for lens in zip(again.q_lens, again.kv_lens))


def test_match_on_needle_data_only_is_unknown() -> None:
    """With needle data a softmax that drops small weights matches one that is too sharp; with other data it does not."""

    def sharp(w: Any, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        return oracle.softmax(w, torch.where(logits < logits.amax(-1, keepdim=True) - 2, -torch.inf, logits), v, heads)

    result = examine(BY_NAME["decode-needle"], Target("sharp", lambda call: compute(call, _with_softmax(sharp))))
    assert result.findings[0].fault == "unknown"


def test_page_without_weight_is_no_evidence_for_a_wrong_page() -> None:
    """A page without weight, in place of a missing key, explains a row as well; that is no evidence for this page."""

    def which(w: Any, row: oracle.BatchSequence, keys: int) -> torch.Tensor:
        visible = oracle.visibility(w, row, keys)
        visible[:, keys - 1 :] &= keys % w.call.page_size != 1
        return visible

    case = BY_NAME["long-bf16"]
    result = examine(case, Target("drops the last key of some", lambda call: compute(call, PLAIN.replace(visibility=which))))
    assert result.findings[0].fault == "unknown", result.findings[0]


def _swap_heads(t: torch.Tensor) -> torch.Tensor:
    return t[:, [1, 0, *range(2, t.shape[1])]]


def _swap_rows(t: torch.Tensor) -> torch.Tensor:
    return t[[1, 0, *range(2, t.shape[0])]]


def _zero_last(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t[-1] = 0
    return t


MOVES = {"heads-swapped": _swap_heads, "rows-swapped": _swap_rows, "row-zero": _zero_last}


@pytest.mark.parametrize("follows", [True, False], ids=["LSE follows", "LSE stays"])
@pytest.mark.parametrize(
    "name", [*MOVES, "kv-heads-interleaved", "query-off-by-one", "query-heads-reversed", "table-row-off-by-one"]
)
def test_fault_is_identified_with_or_without_a_wrong_lse(name: str, follows: bool) -> None:
    def run(call: KernelCall) -> None:
        compute(call)
        live, right = call.live, call.lse
        assert right is not None
        kept = right[:live].clone()
        if name in MOVES:
            call.out[:live] = MOVES[name](call.out[:live])
            right[:live] = MOVES[name](kept)
        else:
            injected(name).run(call)
        if not follows:
            right[:live] = kept

    first = examine(BY_NAME["mixed"], Target(name, run)).findings[0]
    assert _is_named(name, first), first


def test_reduced_case_of_an_unknown_fault_is_unknown_too() -> None:
    """A single sequence without its last key matches a fault of the catalogue; in a batch of complete sequences it does not."""

    def visibility(w: Any, row: oracle.BatchSequence, keys: int) -> torch.Tensor:
        visible = oracle.visibility(w, row, keys)
        visible[:, keys - 1 :] &= row.seq != 2 and w.call.seqs > 1
        return visible

    target = Target("drops the last key of one", lambda call: compute(call, PLAIN.replace(visibility=visibility)))
    first = examine(BY_NAME["decode-needle"], target).findings[0]
    assert first.fault == "unknown"
    again = Case.parse(first.reproduce)
    assert again != BY_NAME["decode-needle"].replace(poison="decoy"), "nothing was left out"
    assert examine(again, target).findings[0].fault == "unknown"


@pytest.mark.parametrize("bits", [15, 16])
@pytest.mark.parametrize("place", ["high-pages", "decode-high-pages"])
def test_wrapped_page_ids_are_identified_with_their_bits(place: str, bits: int) -> None:
    first = examine(BY_NAME[place], injected(f"page-ids-wrapped-at-2^{bits}")).findings[0]
    assert first.equivalent_faults == (f"page-ids-wrapped-at-2^{bits}",)


def test_row_with_the_result_of_a_correct_row_is_not_swapped() -> None:
    """If a query sees one key, the value of the previous key is the result of the previous row, which is itself correct."""

    def before(w: Any, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        borders = torch.arange(v.shape[0]) % w.call.page_size == 0
        return oracle.softmax(w, logits, torch.where(borders[:, None, None], v.roll(1, 0), v), heads)

    case = Case("window-1", q_lens=(20, 5), kv_lens=(20, 40), window=(0, 0))
    first = examine(case, Target("the value before", lambda call: compute(call, _with_softmax(before)))).findings[0]
    assert first.fault == "unknown", first


def test_factors_that_depend_on_the_data_are_unknown() -> None:
    """In one row each head may be wrong by its own factor, but the factors must be the same in other calls."""

    def finish(w: Any, into: Any) -> Any:
        return _with(into, into.out * (1 + 0.2 * torch.sin(9 * into.lse)).unsqueeze(-1))

    case = Case("one-row", q_lens=(1,), kv_lens=(40,))
    first = examine(case, Target("factors", lambda call: compute(call, PLAIN.replace(finish=finish)))).findings[0]
    assert first.fault == "unknown", first


def test_fault_of_one_page_id_is_not_identified_as_a_fault_of_lengths() -> None:
    """Page 0 is treated as no page. If it is the last page of a sequence, its keys are those of the last tile."""

    def visibility(w: Any, row: oracle.BatchSequence, keys: int) -> torch.Tensor:
        page, _ = oracle.locate(w, oracle.read(w), row, torch.arange(keys))
        return oracle.visibility(w, row, keys) & (page != 0)

    case = Case("null", q_lens=(20,), kv_lens=(20,), seed=27)
    assert build(case).page_table[0, 1] == 0
    first = examine(case, Target("null page", lambda call: compute(call, PLAIN.replace(visibility=visibility)))).findings[0]
    assert first.fault in ("unknown", "keys-missing"), first
    assert first.parameters.get("last") != 1 << 40, "the end of a sequence is not a position"


@pytest.mark.parametrize("each", [2, 3, 5])
@pytest.mark.parametrize("start", range(3))
def test_race_is_identified_as_nondeterminism(each: int, start: int) -> None:
    """Some calls are wrong at random, independently of earlier calls and of poison values."""
    chance = random.Random(60 * each + start)

    def run(call: KernelCall) -> None:
        compute(call)
        if chance.randrange(each) == 0:
            call.out[:1] = 0

    target = Target("race", run)
    found = [finding for _ in range(6) for finding in examine(BY_NAME["mixed"], target).findings]
    assert found and {finding.fault for finding in found} == {"two-runs-differ"}
    assert "several tries" in found[0].summary or "once in" in found[0].summary


def test_page_kept_from_an_earlier_long_call_is_a_state_leak() -> None:
    last: list[int] = []

    def keeps_a_page(call: KernelCall) -> None:
        first = call.page_table[0].clone()
        if last and int(call.kv_lens[0]) > call.page_size:
            call.page_table[0, 0] = last[0]
        compute(call)
        call.page_table[0].copy_(first)
        last[:] = [int(first[0])] if int(call.kv_lens[0]) > call.page_size else last

    decode = BY_NAME["decode-needle"]
    assert decode.kv_lens[0] > decode.page_size
    assert examine(decode, Target("keeps a page", keeps_a_page)).findings[0].fault == "state-leaks"


def test_reproducible_dependence_on_an_earlier_call_is_a_state_leak() -> None:
    finding = examine(BY_NAME["mixed"], injected("state-leaks")).findings[0]
    assert finding.fault == "state-leaks"


@pytest.mark.parametrize("name", [fault.name for fault in ATTENTION if fault.group == "shard"])
def test_faults_of_shards_are_identified(name: str) -> None:
    case = place_of(name)
    assert case is not None and case.shard[1] > 1
    assert examine(case, injected(name)).findings[0].fault == name


@pytest.mark.parametrize("name", [fault.name for fault in ATTENTION if fault.group in ("select", "prefixes", "latent", "hadamard")])
def test_faults_of_features_are_identified(name: str) -> None:
    case = place_of(name)
    assert case is not None
    assert examine(case, injected(name)).findings[0].fault == name
