"""The investigation: the failures, each explanation, the cause, the effect of each proposed fix. Every number is computed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

import quire
from quire.compat.vllm_rule import TITLES, VllmCall, explain_vllm
from quire.conformance.reporting.report import Finding
from quire.conformance.runner.run import examine
from rocm_story.batch import (
    DECODE,
    HEAD_DIM,
    HEADS,
    MAX_VALUE,
    PAGE_SIZE,
    TOLERANCE,
    TestBatch,
    memory_before_the_call,
    mismatched,
)
from rocm_story.fixes import fixes
from rocm_story.hypotheses import FILL_VALUES, fill_test, hypotheses, read_as_int32
from rocm_story.mixed_operator import SMALL_CASE, CallArguments, conformance_target, mixed_operator
from rocm_story.results import Configuration, Failure, Investigation, KitResult, SimilarFault

RULE_OF_2025 = next(name for name, title in TITLES.items() if "November 2025" in title)
"""vLLM's kernel selection rule at the time of the failure, by the name that `quire explain --rule` takes."""

INDEX_TYPE = "index type: q_starts is int64, read as int32"
MISSING_TOKEN = "missing token: the new token is not in the cache"
NOT_LAUNCHED = "row never written: the kernel is not launched for it"
BY_OBSERVATION = {(True, True, False): INDEX_TYPE, (False, False, True): MISSING_TOKEN, (True, False, False): NOT_LAUNCHED}
"""Which fault the three observations of `SimilarFault`, in their order, indicate."""


def investigate(progress: Callable[[str], None] = lambda text: None) -> Investigation:
    """Rebuilds the batch and runs every step: about 20 seconds on two cores, and 3 GB of memory."""
    progress("drawing the batch")
    batch = TestBatch.draw()
    found = Investigation(describe(batch))
    progress("computing the expected output by dense attention")
    expected = batch.expected
    progress("computing the prefilling sequences")
    wrong = mismatched(batch.prefill, expected[: batch.decode_row])
    assert wrong == 0, f"{wrong} elements of the prefilling sequences are wrong: there is another fault than the one investigated"
    progress("reproducing the three failures")
    memory = memory_before_the_call(batch)
    found.failures = failures(batch, memory)
    progress("testing each explanation")
    found.hypotheses = hypotheses(batch)
    found.q_starts = read_as_int32(batch)
    found.fill_tests = [fill_test(batch, value) for value in FILL_VALUES]
    found.configurations = configurations()
    progress("applying each proposed fix")
    found.fixes = fixes(batch, memory)
    progress("comparing three faults with the same symptom")
    ordinary = batch.with_ordinary_values()
    found.missing_token = missing_token(batch, ordinary)
    int32 = batch.q_starts(torch.int32).int()
    found.similar_faults = [
        similar_fault(INDEX_TYPE, batch, CallArguments(), memory),
        similar_fault(MISSING_TOKEN, ordinary, CallArguments(starts=int32), memory),
        similar_fault(NOT_LAUNCHED, batch, CallArguments(starts=int32, seqs=DECODE), memory),
    ]
    progress("running the conformance kit")
    found.kit = kit_results()
    return found


def describe(batch: TestBatch) -> dict[str, Any]:
    return {
        "q_lens": list(batch.q_lens),
        "contexts": list(batch.contexts),
        "kv_lens": batch.kv_lens,
        "tokens": sum(batch.q_lens),
        "keys": sum(batch.kv_lens),
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "page_size": PAGE_SIZE,
        "elements": sum(batch.q_lens) * HEADS * HEAD_DIM,
        "decode_row": batch.decode_row,
        "values": [-MAX_VALUE, MAX_VALUE],
        "tolerance": TOLERANCE,
    }


def failures(batch: TestBatch, memory: torch.Tensor) -> list[Failure]:
    """Runs the test three times, as it was changed from one to the next."""
    int64 = CallArguments(index=torch.int64, starts=batch.q_starts(torch.int64))
    e5m2 = CallArguments(kv_cache_dtype="fp8_e5m2")
    return [
        Failure(
            "The original test: block_table, seq_lens and query_start_loc are torch.long.",
            _message(lambda: mixed_operator(batch, int64, memory)),
            "The kernel checks the type of two of the three tensors, with data_ptr<int>(). The message is correct.",
        ),
        Failure(
            "All index tensors created with dtype=torch.int, cache in fp8_e5m2.",
            _message(lambda: mixed_operator(batch, e5m2, memory)),
            "A documented limit: the kernel reads e4m3 only. The selection rule chooses it for e5m2 nevertheless.",
        ),
        Failure(
            "All index tensors created with dtype=torch.int, cache in the type of q.",
            _message(lambda: _assert_close(mixed_operator(batch, CallArguments(), memory), batch.expected)),
            f"1 token x {HEADS} heads x {HEAD_DIM} = {HEADS * HEAD_DIM} elements: exactly the row that decodes. Which elements "
            "are wrong is computed here; how wrong they are depends on what the memory held before, and here it is filled to "
            "match the report.",
        ),
    ]


def configurations() -> list[Configuration]:
    """Why only one configuration of the test failed: the kernel that each one was given."""
    found = []
    for name, kv_heads, window, head_size in (
        ("num_queries_per_kv 1, window 0", 64, 0, 128),
        ("num_queries_per_kv 1, window 16", 64, 16, 128),
        ("num_queries_per_kv 64, window 0", 1, 0, 128),
        ("head_size 24, window 0", 64, 0, 24),
    ):
        call = VllmCall(quire.Platform.named("gfx942"), HEADS, kv_heads, head_size, PAGE_SIZE, "auto", "fp16", 1024, window)
        decision = explain_vllm(call, RULE_OF_2025)
        custom = decision.selected == "custom"
        refused = [f"{reason.rule} {reason.given}" for reason in decision.reasons if not reason.holds]
        found.append(
            Configuration(
                name,
                decision.to_dict()["kernel"],
                f"group ratio {call.gqa_ratio}" if custom else f"the rule excludes {refused[0]}",
                "always as int32" if custom else "in its own type",
                "FAIL" if custom else "PASS",
            )
        )
    return found


def missing_token(batch: TestBatch, ordinary: TestBatch) -> dict[str, Any]:
    """The error caused by the missing token once the row is written, with the test's values and with values of ordinary size, and
    whether new tokens in the cache change the output of a prefill."""
    int32 = batch.q_starts(torch.int32).int()

    def error(of: TestBatch, token_in_cache: bool) -> float:
        out = mixed_operator(of, CallArguments(token_in_cache=token_in_cache, starts=int32), torch.zeros_like(of.q))
        return float((out[of.decode_row].float() - of.expected[of.decode_row].float()).abs().max())

    seq = min(range(DECODE), key=lambda i: batch.kv_lens[i])
    outs = [_prefill_with_separate_tokens(batch, seq, in_cache) for in_cache in (batch.kv_lens[seq], batch.contexts[seq])]
    return {
        "test_values_without_token": error(batch, False),
        "test_values_with_token": error(batch, True),
        "ordinary_values_without_token": error(ordinary, False),
        "ordinary_values_with_token": error(ordinary, True),
        "tolerance": TOLERANCE,
        "prefill_same_bits_with_new_tokens_in_cache": torch.equal(*outs),
    }


def _prefill_with_separate_tokens(batch: TestBatch, seq: int, in_cache: int) -> torch.Tensor:
    """A prefill in the context form, over a cache that holds the first `in_cache` tokens of the sequence."""
    width = -(-batch.kv_lens[seq] // PAGE_SIZE)
    pages = []
    for x in (batch.k, batch.v):
        flat = torch.zeros(width * PAGE_SIZE, HEADS, HEAD_DIM, dtype=torch.float16)
        flat[:in_cache] = x[seq][:in_cache]
        pages.append(flat.view(width, PAGE_SIZE, HEADS, HEAD_DIM))
    new = batch.k[seq][batch.contexts[seq] :], batch.v[seq][batch.contexts[seq] :]
    one = quire.Batch(torch.arange(width)[None], torch.tensor([batch.kv_lens[seq]]), torch.tensor([0, batch.q_lens[seq]]))
    return quire.attend(batch.q[batch.rows_of(seq)], quire.KVCache.wrap(*pages, layout="nhd"), one, new=new)


def similar_fault(fault: str, batch: TestBatch, arguments: CallArguments, memory: torch.Tensor) -> SimilarFault:
    """Runs the test with a fault, then makes the three observations. The fault is identified from the observations alone."""
    expected, row = batch.expected, batch.decode_row

    def out(memory: torch.Tensor, **change: Any) -> torch.Tensor:
        return mixed_operator(batch, CallArguments(**{**asdict(arguments), **change}), memory)

    error = (out(memory).float() - expected.float()).abs()
    filled = [out(torch.full_like(memory, value))[row] for value in FILL_VALUES]
    observed = (
        all(bool((got == value).all()) for got, value in zip(filled, FILL_VALUES)),
        _is_correct(out(memory, starts=batch.q_starts(torch.int32).int())[row], expected[row]),
        _is_correct(out(memory, token_in_cache=True)[row], expected[row]),
    )
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    identified = BY_OBSERVATION.get(observed, "unknown")
    return SimilarFault(fault, int((error > TOLERANCE).sum()), at, float(error.max()), *observed, identified)


def kit_results() -> list[KitResult]:
    """The conformance kit's diagnosis of such kernels, on the smaller batch."""
    found = []
    for planted, target, expected in (
        ("reads q_starts as int32", conformance_target("reads int32"), "q-starts-int64-as-int32"),
        (
            "is launched for one sequence too few",
            conformance_target("skips", reads_own_type=True, skipped=1),
            "symptom: rows of the output keep the previous content of the memory",
        ),
        ("is correct", conformance_target("correct", reads_own_type=True), "nothing"),
    ):
        result = examine(SMALL_CASE, target)
        finding = result.findings[0] if result.findings else Finding("nothing")
        where = str(finding.where) if result.findings else ""
        found.append(KitResult(planted, finding.title, where, finding.evidence, expected))
    return found


def _message(run: Callable[[], object]) -> str:
    try:
        run()
    except (RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def _assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=0)


def _is_correct(out: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within the test's tolerance, plus two fp16 roundings for the values of ordinary size."""
    return torch.allclose(out.float(), expected.float(), atol=TOLERANCE, rtol=2**-9)
