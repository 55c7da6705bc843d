"""The operators that do not take the fourteen arguments, called with those of a case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compat.case import Case, build
from quire.compat.vllm import kernel_paged_attention_2d, paged_attention_rocm, unified_attention

STORED = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def rocm(case: Case, **changes: Any) -> None:
    """`paged_attention_rocm` with a case's arguments."""
    a = case.arguments
    arguments: dict[str, Any] = {
        "out": a["output"],
        "exp_sum": None,
        "max_logits": None,
        "tmp_out": None,
        "query": a["query"],
        "key_cache": a["key_cache"],
        "value_cache": a["value_cache"],
        "num_kv_heads": a["key_cache"].shape[1],
        "scale": case.options.get("sm_scale", a["query"].shape[2] ** -0.5),
        "block_tables": a["block_table"],
        "seq_lens": a["seq_lens"],
        "query_start_loc": a["query_start_loc"],
        "block_size": case.page_size,
        "max_seq_len": a["max_seq_len"],
        "alibi_slopes": case.options.get("alibi_slopes"),
        "kv_cache_dtype": a["kv_cache_dtype"],
        "k_scale": a["k_scale"],
        "v_scale": a["v_scale"],
    }
    paged_attention_rocm(**(arguments | changes))


def kernel_2d(case: Case, **changes: Any) -> None:
    """`kernel_paged_attention_2d` with a case's arguments."""
    a, format = case.arguments, STORED.get(case.arguments["kv_cache_dtype"])
    caches = [a[name] if format is None else a[name].view(format) for name in ("key_cache", "value_cache")]
    arguments: dict[str, Any] = {
        "output_ptr": a["output"],
        "query_ptr": a["query"],
        "key_cache_ptr": caches[0],
        "value_cache_ptr": caches[1],
        "sink_ptr": case.options.get("sinks"),
        "block_tables_ptr": a["block_table"],
        "seq_lens_ptr": a["seq_lens"],
        "alibi_slopes_ptr": case.options.get("alibi_slopes"),
        "scale": case.options.get("sm_scale", a["query"].shape[2] ** -0.5),
        "k_scale": a["k_scale"],
        "v_scale": a["v_scale"],
        "SLIDING_WINDOW": case.options.get("sliding_window", 0),
        "filter_by_query_len": True,
        "query_start_len_ptr": a["query_start_loc"],
    }
    kernel_paged_attention_2d(**(arguments | changes))


def unified(case: Case, **changes: Any) -> None:
    """`unified_attention` with the arguments of a case whose caches are token-major and hold everything."""
    a, format = case.arguments, STORED.get(case.arguments["kv_cache_dtype"])
    arguments: dict[str, Any] = {
        "q": a["query"],
        "k": a["key_cache"] if format is None else a["key_cache"].view(format),
        "v": a["value_cache"] if format is None else a["value_cache"].view(format),
        "out": a["output"],
        "cu_seqlens_q": a["query_start_loc"],
        "max_seqlen_q": a["max_query_len"],
        "seqused_k": a["seq_lens"],
        "max_seqlen_k": a["max_seq_len"],
        "softmax_scale": case.options.get("sm_scale", a["query"].shape[2] ** -0.5),
        "causal": case.options.get("causal", True),
        "window_size": (case.options.get("sliding_window", 0) - 1, 0),
        "block_table": a["block_table"],
        "softcap": 0,
        "q_descale": None,
        "k_descale": a["k_scale"],
        "v_descale": a["v_scale"],
        "alibi_slopes": case.options.get("alibi_slopes"),
        "sinks": case.options.get("sinks"),
        "kv_quant_mode": 0 if format is None else 1,
    }
    unified_attention(**(arguments | changes))


def in_cache(device: str, **spec: Any) -> Case:
    """A case for `unified_attention`: token-major caches that hold every token."""
    return build(device, token_major=True, dense_from=0, **spec)


def compare(
    case: Case,
    row: int,
    visible: Callable[[torch.Tensor], torch.Tensor],
    dense: tuple[torch.Tensor, torch.Tensor] | None = None,
    factors: torch.dtype = torch.float16,
) -> None:
    """Compares one row with plain float64 attention. `visible` says which keys a query sees, by q_pos - k_pos. Each weight, each
    value and the output may be rounded once to the type of the factors."""
    lens = case.arguments["seq_lens"].tolist()
    first, last, start, stop = sum(lens[:row]), sum(lens[: row + 1]), case.starts[row], case.starts[row + 1]
    q, (k, v) = case.arguments["query"][start:stop].double(), (x[first:last].double() for x in dense or case.dense)
    group = q.shape[1] // k.shape[1]
    at = torch.arange(last - first, device=q.device)
    distance = at[last - first - (stop - start) :, None] - at
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
    weights = torch.softmax(logits.masked_fill(~visible(distance), -torch.inf), -1)
    wanted, size = (torch.einsum("hqk,khd->qhd", weights, x.repeat_interleave(group, 1)) for x in (v, v.abs()))
    error = (case.output[start:stop].double() - wanted).abs()
    assert (error <= 1.5 * torch.finfo(factors).eps * size + 1e-5).all(), f"row {row} is off by up to {float(error.max())}"


def close_in_fp8(case: Case, out: torch.Tensor, scale: float) -> None:
    """An e4m3 output is what was expected, divided by its scale, saturated and rounded once."""
    wanted = (case.scenario.expected / scale).clamp(-448, 448)
    before = case.scenario.budget(torch.float32, torch.float16 if out.device.type == "cuda" else torch.float32) / scale
    step = torch.finfo(torch.float8_e4m3fn).eps / 2
    error = (out[: case.scenario.live].double() - wanted).abs()
    assert (error <= step * (wanted.abs() + before) + before + 2**-10).all(), f"off by up to {float(error.max())}"
    assert (wanted.abs() > 64).any(), "this case says little about large numbers"
