"""Kernels that split the keys of a sequence: faults that begin with the second split are detected, and a correct one passes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quire.conformance.cases.build import build
from quire.conformance.cases.case import Case
from quire.conformance.cases.formats import PACK
from quire.conformance.cases.suite import cases_of
from quire.conformance.diagnosis.attempt import Attempt
from quire.conformance.oracle.budget import rounding_losses, truth
from quire.conformance.runner.target import Target, wrap
from quire.conformance.runner.threads import one_thread

SPLIT = 256
CASES = [
    case
    for case in cases_of("standard")
    if case.name.startswith(("long-decode-", "extreme-long-decode")) and case.format not in PACK  # this kernel unpacks nothing
]


def kernel(fault: str) -> Any:
    """Attention in splits of 256 keys, each with its LSE, merged by their LSEs."""

    def later(name: str, first: int) -> bool:
        return fault == name and first > 0

    def attention(
        *, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, window, softcap, alibi, sinks, k_scale, v_scale
    ):  # type: ignore[no-untyped-def]
        size, group = k_pages.shape[1], q.shape[1] // k_pages.shape[2]
        for seq, n in enumerate(kv_lens.tolist()):
            rows = slice(int(q_starts[seq]), int(q_starts[seq + 1]))
            at = torch.arange(n - (rows.stop - rows.start), n)
            outs, sums = [], []
            for first in range(0, n, SPLIT):
                keys = torch.arange(first, min(n, first + SPLIT))
                far = at[:, None] - keys
                seen = far >= 0
                if window[0] is not None and not later("window", first):
                    seen &= far <= window[0]
                if not seen.any():
                    continue
                keys, far, seen = keys[seen.any(0)], far[:, seen.any(0)], seen[:, seen.any(0)]
                page, slot = page_table[seq].long()[keys // size], keys % size

                def read(pages: Any, factor: Any, page: Any = page, slot: Any = slot) -> Any:
                    x = pages[page, slot].float()
                    if factor is not None:
                        x = x * (factor[page, slot][..., None] if factor.dim() == 3 else factor.reshape(-1, 1))
                    return x.repeat_interleave(group, 1)

                k, v = read(k_pages, None if later("k_scale", first) else k_scale), read(v_pages, v_scale)
                logits = torch.einsum("thd,nhd->htn", q[rows].float(), k) * scale
                if softcap is not None and not later("softcap", first):
                    logits = softcap * torch.tanh(logits / softcap)
                if alibi is not None:
                    logits = logits - alibi[:, None, None] * (far - (first if fault == "alibi" else 0))
                logits = logits.masked_fill(~seen, -math.inf)
                total = logits.logsumexp(-1)
                part = torch.einsum("htn,nhd->htd", torch.exp(logits - total[..., None]), v)
                if sinks is not None and (not sums or later("sinks", first)):
                    with_sink = torch.logaddexp(total, sinks[:, None])
                    part, total = part * torch.exp(total - with_sink)[..., None], with_sink
                outs.append(part)
                sums.append(total)
            weights = torch.stack(sums)
            top = torch.zeros(()) if fault == "max" else weights.amax(0)
            weights = torch.exp(weights - top)
            mixed = (weights[..., None] * torch.stack(outs)).sum(0) / weights.sum(0)[..., None]
            out[rows] = mixed.transpose(0, 1).to(out.dtype)

    return wrap(attention, fault or "correct")


def wrong(fault: str) -> set[str]:
    target = kernel(fault)
    with one_thread():
        return {case.name for case in CASES if off(case.replace(lse=False), target) > 1}


def off(case: Case, target: Target) -> float:
    """The error in budgets, computed in one thread."""
    call = build(case)
    losses = rounding_losses(call)
    right = truth(call, losses=losses)
    target.run(call)
    return Attempt(call, right, losses).off


def test_a_correct_kernel_passes() -> None:
    assert not wrong("")


@pytest.mark.parametrize(
    "fault, shown",
    [
        ("sinks", {"long-decode-sinks", "long-decode-everything"}),
        ("alibi", {"long-decode-alibi", "long-decode-everything"}),
        ("window", {"long-decode-window", "long-decode-everything"}),
        ("softcap", {"long-decode-softcap", "long-decode-everything"}),
        ("k_scale", {"long-decode-fp8", "long-decode-int8", "long-decode-everything"}),
        ("max", {"extreme-long-decode"}),
    ],
)
def test_a_fault_from_the_second_split_on_is_detected(fault: str, shown: set[str]) -> None:
    assert wrong(fault) == shown
