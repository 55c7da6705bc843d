"""`unified_attention`: each of its features, what a tree mask expresses of the others, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from compat.calls import close_in_fp8, compare, in_cache, unified
from quire.compat.vllm import KVQuantMode
from quire.errors import ArgumentError

MIXED: dict[str, Any] = {"q_lens": [1, 9, 1, 30, 0, 2], "seq_lens": [40, 40, 1, 75, 33, 18]}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 12},
    "alibi-window": {"alibi": True, "window": 12},
    "sinks": {"sinks": True},
    "scale": {"scale": 0.7},
    "fp8": {"kv_cache_dtype": "fp8"},
    "e5m2-window": {"kv_cache_dtype": "fp8_e5m2", "window": 30},
    "bf16": {"dtype": torch.bfloat16},
    "fp32": {"dtype": torch.float32},
}


@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, device: str) -> None:
    case = in_cache(device, **MIXED, padding=2, **FEATURES[name])
    unified(case)
    case.check()


def test_softcap(device: str) -> None:
    case = in_cache(device, **MIXED, softcap=1.5)
    unified(case, softcap=1.5)
    case.check()


@pytest.mark.parametrize("softcap", [0, 0.0, -1.0])
def test_no_softcap(device: str, softcap: float) -> None:
    case = in_cache(device, **MIXED)
    unified(case, softcap=softcap)
    case.check()


def test_workspaces_are_taken_and_not_needed(device: str) -> None:
    case = in_cache(device, **MIXED)
    room = torch.empty(0, device=device)
    unified(
        case,
        seq_threshold_3D=8,
        num_par_softmax_segments=16,
        softmax_segm_output=room,
        softmax_segm_max=room,
        softmax_segm_expsum=room,
        use_td=True,
    )
    case.check()


def test_head_major_views(device: str) -> None:
    """Both caches as views of one tensor [blocks, kv_heads, block_size, 2 * head_size]."""
    case = in_cache(device, **MIXED)
    k, v = case.arguments["key_cache"], case.arguments["value_cache"]
    joint = torch.cat((k, v), -1).transpose(1, 2).contiguous()
    case.arguments["key_cache"], case.arguments["value_cache"] = joint.transpose(1, 2).split(k.shape[3], dim=-1)
    unified(case)
    case.check()


@pytest.mark.parametrize("shape", ["number", "one", "expanded", "per-sequence-and-head", "per-head"])
def test_descales(shape: str, device: str) -> None:
    case = in_cache(device, **MIXED, kv_cache_dtype="fp8")
    k, v = (case.arguments[name].reshape(()) for name in ("k_scale", "v_scale"))
    given: Any = {
        "number": (float(k), float(v)),
        "one": (k.view(1, 1), v.view(1)),
        "expanded": (k.expand(6, 2), v.expand(6, 2)),
        "per-sequence-and-head": (k.repeat(6, 2), v.repeat(6, 2)),
        "per-head": (k.repeat(2), v.repeat(2)),
    }[shape]
    unified(case, k_descale=given[0], v_descale=given[1])
    case.check()


def test_each_head_has_its_scale(device: str) -> None:
    case = in_cache(device, **MIXED, kv_cache_dtype="fp8")
    scale = torch.tensor([0.5, 2.0], device=device)
    unified(case, v_descale=(case.arguments["v_scale"] * scale).repeat(6, 1))
    case.output.view(-1, 2, 2, 24).div_(scale.view(2, 1, 1))
    case.check()


def test_descales_count_in_every_mode(device: str) -> None:
    """Upstream ignores them unless the mode is FP8_PER_TENSOR, whatever the cache holds."""
    case = in_cache(device, **MIXED, kv_cache_dtype="fp8")
    unified(case, kv_quant_mode=KVQuantMode.NONE)
    case.check()


def test_scales_that_differ_between_sequences_are_refused() -> None:
    case = in_cache("cpu", **MIXED, kv_cache_dtype="fp8")
    with pytest.raises(ArgumentError, match="k_descale: given scales that differ between sequences"):
        unified(case, k_descale=torch.rand(6, 2) + 0.1)


def test_fp8_queries(device: str) -> None:
    case = in_cache(device, **MIXED, kv_cache_dtype="fp8")
    exact = case.arguments["query"]
    quantised = (exact / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn)
    case.arguments["query"] = quantised
    unified(case, q_descale=torch.tensor(0.02, device=device))
    case.arguments["query"] = (quantised.float() * 0.02).to(torch.float32)
    for row in (0, 1, 3, 5):
        compare(case, row, visible=lambda distance: distance >= 0, factors=torch.bfloat16)


def test_fp8_output(device: str) -> None:
    case = in_cache(device, **MIXED)
    out = torch.zeros(case.output.shape, dtype=torch.float8_e4m3fn, device=device)
    unified(case, out=out, output_scale=torch.tensor(0.01, device=device))
    close_in_fp8(case, out, 0.01)


@pytest.mark.parametrize("window", [None, 6])
def test_causality_by_sequence(window: int | None, device: str) -> None:
    case = in_cache(device, **MIXED)
    causal = torch.tensor([True, False, False, True, True, False], device=device)
    unified(case, causal=causal, window_size=(-1 if window is None else window - 1, 0))
    for row in (0, 1, 2, 3, 5):

        def visible(distance: torch.Tensor, forward: bool = bool(causal[row])) -> torch.Tensor:
            seen = distance >= 0 if forward else torch.ones_like(distance, dtype=torch.bool)
            return seen if window is None else seen & (distance.abs() < window)

        compare(case, row, visible)


@pytest.mark.parametrize("mode", ["INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD"])
def test_a_scale_for_each_token_and_head(mode: str, device: str) -> None:
    case = in_cache(device, **MIXED)
    storage = torch.int8 if mode.startswith("INT8") else torch.float8_e4m3fn
    count, size, heads, dim = case.arguments["key_cache"].shape
    lens, dense, caches, scales = case.arguments["seq_lens"].tolist(), [], [], []
    g = torch.Generator(device).manual_seed(3)
    for part in case.dense:
        scale = 2.0 ** -torch.randint(4, 7, (part.shape[0], heads), generator=g, device=device)
        codes = torch.randint(-100, 100, part.shape, generator=g, device=device).float()
        codes = codes.to(storage).float()  # what the storage can hold
        dense.append(codes.double() * scale.unsqueeze(2))
        cache = torch.full((count, size, heads, dim), 101.0 if storage is torch.int8 else math.nan, device=device)
        of_token = torch.full((count, size, heads), math.nan, device=device)
        for row, pages in enumerate(case.pages):
            at = torch.arange(lens[row] if case.starts[row] < case.starts[row + 1] else 0, device=device)
            page, first = torch.tensor(pages, dtype=torch.long, device=device)[at // size], sum(lens[:row])
            cache[page, at % size], of_token[page, at % size] = codes[first + at], scale[first + at]
        caches.append(cache.to(storage))
        scales.append(of_token)
    unified(case, k=caches[0], v=caches[1], kv_quant_mode=KVQuantMode[mode], k_scale_cache=scales[0], v_scale_cache=scales[1])
    for row in (0, 1, 2, 3, 5):
        compare(case, row, lambda distance: distance >= 0, (dense[0], dense[1]))


def hidden_ahead(q_len: int, device: str) -> torch.Tensor:
    """A tree of two branches over one root: who sees whom among the new tokens."""
    at = torch.arange(q_len, device=device)
    return (at[:, None] >= at) & ((at[:, None] % 2 == at % 2) | (at == 0))


@pytest.mark.parametrize("window", [None, 14])
def test_a_bias_that_hides_is_a_tree(window: int | None, device: str) -> None:
    case = in_cache(device, q_lens=[9, 9, 1], seq_lens=[40, 9, 12])
    tree = hidden_ahead(9, device)
    bias = torch.where(tree, 0.0, -math.inf)
    unified(case, qq_bias=bias, window_size=(-1 if window is None else window - 1, 0))
    for row, q_len in enumerate((9, 9, 1)):

        def visible(distance: torch.Tensor, q_len: int = q_len) -> torch.Tensor:
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            seen[:, distance.shape[1] - q_len :] &= tree[:q_len, :q_len]
            return seen

        compare(case, row, visible)


def test_tokens_beyond_the_bias_are_not_biased(device: str) -> None:
    """Upstream reads rows of the bias that are not there."""
    case = in_cache(device, q_lens=[6], seq_lens=[20])
    unified(case, qq_bias=torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]], device=device))

    def visible(distance: torch.Tensor) -> torch.Tensor:
        seen = distance >= 0
        seen[1, 14] = False  # the second new token does not see the first
        return seen

    compare(case, 0, visible)


def test_a_bias_that_shifts_logits_gives_no_numbers(device: str) -> None:
    """On the host it is refused; elsewhere nobody looks, and the output says so."""
    case = in_cache(device, q_lens=[4], seq_lens=[20])
    bias = torch.zeros(4, 4, device=device)
    bias[3, 1] = -0.5
    if device == "cpu":
        with pytest.raises(ArgumentError, match="qq_bias: given a bias with other finite values than 0"):
            unified(case, qq_bias=bias)
    else:
        case.output.zero_()
        unified(case, qq_bias=bias)
        assert case.output.isnan().all()


RANGES = [[[3, 8], [30, 35]], [[2, 7], [8, 8]], [[0, 0], [5, 40]]]


@pytest.mark.parametrize("window", [None, 5])
def test_multimodal_ranges(window: int | None, device: str) -> None:
    """Tokens of a range see each other, whichever comes first; a range of one token or less is none. With a window, only if it
    clamps them."""
    q_lens, seq_lens = [12, 9, 30], [40, 9, 36]
    case = in_cache(device, q_lens=q_lens, seq_lens=seq_lens)
    ranges = torch.tensor(RANGES, dtype=torch.int32, device=device)
    unified(
        case,
        mm_prefix_range=ranges,
        window_size=(-1 if window is None else window - 1, 0),
        mm_prefix_clamp_sliding_window=window is not None,
    )
    for row, seq_len in enumerate(seq_lens):

        def visible(distance: torch.Tensor, row: int = row, seq_len: int = seq_len) -> torch.Tensor:
            at = torch.arange(seq_len, device=device)
            seen = distance >= 0
            for first, last in RANGES[row]:
                inside = (at >= first) & (at <= last) & (first < last)
                seen |= inside[seq_len - q_lens[row] :, None] & inside
            return seen if window is None else seen & (distance < window)

        compare(case, row, visible)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rswa": ({"rswa_prefix_lens": torch.zeros(6), "rswa_window": 4}, "rswa_window"),
    "chunks": ({"chunk_lookback": 1, "window_size": (7, 0)}, "chunk_lookback"),
    "alibi-sqrt": ({"alibi_slopes": torch.ones(4), "use_alibi_sqrt": True}, "use_alibi_sqrt"),
    "alibi-ahead": ({"alibi_slopes": torch.ones(4), "causal": False}, "alibi_slopes"),
    "ranges-over-a-window": ({"mm_prefix_range": torch.zeros(6, 1, 2), "window_size": (7, 0)}, "mm_prefix_range"),
    "ranges-of-another-shape": ({"mm_prefix_range": torch.zeros(6, 2)}, "mm_prefix_range"),
    "bias-of-another-shape": ({"qq_bias": torch.zeros(6)}, "qq_bias"),
    **{mode.name: ({"kv_quant_mode": mode}, "kv_quant_mode") for mode in KVQuantMode if mode > 3},
    "mode-that-is-none": ({"kv_quant_mode": 77}, "kv_quant_mode"),
    "fp8-mode-over-fp16": ({"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}, "kv_quant_mode"),
    "int8-mode-over-fp16": ({"kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD}, "kv_quant_mode"),
    "slopes-of-two-axes": ({"alibi_slopes": torch.ones(4, 4)}, "alibi_slopes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    changes, argument = REFUSED[name]
    case = in_cache("cpu", **MIXED)
    with pytest.raises(ArgumentError) as refusal:
        unified(case, **changes)
    assert refusal.value.argument == argument
    assert case.output.isnan().all()


def test_chunks_without_a_window_are_none(device: str) -> None:
    case = in_cache(device, **MIXED)
    unified(case, chunk_lookback=2, use_alibi_sqrt=True, rswa_window=3)
    case.check()


def test_a_mode_without_its_scales_is_refused() -> None:
    case = in_cache("cpu", **MIXED)
    cache = case.arguments["key_cache"].nan_to_num().to(torch.int8)
    with pytest.raises(ArgumentError, match="k_scale_cache: given nothing"):
        unified(case, k=cache, v=cache.clone(), kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
