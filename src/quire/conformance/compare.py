"""How many faults do other suites expose? Their inputs and their tolerance are rebuilt here, and the same faults are planted.

Lengths, sizes, types, numbers and tolerance are theirs. Where a batch is large, some of its sequences and heads stand for all:
faults are not shy. A row that is never written counts as seen, although fresh memory may well hold zeros. None of the three
poisons unused slots, guards its outputs or runs a call twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire.conformance.build import build
from quire.conformance.call import Call
from quire.conformance.case import Case
from quire.conformance.exact import exact
from quire.conformance.faults import CATALOGUE
from quire.conformance.plant import compute
from quire.conformance.threads import one_thread


@dataclass(frozen=True)
class Suite:
    """Somebody's test: its inputs and its tolerance."""

    name: str
    cases: tuple[Case, ...]
    atol: float
    rtol: float


_PREFIX: dict[str, Any] = {
    "q_lens": (57, 24, 1),
    "kv_lens": (1064, 506, 930),
    "kv_heads": 1,
    "group": 2,
    "page_size": 32,
    "layout": "vllm_x",
    "x": 8,
    "data": "weak",
    "poison": "zero",
    "hints": "low",
}
_UNIFIED: dict[str, Any] = {
    "q_lens": (1, 5, 129),
    "kv_lens": (1328, 18, 463),
    "q_dtype": "bf16",
    "format": "bf16",
    "poison": "decoy",
    "head_dim": 128,
}
_DECODES: dict[str, Any] = {**_UNIFIED, "q_lens": (1, 1, 1), "kv_lens": (523, 37, 2011)}
_FLASHINFER: dict[str, Any] = {"table": "identity", "poison": "decoy", "head_dim": 128, "kv_heads": 1, "group": 4}

SUITES = (
    Suite(
        "vLLM test_prefix_prefill.py, fp16: atol 1e-4",
        (
            Case("prefix", **_PREFIX, head_dim=128),
            Case("prefix-24", **_PREFIX, head_dim=24),
            Case("prefix-window-16", **_PREFIX, head_dim=128, window=(15, 0)),
            Case("prefix-window-2048", **_PREFIX, head_dim=128, window=(2047, 0)),
        ),
        1e-4,
        0.0,
    ),
    Suite(
        "vLLM test_prefix_prefill.py, fp8: atol 1e-3",
        (Case("prefix-fp8", **_PREFIX, head_dim=128, format="e4m3fn", scales="tensor"),),
        1e-3,
        0.0,
    ),
    Suite(
        "vLLM test_triton_unified_attention.py: atol 1.5e-2, rtol 1e-2",
        (
            Case("unified", **_UNIFIED, kv_heads=2, group=4),
            Case("unified-decode", **_DECODES, kv_heads=1, group=5),
            Case("unified-window", **_UNIFIED, kv_heads=4, group=1, window=(63, 0)),
            Case("unified-softcap", **_UNIFIED, kv_heads=2, group=4, softcap=50.0),
            Case("unified-fp8", **{**_UNIFIED, "format": "e4m3fn"}, kv_heads=2, group=4, scales="tensor"),
        ),
        1.5e-2,
        1e-2,
    ),
    Suite(
        "FlashInfer's paged tests: atol 1e-2, rtol 1e-2",
        (
            Case("flashinfer-decode", q_lens=(1,) * 4, kv_lens=(54, 54, 54, 54), **_FLASHINFER),
            Case("flashinfer-decode-2048", q_lens=(1, 1), kv_lens=(2048, 2048), **_FLASHINFER),
            Case("flashinfer-prefill", q_lens=(37, 37), kv_lens=(54, 54), **_FLASHINFER),
            Case("flashinfer-prefill-softcap", q_lens=(37, 37), kv_lens=(97, 97), **_FLASHINFER, softcap=30.0),
            Case("flashinfer-prefill-encoder", q_lens=(37, 37), kv_lens=(54, 54), **_FLASHINFER, causal="no"),
            Case("flashinfer-page-1", q_lens=(17, 17), kv_lens=(97, 97), **_FLASHINFER, page_size=1),
        ),
        1e-2,
        1e-2,
    ),
)


def exposed_by(suite: Suite) -> tuple[list[str], list[str]]:
    """The faults that can occur in a suite's cases, and those that it notices."""
    can: dict[str, None] = {}
    seen: dict[str, None] = {}
    with one_thread():
        for case in suite.cases:
            call = build(case)
            if case.data == "weak" and case.scales == "tensor":
                _unit_scales(call)
            right = exact(call).out[: call.live]
            for fault in CATALOGUE:
                if not fault.predicted or not fault.applies(call):
                    continue
                can[fault.name] = None
                if fault.name in seen:
                    continue
                assert fault.change is not None
                call.seal()
                compute(call, fault.change(**fault.planted(call)))
                off = (call.out[: call.live].double() - right).abs()
                if bool((~(off <= suite.atol + suite.rtol * right.abs())).any()):
                    seen[fault.name] = None
    return list(can), list(seen)


def _unit_scales(call: Call) -> None:
    """Their scales of K and V are 1: numbers of ±0.001 then become zeros in fp8, and faults of scales cannot show."""
    from quire.conformance.build import flat_of

    for scale, pages in ((call.k_scale, call.k_pages), (call.v_scale, call.v_pages)):
        assert scale is not None
        flat = flat_of(pages)
        numbers = flat.view(torch.float8_e4m3fn).float() * scale
        flat.copy_(numbers.to(torch.float8_e4m3fn).view(torch.uint8))
        scale.fill_(1.0)
    call.memo.clear()


def comparison(tell: Callable[[str], None] = lambda name: None) -> list[dict[str, object]]:
    """A row for each suite."""
    rows: list[dict[str, object]] = []
    for suite in SUITES:
        tell(suite.name)
        can, seen = exposed_by(suite)
        rows.append({"suite": suite.name, "can": len(can), "exposed": len(seen), "missed": [n for n in can if n not in seen]})
    return rows
