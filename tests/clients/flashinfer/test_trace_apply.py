"""FlashInfer's own trace-apply layer with Quire's solutions, on the CPU.

FlashInfer's wrappers cannot be constructed without a GPU: `__init__` wants pinned memory, and `plan()` compiles CUDA code after its
arguments were recorded. The objects here are of FlashInfer's classes, made without `__init__`; everything from `plan()` being
recorded to the result of `run()` is FlashInfer's code. It asks torch whether a CUDA graph is being captured, which a CPU build of
torch cannot answer: the answer here is no."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flashinfer
import pytest
import torch
from flashinfer import trace_apply

from quire.errors import ArgumentError
from quire.integrations.engines import EngineError
from quire.integrations.flashinfer import Sizes, definitions, enable, write
from support.float64 import assert_exact

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 32, 16
SIZES = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "page_size": PAGE_SIZE}
KV_LENS, Q_LENS = [37, 5, 64, 1], [9, 5, 1, 1]
RUN = "flashinfer.{}.run"


@pytest.fixture(autouse=True)
def applied(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    enable(**SIZES)
    yield
    trace_apply.disable_apply()


def wrapper(name: str, layout: str = "NHD") -> Any:
    made = getattr(flashinfer, name)
    made = made.__new__(made)
    made._kv_layout, made._use_cuda_graph = layout, False
    return made


def plan(of: Any, **arguments: Any) -> Any:
    """Plans a wrapper: its arguments are recorded, then FlashInfer fails for lack of a GPU."""
    with pytest.raises(Exception):  # noqa: B017 - whatever FlashInfer finds missing first
        of.plan(**arguments)
    return of


def starts(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


class Paged:
    """Sequences in shuffled pages; slots that hold no token are NaN."""

    def __init__(self, page_size: int = PAGE_SIZE):
        torch.manual_seed(page_size)
        counts = [-(-length // page_size) for length in KV_LENS]
        self.indices = torch.randperm(sum(counts) + 3)[: sum(counts)].int()
        self.indptr, self.last = starts(counts), torch.tensor([(length - 1) % page_size + 1 for length in KV_LENS]).int()
        self.keys = [torch.randn(length, KV_HEADS, HEAD_DIM) for length in KV_LENS]
        self.values = [torch.randn(length, KV_HEADS, HEAD_DIM) for length in KV_LENS]
        self.pages = torch.full((2, sum(counts) + 3, page_size, KV_HEADS, HEAD_DIM), torch.nan)
        for i, length in enumerate(KV_LENS):
            for token in range(length):
                page = self.indices[int(self.indptr[i]) + token // page_size]
                self.pages[0, page, token % page_size] = self.keys[i][token]
                self.pages[1, page, token % page_size] = self.values[i][token]

    def decode_plan(self, **features: Any) -> dict[str, Any]:
        return {
            "indptr": self.indptr, "indices": self.indices, "last_page_len": self.last, "num_qo_heads": Q_HEADS,
            "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "page_size": PAGE_SIZE, **features,
        }  # fmt: skip

    def prefill_plan(self, **features: Any) -> dict[str, Any]:
        return {
            "qo_indptr": starts(Q_LENS), "paged_kv_indptr": self.indptr, "paged_kv_indices": self.indices,
            "paged_kv_last_page_len": self.last, "num_qo_heads": Q_HEADS, "num_kv_heads": KV_HEADS, "head_dim_qk": HEAD_DIM,
            "page_size": PAGE_SIZE, **features,
        }  # fmt: skip


FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"window_left": 11}, {"window": (11, None)}),
    "softcap": ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
    "scale": ({"sm_scale": 0.3}, {"scale": 0.3}),
}


def check(out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, paged: Paged, q_lens: list[int], **options: Any) -> None:
    at = 0
    for i, count in enumerate(q_lens):
        rows = slice(at, at + count)
        natural = lse[rows] * torch.tensor(2.0).log()
        assert_exact(out[rows], q[rows], paged.keys[i], paged.values[i], natural, **options)
        at += count


@pytest.mark.parametrize("features, options", FEATURES.values(), ids=FEATURES)
def test_decode(features: dict[str, Any], options: dict[str, Any]) -> None:
    paged = Paged()
    planned = plan(wrapper("BatchDecodeWithPagedKVCacheWrapper"), **paged.decode_plan(**features))
    q = torch.randn(len(KV_LENS), Q_HEADS, HEAD_DIM)
    out, lse = planned.run(q, tuple(paged.pages), return_lse=True)
    check(out, lse, q, paged, [1] * len(KV_LENS), **options)
    given = torch.full_like(out, torch.nan)
    assert planned.run(q, tuple(paged.pages), out=given) is given and torch.equal(given, out)
    assert trace_apply.stats()[RUN.format("decode.BatchDecodeWithPagedKVCacheWrapper")] == {"hit": 2}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("features, options", FEATURES.values(), ids=FEATURES)
def test_prefill(features: dict[str, Any], options: dict[str, Any], causal: bool) -> None:
    paged = Paged()
    planned = plan(wrapper("BatchPrefillWithPagedKVCacheWrapper"), **paged.prefill_plan(causal=causal, **features))
    q = torch.randn(sum(Q_LENS), Q_HEADS, HEAD_DIM)
    out, lse = planned.run(q, tuple(paged.pages), return_lse=True)
    check(out, lse, q, paged, Q_LENS, causal=causal, **options)
    assert trace_apply.stats()[RUN.format("prefill.BatchPrefillWithPagedKVCacheWrapper")] == {"hit": 1}


@pytest.mark.parametrize("causal", [True, False])
def test_ragged_prefill(causal: bool) -> None:
    paged = Paged()
    arguments = {"qo_indptr": starts(Q_LENS), "kv_indptr": starts(KV_LENS), "num_qo_heads": Q_HEADS, "num_kv_heads": KV_HEADS}
    planned = plan(wrapper("BatchPrefillWithRaggedKVCacheWrapper"), head_dim_qk=HEAD_DIM, causal=causal, **arguments)
    q = torch.randn(sum(Q_LENS), Q_HEADS, HEAD_DIM)
    out, lse = planned.run(q, torch.cat(paged.keys), torch.cat(paged.values), return_lse=True)
    check(out, lse, q, paged, Q_LENS, causal=causal)


def test_a_new_plan_replaces_the_old_one() -> None:
    """The page table is kept between the layers of a pass, and made again for a new plan and for arrays changed in place."""
    paged = Paged()
    planned = wrapper("BatchDecodeWithPagedKVCacheWrapper")
    q = torch.randn(len(KV_LENS), Q_HEADS, HEAD_DIM)
    plan(planned, **paged.decode_plan())
    planned.run(q, tuple(paged.pages))
    paged.last[0] -= 1  # in place
    shorter = paged.keys[0][:-1], paged.values[0][:-1]
    assert_exact(planned.run(q, tuple(paged.pages))[:1], q[:1], *shorter)
    fewer = {"indptr": starts([1]), "indices": paged.indices[:1], "last_page_len": torch.tensor([4]).int()}
    plan(planned, **{**paged.decode_plan(), **fewer})
    assert_exact(planned.run(q[:1], tuple(paged.pages)), q[:1], paged.keys[0][:4], paged.values[0][:4])


def test_fp8_with_the_scales_of_the_call() -> None:
    paged = Paged()
    planned = plan(wrapper("BatchDecodeWithPagedKVCacheWrapper"), **paged.decode_plan())
    q = torch.randn(len(KV_LENS), Q_HEADS, HEAD_DIM)
    stored = [(paged.pages[i].nan_to_num() / scale).to(torch.float8_e4m3fn) for i, scale in ((0, 0.03), (1, 0.02))]
    out = planned.run(q, tuple(stored), k_scale=0.03, v_scale=0.02)
    for i in range(len(KV_LENS)):
        k, v = ((t[i] / s).to(torch.float8_e4m3fn).float() * s for t, s in ((paged.keys, 0.03), (paged.values, 0.02)))
        assert_exact(out[i : i + 1], q[i : i + 1], k, v)


def function_arguments(paged: Paged, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Of the functions for Blackwell: keys and values in one tensor, heads before slots, and a page table."""
    width = int(paged.indptr.diff().max())
    table = torch.full((len(KV_LENS), width), -1, dtype=torch.int32)
    for i, (begin, end) in enumerate(zip(paged.indptr[:-1], paged.indptr[1:])):
        table[i, : end - begin] = paged.indices[begin:end]
    pages = paged.pages.permute(1, 0, 3, 2, 4).contiguous().to(dtype)
    return {"kv_cache": pages, "workspace_buffer": None, "block_tables": table, "seq_lens": torch.tensor(KV_LENS).int()}


@pytest.mark.parametrize("window", [-1, 11])
def test_decode_function(window: int) -> None:
    paged = Paged()
    q = torch.randn(len(KV_LENS), Q_HEADS, HEAD_DIM)
    how = {**function_arguments(paged), "max_seq_len": 64, "bmm1_scale": 0.2, "window_left": window}
    out = flashinfer.decode.trtllm_batch_decode_with_kv_cache(q, **how)
    for i in range(len(KV_LENS)):
        options = {} if window < 0 else {"window": (window, None)}
        assert_exact(out[i : i + 1], q[i : i + 1], paged.keys[i], paged.values[i], scale=0.2, **options)
    given = torch.full_like(out, torch.nan)
    assert flashinfer.decode.trtllm_batch_decode_with_kv_cache(q, **how, out=given) is given and torch.equal(given, out)
    assert trace_apply.stats()["flashinfer.decode.trtllm_batch_decode_with_kv_cache"] == {"hit": 2}


def context_arguments(paged: Paged, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        **function_arguments(paged, dtype), "max_q_len": 9, "max_kv_len": 64, "bmm1_scale": 0.2, "bmm2_scale": 1.0,
        "batch_size": len(KV_LENS), "cum_seq_lens_q": starts(Q_LENS), "cum_seq_lens_kv": starts(KV_LENS),
    }  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
def test_context_function(causal: bool) -> None:
    paged = Paged()
    q = torch.randn(sum(Q_LENS), Q_HEADS, HEAD_DIM)
    out = flashinfer.prefill.trtllm_batch_context_with_kv_cache(q, **context_arguments(paged), causal=causal)
    at = 0
    for i, count in enumerate(Q_LENS):
        rows = slice(at, at + count)
        assert_exact(out[rows], q[rows], paged.keys[i], paged.values[i], scale=0.2, causal=causal)
        at += count


def test_context_function_with_fp8_pages() -> None:
    """The scale of the keys is part of bmm1_scale, that of the values is bmm2_scale."""
    paged, fp8 = Paged(), torch.float8_e4m3fn
    q = torch.randn(sum(Q_LENS), Q_HEADS, HEAD_DIM)
    how = {**context_arguments(paged, fp8), "bmm2_scale": 0.5}
    out = flashinfer.prefill.trtllm_batch_context_with_kv_cache(q, **how)
    at = 0
    for i, count in enumerate(Q_LENS):
        rows = slice(at, at + count)
        assert_exact(out[rows], q[rows], paged.keys[i].to(fp8).float(), paged.values[i].to(fp8).float() * 0.5, scale=0.2)
        at += count


FUNCTION_REFUSED: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": [torch.zeros(Q_HEADS)]},
    "return_lse": {"return_lse": True},
    "bmm1_scale": {"bmm1_scale": torch.tensor(0.2)},
    "bmm2_scale": {"bmm2_scale": 0.5},
    "out_dtype": {"out_dtype": torch.bfloat16},
    "uses_shared_paged_kv_idx": {"uses_shared_paged_kv_idx": False},
}


@pytest.mark.parametrize("name", FUNCTION_REFUSED)
def test_functions_refuse_by_name(name: str) -> None:
    q = torch.randn(sum(Q_LENS), Q_HEADS, HEAD_DIM)
    with pytest.raises(ArgumentError) as caught:
        flashinfer.prefill.trtllm_batch_context_with_kv_cache(q, **{**context_arguments(Paged()), **FUNCTION_REFUSED[name]})
    assert caught.value.argument == name


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "alibi": ({"pos_encoding_mode": "ALIBI"}, {}, "pos_encoding_mode"),
    "right": ({"window_right": 3}, {}, "window_right"),
    "sinks": ({}, {"sinks": torch.zeros(Q_HEADS)}, "sinks"),
    "scale-of-16-bit": ({}, {"k_scale": 0.5}, "k_scale"),
    "q_scale": ({}, {"q_scale": 0.5}, "q_scale"),
    "several-queries": ({"q_len_per_req": 2}, {}, "q_len_per_req"),
    "output": ({"o_data_type": torch.bfloat16}, {}, "o_data_type"),
}


@pytest.mark.parametrize("planned, run, name", REFUSED.values(), ids=REFUSED)
def test_what_a_definition_leaves_out_is_refused_by_name(planned: dict[str, Any], run: dict[str, Any], name: str) -> None:
    """FlashInfer gives a solution none of these: it would be wrong without a word."""
    paged = Paged()
    of = plan(wrapper("BatchDecodeWithPagedKVCacheWrapper"), **paged.decode_plan(**planned))
    with pytest.raises(ArgumentError) as caught:
        of.run(torch.randn(len(KV_LENS), Q_HEADS, HEAD_DIM), tuple(paged.pages), **run)
    assert caught.value.argument == name


def test_masks_and_graphs_are_refused() -> None:
    paged = Paged()
    q = torch.randn(sum(Q_LENS), Q_HEADS, HEAD_DIM)
    masked = plan(wrapper("BatchPrefillWithPagedKVCacheWrapper"), **paged.prefill_plan(custom_mask=torch.ones(9, dtype=torch.bool)))
    with pytest.raises(ArgumentError, match="custom_mask"):
        masked.run(q, tuple(paged.pages))
    graph = plan(wrapper("BatchPrefillWithPagedKVCacheWrapper"), **paged.prefill_plan())
    graph._use_cuda_graph = True
    with pytest.raises(ArgumentError, match="use_cuda_graph"):
        graph.run(q, tuple(paged.pages))


def test_a_wrapper_without_a_plan_is_refused() -> None:
    paged = Paged()
    bare = wrapper("BatchDecodeWithPagedKVCacheWrapper")
    bare._paged_kv_indptr_buf, bare._paged_kv_indices_buf, bare._sm_scale = paged.indptr, paged.indices, 0.2
    with pytest.raises(EngineError, match="without the public plan"):
        bare.run(torch.randn(len(KV_LENS), Q_HEADS, HEAD_DIM), tuple(paged.pages))


def test_other_sizes_stay_flashinfers() -> None:
    paged = Paged()
    planned = plan(wrapper("BatchDecodeWithPagedKVCacheWrapper"), **paged.decode_plan())
    with pytest.raises(Exception):  # noqa: B017 - FlashInfer's own run, which needs a GPU
        planned.run(torch.randn(len(KV_LENS), 8, HEAD_DIM), tuple(paged.pages))
    assert trace_apply.stats()[RUN.format("decode.BatchDecodeWithPagedKVCacheWrapper")] == {"fallback_no_candidate": 1}


def test_the_files_are_what_flashinfer_reads(tmp_path: Path) -> None:
    """FlashInfer's own reader accepts them, and a fresh process applies them by its environment variables alone."""
    from flashinfer.trace_apply.config import load_config

    files = write(tmp_path, Sizes(**SIZES))
    assert len(files) == 10 and all(path.exists() for path in files)
    config = load_config(tmp_path)
    names = {f"gqa_paged_decode_h4_kv2_d32_ps{PAGE_SIZE}", f"gqa_paged_prefill_h4_kv2_d32_ps{PAGE_SIZE}", "gqa_ragged_h4_kv2_d32"}
    names |= {f"trtllm_batch_{stage}_h4_kv2_d32_ps{PAGE_SIZE}" for stage in ("decode", "context")}
    assert set(config.definitions) == {definition for definition, _ in config.solutions} == names
    for name in names:
        axes = config.definitions[name].const_axes()
        assert axes["num_heads" if "trtllm" in name else "num_qo_heads"] == Q_HEADS and axes["head_dim"] == HEAD_DIM
    script = (
        "import flashinfer, torch\n"
        "from flashinfer import trace_apply\n"
        "torch.cuda.is_current_stream_capturing = lambda: False\n"
        "made = flashinfer.BatchPrefillWithPagedKVCacheWrapper\n"
        "made = made.__new__(made)\n"
        "made._kv_layout, made._use_cuda_graph = 'NHD', False\n"
        "index = lambda *values: torch.tensor(values, dtype=torch.int32)\n"
        "try: made.plan(index(0, 2), index(0, 1), index(0), index(3), 4, 2, 32, 16, causal=True)\n"
        "except Exception: pass\n"
        "values = torch.arange(16.0)[None, :, None, None].repeat(1, 1, 2, 32)\n"
        "out = made.run(torch.zeros(2, 4, 32), (torch.zeros(1, 16, 2, 32), values))\n"
        "print(out[:, 0, 0].tolist(), trace_apply.stats())\n"
    )
    environment = {**os.environ, "FLASHINFER_TRACE_APPLY": "1", "FLASHINFER_TRACE_APPLY_PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run((sys.executable, "-W", "ignore", "-c", script), capture_output=True, text=True, env=environment)
    # Two new tokens of a sequence of three, uniform weights: the means of 0, 1 and of 0, 1, 2.
    assert done.stdout.startswith("[0.5, 1.0] ") and "'hit': 1" in done.stdout, done.stdout + done.stderr


def test_the_command_writes_the_same_files(tmp_path: Path) -> None:
    command = (sys.executable, "-W", "ignore", "-m", "quire.integrations.flashinfer", str(tmp_path / "a"))
    sizes = [part for name, size in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(size))]
    done = subprocess.run((*command, *sizes), capture_output=True, text=True, check=True)
    expected = write(tmp_path / "b", Sizes(**SIZES))
    for line, other in zip(done.stdout.split(), expected, strict=True):
        assert json.loads(Path(line).read_text()) == json.loads(other.read_text())


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ArgumentError, match="q_heads"):
        enable(q_heads=5, kv_heads=2, head_dim=32, page_size=16)


def test_appending_is_not_applied_by_flashinfer() -> None:
    """Why Quire has no solution for it: FlashInfer 0.7.2 never applies one to a function that returns None, unless its definition
    names the parameter that is written, and this one does not."""
    from flashinfer.trace.templates.page import append_paged_kv_cache_trace
    from flashinfer.trace_apply import apply

    original, templates = apply._registry_by_fi_api()["flashinfer.page.append_paged_kv_cache"]
    assert append_paged_kv_cache_trace in templates
    assert apply._is_inplace_api(original) and not apply._derive_output_dests(append_paged_kv_cache_trace, original)
    assert append_paged_kv_cache_trace not in definitions._functions()


def test_the_example_runs() -> None:
    example = Path(__file__).parents[3] / "examples" / "integrations" / "flashinfer_apply.py"
    done = subprocess.run((sys.executable, "-W", "ignore", example), capture_output=True, text=True)
    assert done.returncode == 0 and "solutions/gqa_paged/gqa_paged_decode_h32_kv8_d128_ps16.json" in done.stdout, done.stderr
