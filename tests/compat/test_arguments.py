"""The surface: vLLM's names in vLLM's order, and errors in vLLM's words."""

from __future__ import annotations

import gc
import inspect
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import quire
from compat.calls import close_in_fp8, in_cache, kernel_2d, rocm, unified
from compat.case import build
from quire import launch, slot_batch
from quire.compat import vllm
from quire.compat.vllm.attention import DECODE, PREFILL, MixedFormCall, batch_of
from quire.compat.vllm.caches import x_packed
from quire.errors import ArgumentError, ContractError
from quire.options import Options

MIXED: dict[str, Any] = {"q_lens": [1, 9, 1], "seq_lens": [40, 40, 20]}

COMMON = """
query key value output kv_cache_dtype key_cache value_cache block_table query_start_loc seq_lens max_seq_len max_query_len k_scale
v_scale"""
WRITE = "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale"
SIGNATURES = {
    "chunked_prefill_paged_decode": f"""{COMMON}
        alibi_slopes sliding_window sm_scale output_scale sinks is_block_table_ptr causal | strict""",
    "context_attention_fwd": """
        q k v o kv_cache_dtype k_cache v_cache b_loc b_start_loc b_seq_len max_seq_len max_input_len k_scale v_scale
        alibi_slopes sliding_window sm_scale skip_decode fp8_out_scale sinks is_block_table_ptr causal""",
    "kernel_paged_attention_2d": """
        output_ptr query_ptr key_cache_ptr value_cache_ptr sink_ptr block_tables_ptr seq_lens_ptr alibi_slopes_ptr scale k_scale
        v_scale out_scale_inv num_query_heads num_queries_per_kv num_queries_per_kv_padded block_table_stride query_stride_0
        query_stride_1 output_stride_0 output_stride_1 BLOCK_SIZE PHYSICAL_BLOCK_SIZE HEAD_SIZE HEAD_SIZE_PADDED USE_ALIBI_SLOPES
        SLIDING_WINDOW x stride_k_cache_0 stride_k_cache_1 stride_k_cache_2 stride_k_cache_3 stride_k_cache_4 stride_v_cache_0
        stride_v_cache_1 stride_v_cache_2 stride_v_cache_3 filter_by_query_len query_start_len_ptr USE_SINKS USE_FP8 FP8_MIN
        FP8_MAX""",
    "paged_attention_rocm": """
        out exp_sum max_logits tmp_out query key_cache value_cache num_kv_heads scale block_tables seq_lens query_start_loc
        block_size max_seq_len alibi_slopes kv_cache_dtype k_scale v_scale fp8_out_scale mfma_type""",
    "reshape_and_cache": WRITE,
    "reshape_and_cache_flash": WRITE,
    "unified_attention": """
        q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table softcap q_descale
        k_descale v_descale seq_threshold_3D num_par_softmax_segments softmax_segm_output softmax_segm_max softmax_segm_expsum
        alibi_slopes output_scale qq_bias sinks mm_prefix_range rswa_prefix_lens rswa_window use_alibi_sqrt kv_quant_mode
        k_scale_cache v_scale_cache chunk_lookback use_td mm_prefix_clamp_sliding_window""",
    "use_rocm_custom_paged_attention": """
        qtype head_size block_size gqa_ratio max_seq_len sliding_window kv_cache_dtype alibi_slopes sinks | rule platform""",
}
"""Upstream's parameters in order; those after the bar are keywords of our own."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_upstreams(name: str) -> None:
    upstream, _, ours = SIGNATURES[name].partition("|")
    parameters = inspect.signature(getattr(vllm, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == upstream.split()
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ours.split()


def test_the_surface_is_pinned() -> None:
    assert sorted(vllm.__all__) == sorted([*SIGNATURES, "KVQuantMode"])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "key without value": ({"value": None}, "value"),
    "bytes as auto": ({"key_cache": torch.zeros(12, 2, 3, 16, 8, dtype=torch.uint8)}, "kv_cache_dtype"),
    "an unknown string": ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype"),
    "another plain string": ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype"),
    "fp8 over fp16": ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    "no query": ({"query": None}, "query"),
    "no output": ({"output": None}, "output"),
    "a window of two sides": ({"sliding_window": (3, 0)}, "sliding_window"),
    "no cache": ({"key_cache": None}, "key_cache"),
    "values of another block size": ({"value_cache": torch.zeros(12, 2, 24, 8, dtype=torch.float16)}, "value_cache"),
    "no table": ({"block_table": None}, "block_table"),
    "a hint that is a tensor": ({"max_query_len": torch.tensor(4)}, "max_query_len"),
    "slopes of two axes": ({"alibi_slopes": torch.ones(2, 2)}, "alibi_slopes"),
    "many output scales": ({"output_scale": torch.ones(4)}, "output_scale"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused_in_vllms_words(name: str) -> None:
    change, argument = WRONG[name]
    case = build("cpu", **MIXED)
    fourteen = {key: change.get(key, value) for key, value in case.arguments.items()}
    with pytest.raises(ArgumentError) as refusal:
        vllm.chunked_prefill_paged_decode(**fourteen, **{key: value for key, value in change.items() if key not in fourteen})
    assert refusal.value.argument == argument


def test_violations_in_vllms_words() -> None:
    case = build("cpu", **MIXED)
    case.arguments["block_table"][1, 1] = 999
    with pytest.raises(ContractError, match=r"quire.compat.vllm.chunked_prefill_paged_decode: 1 violation") as broken:
        case.run(vllm.chunked_prefill_paged_decode)
    (violation,) = broken.value.violations
    assert violation.argument == "block_table[1, 1]"
    assert "page_table" not in str(violation) and "block_table[1]" in violation.picture
    case.arguments["key"] = None
    case.arguments["value"] = None
    with pytest.raises(ContractError, match=r"b_loc\[1, 1\]"):
        case.run(vllm.context_attention_fwd)
    assert case.output.isnan().all()


def test_the_page_of_a_decodes_own_token_is_needed() -> None:
    """It holds nothing else; a prefill of the same lengths would not need it."""
    case = build("cpu", q_lens=[1, 2], seq_lens=[17, 18])
    assert case.arguments["block_table"][1, 1] == -1
    case.run(vllm.chunked_prefill_paged_decode)
    case.arguments["block_table"][0, 1] = -1
    with pytest.raises(ContractError, match=r"block_table\[0, 1\]"):
        case.run(vllm.chunked_prefill_paged_decode)


def test_what_a_message_mentions_is_vllms_too() -> None:
    case = build("cpu", **MIXED)
    case.arguments["output"] = case.arguments["query"]
    with pytest.raises(ContractError, match="memory shared with query"):
        case.run(vllm.chunked_prefill_paged_decode)
    case.arguments["output"] = torch.zeros(case.output.shape, dtype=torch.float8_e4m3fn)
    with pytest.raises((ArgumentError, ContractError), match="output_scale") as refusal:
        case.run(vllm.chunked_prefill_paged_decode)
    assert "Options" not in str(refusal.value)


def test_a_float_index_is_named() -> None:
    case = build("cpu", **MIXED)
    case.arguments["seq_lens"] = case.arguments["seq_lens"].float()
    with pytest.raises(ContractError, match=r"\[index-types\] seq_lens"):
        case.run(vllm.chunked_prefill_paged_decode)


@pytest.mark.parametrize(
    "change",
    [{"num_query_heads": 8}, {"stride_v_cache_2": 1}, {"x": 4}, {"PHYSICAL_BLOCK_SIZE": 32}, {"USE_FP8": True}],
    ids=lambda change: next(iter(change)),
)
def test_a_kernel_argument_that_contradicts_its_tensor_is_refused(change: dict[str, Any]) -> None:
    case = build("cpu", q_lens=[1], seq_lens=[9])
    with pytest.raises(ArgumentError) as refusal:
        kernel_2d(case, **change)
    assert refusal.value.argument == next(iter(change))


def test_the_kernel_takes_all_that_its_launch_takes(device: str) -> None:
    case = build(device, q_lens=[1, 3], seq_lens=[40, 9], dense_from=0)
    a = case.arguments
    kernel_2d(
        case,
        out_scale_inv=1.0,
        num_query_heads=4,
        num_queries_per_kv=2,
        num_queries_per_kv_padded=16,
        block_table_stride=a["block_table"].stride(0),
        query_stride_0=a["query"].stride(0),
        query_stride_1=a["query"].stride(1),
        output_stride_0=a["output"].stride(0),
        output_stride_1=a["output"].stride(1),
        BLOCK_SIZE=16,
        PHYSICAL_BLOCK_SIZE=16,
        HEAD_SIZE=24,
        HEAD_SIZE_PADDED=32,
        USE_ALIBI_SLOPES=False,
        x=8,
        **{f"stride_k_cache_{i}": a["key_cache"].stride(i) for i in range(5)},
        **{f"stride_v_cache_{i}": a["value_cache"].stride(i) for i in range(4)},
        USE_SINKS=False,
        USE_FP8=False,
    )
    case.check(rows=[0])


@pytest.mark.parametrize("inverse", [100.0, "tensor"])
def test_the_kernels_output_scale_multiplies(inverse: Any, device: str) -> None:
    case = build(device, q_lens=[1, 1], seq_lens=[40, 9])
    out = torch.zeros(case.output.shape, dtype=torch.float8_e4m3fn, device=device)
    kernel_2d(case, output_ptr=out, out_scale_inv=torch.tensor([100.0], device=device) if inverse == "tensor" else inverse)
    close_in_fp8(case, out, 0.01)


@pytest.mark.parametrize(
    "change, argument",
    [({"num_kv_heads": 4}, "num_kv_heads"), ({"block_size": 32}, "block_size"), ({"mfma_type": "bf8"}, "mfma_type")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_rocm_kernel_refuses_by_name(change: dict[str, Any], argument: str) -> None:
    case = build("cpu", q_lens=[1], seq_lens=[9])
    with pytest.raises(ArgumentError) as refusal:
        rocm(case, **change)
    assert refusal.value.argument == argument


def test_the_rocm_kernel_without_starts(device: str) -> None:
    case = build(device, q_lens=[1, 1, 1], seq_lens=[40, 9, 1], alibi=True)
    room = torch.empty(0, device=device)
    rocm(case, query_start_loc=None, exp_sum=room, max_logits=room, tmp_out=room, mfma_type="fp8")
    case.check()


def test_different_calls_are_different_problems() -> None:
    """What was made for one problem must not run another: every fact that a kernel is compiled for makes a problem."""
    case = build("cpu", **MIXED)
    a = case.arguments
    cache = x_packed("auto", a["key_cache"], a["value_cache"], None, None)
    fp8 = x_packed("fp8", *(a[name].nan_to_num().to(torch.uint8) for name in ("key_cache", "value_cache")), 1.0, 1.0)
    e5m2 = x_packed("fp8_e5m2", fp8.k, fp8.v, 1.0, 1.0)
    batch = batch_of(a["block_table"], a["seq_lens"], a["query_start_loc"], 9, 40)
    long_table = batch_of(a["block_table"].long(), a["seq_lens"], a["query_start_loc"], 9, 40)
    q, out, new = a["query"], a["output"], (a["key"], a["value"])
    slopes = torch.ones(4)
    options = [
        Options(),
        Options(window=4),
        Options(softcap=2.0),
        Options(alibi=slopes),
        Options(sinks=slopes),
        Options(causal=False),
        Options(causal=torch.ones(3, dtype=torch.bool)),
        Options(mask=torch.ones(11, 11, dtype=torch.bool)),
        Options(mask=torch.ones(11, 11, dtype=torch.bool), positions=torch.arange(11)),
        Options(q_scale=1.0),
        Options(out_scale=1.0),
        Options(scale=-0.2),
        Options(batch_invariant=True),
    ]
    fields = set(Options.__dataclass_fields__)
    assert fields == {name for name in fields for option in options if getattr(option, name) is not getattr(options[0], name)}
    calls: list[tuple[Any, ...]] = [(q, cache, batch, option, new, out) for option in options]
    calls += [
        (q, cache, batch, options[0], None, out),
        (q.float(), cache, batch, options[0], new, out),
        (q, cache, batch, options[0], new, out.float()),
        (q, cache, batch, options[0], new, torch.empty(11, 4, 25, dtype=torch.float16)[..., :24]),
        (q, fp8, batch, options[0], new, out),
        (q, e5m2, batch, options[0], new, out),
        (q, cache, long_table, options[0], new, out),
    ]
    mixtures = [MixedFormCall(cache, batch, q, option, new, out) for q, cache, batch, option, new, out in calls]
    mixtures += [MixedFormCall(cache, batch, q, options[0], new, out, context_from=2)]
    mixtures += [MixedFormCall(cache, batch, q, options[0], new, out, only=only) for only in (DECODE, PREFILL)]
    problems = [launch.described("attend", call)[0] for call in mixtures]
    assert len(set(problems)) == len(problems)
    # A decoding loop stays one problem: its lengths grow, its sequences come and go, and so does a scale that is no constant.
    grown = batch_of(a["block_table"][:2], a["seq_lens"][:2], a["query_start_loc"][:3], 9, 400)
    for option in (Options(), Options(scale=0.2), Options(scale=0.3)):
        assert launch.described("attend", MixedFormCall(cache, grown, q[:10], option, new, out[:10]))[0] is problems[0]


def test_what_is_kept_is_used_with_care(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A launcher is found again: an output over an input is refused in every call, and what a recording wraps is not kept."""
    kept: dict[Any, Any] = {}
    monkeypatch.setattr(launch, "_known", kept)

    def store() -> None:
        key = torch.randn(5, 2, 24)
        one = torch.ones(1)
        vllm.reshape_and_cache_flash(key, key, *torch.zeros(2, 4, 16, 2, 24), torch.arange(5), "auto", one, one)

    with quire.record(tmp_path / "calls"):
        unified(in_cache("cpu", **MIXED))
        store()
    launchers = {kernel.operation: launcher for known in kept.values() for kernel, launcher in known.launchers.items()}
    assert sorted(launchers) == ["attend", "write"]
    assert not any(getattr(launcher, "__closure__", None) for launcher in launchers.values())
    first = dict(kept)
    for _ in range(2):
        case = in_cache("cpu", **MIXED)
        unified(case)
        case.check()
        store()
    assert kept == first
    indices = case.arguments["seq_lens"]
    memory = torch.zeros(case.output.numel() * 2, dtype=torch.uint8)
    over = memory[: indices.numel() * 4].view(torch.int32).copy_(indices)
    case.arguments |= {"output": memory.view(case.output.dtype).view(case.output.shape), "seq_lens": over}
    with pytest.raises(ContractError, match="memory shared with seqused_k"):
        unified(case)
    case.arguments |= {"output": case.arguments["query"], "seq_lens": indices}
    with pytest.raises(ContractError, match="memory shared with q"):
        unified(case)


def test_streams_share_no_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stream has yet to fill is not given to another."""
    card, host = torch.device("cuda", 0), torch.device("cpu")
    slots = SimpleNamespace(device=card)
    made = slot_batch._one_sequence
    slot_batch._kept.cache_clear()
    monkeypatch.setattr(slot_batch, "_one_sequence", lambda tokens, device: made(tokens, host))
    monkeypatch.setattr(slot_batch, "Batch", lambda *tensors, **_: tensors)
    now = {"stream": 1, "captures": False}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=now["stream"]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["captures"])
    given: list[Any] = []
    for stream, captures in ((1, False), (2, False), (1, False), (1, True)):
        now |= {"stream": stream, "captures": captures}
        given.append(slot_batch.slots_batch(37, slots))  # type: ignore[arg-type]
    slot_batch._kept.cache_clear()
    for first, second, third, captured in zip(*given):
        assert first is third and first is not second and captured is not first


def test_inputs_that_require_grad(device: str) -> None:
    case = build(device, **MIXED)
    case.arguments["query"].requires_grad_()
    case.run(vllm.chunked_prefill_paged_decode)
    assert not case.output.requires_grad
    case.check()


def test_nothing_is_kept_alive() -> None:
    """Facts about calls are remembered, their tensors are not."""
    case = build("cpu", **MIXED)
    case.run(vllm.chunked_prefill_paged_decode)
    watched = [weakref.ref(case.arguments[name]) for name in ("query", "key_cache", "value_cache", "block_table", "k_scale")]
    del case
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


def test_a_softcap_that_is_no_number_is_refused() -> None:
    with pytest.raises(quire.ArgumentError, match=r"^softcap: given nan"):
        unified(in_cache("cpu", q_lens=[1], seq_lens=[5]), softcap=float("nan"))


def test_an_address_within_a_block_is_refused() -> None:
    case = build("cpu", [1], [20])
    keys, table = case.arguments["key_cache"], case.arguments["block_table"].long()
    case.arguments["block_table"] = keys.data_ptr() + table * keys.stride(0) * keys.element_size() + 4
    with pytest.raises(quire.ContractError, match="block_table"):
        case.run(vllm.chunked_prefill_paged_decode, is_block_table_ptr=True)
