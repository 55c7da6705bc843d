"""Adapters of other libraries: they translate a call correctly, and give a reason for a call that a library does not support.

Libraries that need a GPU are replaced by stand-ins, which compute what the documentation of the library specifies.
"""

from __future__ import annotations

import math
import sys
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from quire.conformance import targets
from quire.conformance.cases.build import build
from quire.conformance.cases.case import Case
from quire.conformance.oracle.budget import Truth, distance, truth
from quire.conformance.runner.target import Target
from quire.conformance.targets import torch_flex, torch_varlen, vllm
from quire.conformance.targets.peer import View, release
from quire.errors import ArgumentError
from quire.reference import attention

CASES = {
    "mixed batch": Case("plain"),
    "decodes": Case("decode", q_lens=(1, 1, 1), kv_lens=(37, 64, 1)),
    "a sequence without new tokens": Case("none", q_lens=(0, 3, 1), kv_lens=(5, 9, 20)),
    "padding": Case("padding", padding=3),
    "hnd": Case("hnd", layout="hnd"),
    "vllm_x": Case("x", layout="vllm_x"),
    "joint": Case("joint", layout="vllm_joint"),
    "padded pages": Case("padded", storage="padded"),
    "window": Case("window", window=(7, 0)),
    "window to both sides": Case("both", window=(7, 7), causal="no"),
    "not causal": Case("non-causal", causal="no"),
    "softcap": Case("cap", softcap=5.0),
    "alibi": Case("alibi", alibi=True),
    "sinks": Case("sinks", sinks=True),
    "lse": Case("lse", lse=True),
    "int64": Case("long", index=("int64", "int64", "int64")),
    "context form": Case("context", form="context", q_lens=(5, 20), kv_lens=(40, 20)),
    "fp8": Case("fp8", format="e4m3fn", scales="tensor"),
    "e5m2 as bytes": Case("bytes", format="e5m2", scales="tensor", storage="bytes"),
    "int8 by token": Case("int8", format="int8", scales="token"),
    "a scale per head": Case("head", format="e4m3fn", scales="head"),
    "tree mask": Case("tree", mask=True),
}

PAGED = {"hnd", "joint", "padded pages"}
COMMON = {"mixed batch", "decodes", "a sequence without new tokens", "padding", *PAGED}
SUPPORTED: dict[str, set[str]] = {
    "quire.compat.vllm.chunked_prefill_paged_decode": {
        *COMMON, "vllm_x", "window", "not causal", "alibi", "sinks", "int64", "context form", "fp8", "e5m2 as bytes",
    },
    "quire.compat.vllm.context_attention_fwd": {
        *COMMON, "vllm_x", "window", "not causal", "alibi", "sinks", "int64", "context form", "fp8", "e5m2 as bytes",
    },
    "quire.compat.vllm.unified_attention": {
        *COMMON, "window", "window to both sides", "not causal", "softcap", "alibi", "sinks", "int64", "fp8", "e5m2 as bytes",
        "int8 by token",
    },
    "torch.flex": {"mixed batch", "window", "alibi", "lse"},
    "flash_attn.fa2": {*COMMON, "window", "window to both sides", "not causal", "softcap", "alibi", "lse"},
    "flash_attn.fa3": {*COMMON, "window", "window to both sides", "not causal", "softcap", "lse"},
    "flashinfer.prefill": {*COMMON, "window", "not causal", "softcap", "lse", "fp8", "e5m2 as bytes"},
    "flashinfer.decode": {"decodes"},
    "torch.varlen": {*COMMON, "window", "window to both sides", "not causal", "lse"},
}  # fmt: skip
"""The cases that each library supports. For all others its adapter gives a reason."""


def by_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over [pages, page_size, kv_heads, dim], by the definition."""
    assert table.dtype is lens.dtype is starts.dtype is torch.int32 and q.shape[0] == int(starts[-1])
    out, lse = torch.zeros(q.shape), torch.zeros(q.shape[:2])
    for seq, length in enumerate(lens.tolist()):
        row = slice(int(starts[seq]), int(starts[seq + 1]))
        ids = table[seq, : -(-length // k.shape[1])].long()
        dense = (pages[ids].flatten(0, 1)[:length].float() for pages in (k, v))
        out[row], lse[row] = attention(q[row], *dense, **how)
    return out.to(q.dtype), lse


def sided(window: Any) -> tuple[int | None, int | None]:
    left, right = window
    return None if left < 0 else left, None if right < 0 else right


def flash_attn(**given: Any) -> Any:
    """vLLM's `flash_attn_varlen_func`."""
    assert given["fa_version"] in (2, 3) and given["max_seqlen_q"] == int(given["cu_seqlens_q"].diff().max())
    out, lse = by_reference(
        given["q"], given["k"], given["v"], given["block_table"], given["seqused_k"], given["cu_seqlens_q"],
        scale=given["softmax_scale"], causal=given["causal"], window=sided(given["window_size"]),
        softcap=given["softcap"] or None, alibi=given["alibi_slopes"],
    )  # fmt: skip
    given["out"].copy_(out)
    return (out, lse.T) if given["return_softmax_lse"] else out


def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, block_table, seqused_k, scale, window_size, enable_gqa, return_aux):
    """torch's function as documented: causality is a window whose right side is 0."""
    assert cu_seq_k is None and enable_gqa
    out, lse = by_reference(q, k, v, block_table, seqused_k, cu_seq_q, scale=scale, causal=False, window=sided(window_size))
    return out if return_aux is None else (out, lse.T)


varlen_attn.__annotations__ = {"block_table": torch.Tensor}


class Wrapper:
    """FlashInfer's wrappers: concatenated lists of pages, and the LSE to base 2."""

    decode = False

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool = False):
        assert layout == "NHD"

    def plan(self, *given: Any, causal: bool = True, **how: Any) -> None:
        starts = [] if self.decode else [given[0]]
        self.indptr, self.indices, self.last, self.q_heads, _, _, self.page_size = given[len(starts) :]
        self.starts = starts[0] if starts else torch.arange(len(self.last) + 1, dtype=torch.int32)
        self.how = {"causal": causal, "scale": how["sm_scale"], "softcap": how["logits_soft_cap"]}
        self.how["window"] = (None if how["window_left"] < 0 else how["window_left"], None)

    def run(self, q: Any, pages: Any, out: Any, return_lse: bool, k_scale: float = 1.0, v_scale: float = 1.0) -> Any:
        counts = self.indptr.diff()
        table = torch.zeros(len(counts), max(int(counts.max()), 1), dtype=torch.int32)
        for seq, count in enumerate(counts.tolist()):
            table[seq, :count] = self.indices[int(self.indptr[seq]) : int(self.indptr[seq + 1])]
        lens = torch.where(counts > 0, (counts - 1) * self.page_size + self.last, 0).int()
        k, v = pages[0].float() * k_scale, pages[1].float() * v_scale
        result, lse = by_reference(q, k, v, table, lens, self.starts, **self.how)
        out.copy_(result)
        return (out, lse / math.log(2)) if return_lse else out


class DecodeWrapper(Wrapper):
    decode = True


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for libraries that cannot run on a CPU, under their names."""

    def module(name: str, **members: Any) -> None:
        made = ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)

    module("vllm", __path__=[], __version__="0.0")
    interface = SimpleNamespace(is_fa_version_supported=lambda version: True, flash_attn_varlen_func=flash_attn)
    module("vllm.vllm_flash_attn", flash_attn_interface=interface)
    wrappers = {"BatchPrefillWithPagedKVCacheWrapper": Wrapper, "BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper}
    module("flashinfer", __version__="0.0", **wrappers)
    module("torch.nn.attention.varlen", varlen_attn=varlen_attn, AuxRequest=lambda lse: lse)
    # The stand-in runs on a CPU.
    monkeypatch.delitem(torch_varlen.RULES, torch_varlen.GPU)


@cache
def right(case: Case) -> Truth:
    return truth(build(case))


def why_not(target: Target, case: Case) -> str | None:
    call = build(case)
    return target.missing(call) or target.limits(call)


# FlexAttention traces its functions in every call, which takes seconds: it gets fewer cases.
CALLS = [
    (name, case) for name in SUPPORTED for case in (CASES if name != "torch.flex" else (*sorted(SUPPORTED[name]), "fp8", "vllm_x"))
]


@pytest.mark.parametrize("name, case", CALLS)
def test_library_gets_the_same_call_or_a_reason_is_given(name: str, case: str, stand_ins: None) -> None:
    target = targets.load(name, "cpu")
    # Uncompiled, FlexAttention multiplies all pages by their weights, also by 0.
    call = build(CASES[case].replace(poison="zero") if name == "torch.flex" else CASES[case])
    reason = target.missing(call) or target.limits(call)
    if case not in SUPPORTED[name]:
        assert reason
        return
    assert reason is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target.run(call)
    assert max(distance(call.out, call.lse, call.unwritten(), right(call.case), call.live)) <= 1
    assert call.changed_inputs() == []


@pytest.mark.parametrize("name", ["flash_attn.fa3", "flashinfer.prefill", "quire.compat.vllm.unified_attention"])
def test_unused_table_entries_are_valid_page_ids(name: str, stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[torch.Tensor] = []
    seen = View.page_table.func
    monkeypatch.setattr(View, "page_table", property(lambda view: tables.append(seen(view)) or tables[-1]))
    call = build(Case("tail", tail="-1", window=(7, 0)))
    assert (call.page_table == -1).any()
    targets.load(name, "cpu").run(call)
    assert tables and all((table >= 0).all() for table in tables)


def test_stand_in_detects_a_wrong_translation(stand_ins: None) -> None:
    """A window that is one key too narrow gives a wrong result."""
    call = build(CASES["window"])
    call.window = (6, 0)
    targets.load("flash_attn.fa3", "cpu").run(call)
    assert distance(call.out, None, call.unwritten(), right(CASES["window"]), call.live)[0] > 1


@pytest.mark.parametrize(
    "name, case, says",
    [
        ("flash_attn.fa3", "int64", "int32 indices"),
        ("flash_attn.fa3", "alibi", "no argument for alibi"),
        ("flash_attn.fa2", "fp8", "no argument for k_scale"),
        ("flashinfer.decode", "mixed batch", "sequences with other than one new token"),
        ("quire.compat.vllm.unified_attention", "vllm_x", "layout vllm_x"),
        ("quire.compat.vllm.chunked_prefill_paged_decode", "a scale per head", "one scale per tensor"),
        ("torch.flex", "fp8", "no argument for k_scale"),
    ],
)
def test_reason_for_an_unsupported_call(name: str, case: str, says: str, stand_ins: None) -> None:
    assert says in str(why_not(targets.load(name, "cpu"), CASES[case]))


def test_decode_sequences_in_context_form_are_skipped_for_vllm(stand_ins: None) -> None:
    target = targets.load("quire.compat.vllm.chunked_prefill_paged_decode", "cpu")
    assert "which it reads from the cache" in str(why_not(target, Case("context", form="context")))


@pytest.mark.parametrize("name", ["chunked_prefill_paged_decode", "context_attention_fwd"])
def test_cross_attention_is_skipped_for_vllm(name: str) -> None:
    case = Case("cross", q_lens=(20, 3), kv_lens=(7, 40), causal="no")
    assert "more new tokens than keys" in str(why_not(targets.load(f"quire.compat.vllm.{name}", "cpu"), case))


def test_limits_of_vllm_itself_do_not_apply_to_quire() -> None:
    for name, asked, says in (
        ("context_attention_fwd", Case("both", alibi=True, sinks=True), "ALiBi without sinks"),
        ("chunked_prefill_paged_decode", Case("small", page_size=8), "page_size of 16"),
    ):
        call = build(asked)
        theirs, ours = (vllm._pair(f"{whose}{name}", print, "cpu", "") for whose in ("vllm.", "quire.compat.vllm."))
        assert says in (theirs.limits(call) or "") and ours.limits(call) is None


def test_flex_requires_tiles_that_divide_a_page() -> None:
    taken = [
        all(rule(Case("p", page_size=size).problem) for rule in torch_flex.COMPILED_RULES.values()) for size in (1, 8, 16, 24, 48)
    ]
    assert taken == [False, False, True, False, True]


def test_release_is_the_package_version_or_a_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somepeer.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = import_module("somepeer")
    assert release("somepeer", module).startswith("unknown release, file ")
    monkeypatch.setattr(module, "__version__", "1.2", raising=False)
    assert release("somepeer", module) == "1.2"
    (tmp_path / "somepeer-3.4.dist-info").mkdir()
    (tmp_path / "somepeer-3.4.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: somepeer\nVersion: 3.4\n")
    assert release("somepeer", module) == "3.4"


def test_missing_library_is_an_argument_error() -> None:
    with pytest.raises(ArgumentError, match=r"vllm\.unified_attention, which cannot be imported \(No module named 'vllm"):
        targets.load("vllm.unified_attention", "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_library_that_needs_a_gpu_is_an_argument_error(stand_ins: None) -> None:
    with pytest.raises(ArgumentError, match=r"flash_attn\.fa3 on cuda; allowed: a GPU, which torch does not find"):
        targets.load("flash_attn.fa3")


def test_transformers_gives_correct_results() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for name in ("transformers.eager", "transformers.sdpa"):
        target = targets.load(name, "cpu")
        for case in (*COMMON, "context form"):
            call = build(CASES[case].replace(format="fp32", q_dtype="fp32"))
            target.run(call)
            assert distance(call.out, None, call.unwritten(), right(call.case), call.live)[0] <= 4, (name, case)
