"""What vLLM's operators get wrong at a014e35f38c, one test each; here it is right."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from compat.calls import close_in_fp8, compare, in_cache, kernel_2d, rocm, unified
from compat.case import Case, build
from quire.compat.vllm import chunked_prefill_paged_decode, context_attention_fwd, kernel_paged_attention_2d, unified_attention

MIXED: dict[str, Any] = {"q_lens": [1, 9, 1, 30, 0, 2], "seq_lens": [40, 40, 1, 75, 33, 18]}
DECODES: dict[str, Any] = {"q_lens": [1, 1, 1, 1], "seq_lens": [40, 1, 130, 17]}
INDEX = list(product((torch.int32, torch.int64), repeat=3))


@pytest.mark.parametrize("index", INDEX, ids=lambda types: "-".join(str(t).removeprefix("torch.") for t in types))
def test_index_tensors_are_read_in_their_own_type(device: str, index: Any) -> None:
    """The seeds' real cause: `query_start_loc` of int64, as torch.cumsum makes it, was reinterpreted as int32."""
    case = build(device, **MIXED, index=index)
    case.run(chunked_prefill_paged_decode)
    case.check()
    case = build(device, **MIXED, index=index, dense_from=1)
    case.run(context_attention_fwd)
    case.check()
    case = build(device, **DECODES, index=index)
    rocm(case)
    case.check()
    case = in_cache(device, **MIXED, index=index)
    unified(case)
    case.check()


def test_the_seeds_decode_row_is_computed(device: str) -> None:
    """Their batch in small: one decode after nine prefills, starts by torch.cumsum."""
    case = build(device, [55, 25, 49, 57, 27, 3, 17, 62, 33, 1], [81, 84, 100, 111, 47, 65, 48, 85, 71, 59], head_dim=32)
    starts = case.arguments["query_start_loc"]
    case.arguments["query_start_loc"] = torch.nn.functional.pad(torch.cumsum(starts.diff(), 0), (1, 0))
    assert case.arguments["query_start_loc"].dtype is torch.int64
    case.run(chunked_prefill_paged_decode)
    case.check()


@pytest.mark.parametrize("slope", ["positive", "negative", "mixed"])
def test_alibi_prefill_keeps_to_its_window_and_to_causality(device: str, slope: str) -> None:
    """Upstream's ALiBi kernel ignores the window, and hides the future by the sign of the bias."""
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.3], device=device)
    slopes *= {"positive": 1.0, "negative": -1.0, "mixed": torch.tensor([1.0, -1.0, 1.0, -1.0], device=device)}[slope]
    for op, dense_from in ((chunked_prefill_paged_decode, 2), (context_attention_fwd, 1)):
        case = build(device, **MIXED, alibi=slopes, window=7, dense_from=dense_from)
        case.run(op)
        case.check()


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e5m2", "fp8", "fp8_e4m3"])
def test_every_fp8_string_is_read(device: str, kv_cache_dtype: str) -> None:
    """The ROCm kernel rejects e5m2."""
    case = build(device, **DECODES, kv_cache_dtype=kv_cache_dtype)
    rocm(case)
    case.check()
    case = build(device, **MIXED, kv_cache_dtype=kv_cache_dtype)
    case.run(chunked_prefill_paged_decode)
    case.check()


def test_e5m2_bytes_may_come_as_the_platforms_fp8(device: str) -> None:
    """vLLM's backend views any fp8 cache as its platform's e4m3; the string says what the bytes are."""
    case = build(device, **MIXED, kv_cache_dtype="fp8_e5m2")
    for name in ("key_cache", "value_cache"):
        case.arguments[name] = case.arguments[name].view(torch.float8_e4m3fn)
    case.run(chunked_prefill_paged_decode)
    case.check()


@pytest.mark.parametrize("name, dtype", [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_plain_cache_strings_are_taken(device: str, name: str, dtype: torch.dtype) -> None:
    """ROCM_ATTN advertises them, its kernel rejects them."""
    case = build(device, **DECODES, dtype=dtype)
    rocm(case, kv_cache_dtype=name)
    case.check()


@pytest.mark.parametrize("op", [kernel_2d, rocm], ids=lambda op: op.__name__)
def test_rows_without_new_tokens_write_nothing(device: str, op: Any) -> None:
    """The Triton decode writes a row for them: at the next sequence's first, or past the end."""
    case = build(device, [0, 1, 0, 3, 0], [9, 20, 0, 3, 5], padding=1, dense_from=0)
    op(case)
    case.check(rows=[1])
    case = build(device, [0, 1, 0, 3, 0], [9, 20, 0, 3, 5], padding=1)
    case.run(chunked_prefill_paged_decode)
    case.check()


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("op", [kernel_2d, unified, chunked_prefill_paged_decode, context_attention_fwd], ids=lambda f: f.__name__)
def test_nan_in_a_slot_that_no_query_sees_does_not_leak(device: str, op: Any, window: int) -> None:
    """0 * NaN: out-of-window keys in prefill, the tail of the last page in decode. Poison is everywhere in these cases; this one
    also compares with a run over zeros, to the bit."""
    outs = []
    for clean in (False, True):
        if op is unified:
            case = in_cache(device, **MIXED, window=window)
        else:
            case = build(device, **MIXED, window=window, dense_from={kernel_2d: 0, context_attention_fwd: 1}.get(op, 2))
        if clean:
            for name in ("key", "value", "key_cache", "value_cache"):
                if case.arguments[name] is not None:
                    case.arguments[name].nan_to_num_(0.0)
        case.run(op) if op in (chunked_prefill_paged_decode, context_attention_fwd) else op(case)
        outs.append(case.output)
    assert torch.equal(outs[0].nan_to_num(), outs[1].nan_to_num())
    case.check(rows=[0, 2] if op is kernel_2d else None)


def test_more_than_131072_tokens(device: str) -> None:
    """The ROCm kernel stops at 131072: by its rule, and by its reduction."""
    case = build(device, [1, 1], [140_000, 9], heads=2, kv_heads=1, head_dim=8, page_size=32)
    rocm(case)
    case.check()
    case.run(chunked_prefill_paged_decode)
    case.check()


@pytest.mark.parametrize("hints", [(1, 1), (1024, 1024), (33, 1)], ids=str)
def test_a_low_maximum_does_not_truncate(device: str, hints: tuple[int, int]) -> None:
    """Upstream's own test passes a max_seq_len below the real one: its ROCm kernel leaves out what is beyond. A max_query_len of 1
    makes it skip the prefills."""
    case = build(device, [1, 300, 1], [1500, 1200, 1100], head_dim=8, hints=hints)
    case.run(chunked_prefill_paged_decode)
    case.check()
    case = build(device, [1, 1], [1500, 3], head_dim=8)
    rocm(case, max_seq_len=hints[0])
    case.check()


@pytest.mark.parametrize("op", [chunked_prefill_paged_decode, context_attention_fwd], ids=lambda op: op.__name__)
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_a_table_of_addresses_serves_prefills_too(device: str, op: Any, padded: bool) -> None:
    """chunked_prefill_paged_decode does not hand is_block_table_ptr to its prefill. Cells without a block hold address 0."""
    case = build(device, **MIXED, dense_from=2 if op is chunked_prefill_paged_decode else 1)
    if padded:
        for name in ("key_cache", "value_cache"):
            wide = torch.nn.functional.pad(
                case.arguments[name].view(torch.int16), (0, 0, 0, 0, 0, 1) if name == "key_cache" else (0, 0, 0, 1)
            )
            case.arguments[name] = wide.view(torch.float16)[:, :, :-1]
    keys, table = case.arguments["key_cache"], case.arguments["block_table"].long()
    addresses = keys.data_ptr() + table * keys.stride(0) * keys.element_size()
    case.arguments["block_table"] = torch.where(table < 0, 0, addresses)
    case.run(op, is_block_table_ptr=True)
    case.check()


def test_out_of_window_keys_do_not_count_however_low_the_others_are(device: str) -> None:
    """The Triton decode hides them with -10000, which is more than a very low logit."""
    # Every logit in the window is -28284, every one outside of it 0; the values inside are 1, outside 100.
    inside = torch.arange(20, device=device) >= 16
    keys, values = torch.where(inside, 1.0, 0.0), torch.where(inside, 1.0, 100.0)
    out = one_sequence(device, -1e4, keys, values)
    assert torch.allclose(out, torch.ones_like(out))
    caches = [x.view(5, 4, 1, 1).expand(-1, -1, 1, 8) for x in (keys, values)]
    kernel_paged_attention_2d(
        out,
        torch.full((1, 1, 8), -1e4, device=device),
        caches[0].permute(0, 2, 3, 1).unsqueeze(4).contiguous(),
        caches[1].permute(0, 2, 3, 1).contiguous(),
        None,
        torch.arange(5, device=device).view(1, 5),
        torch.tensor([20], device=device),
        None,
        8**-0.5,
        None,
        None,
        SLIDING_WINDOW=4,
    )
    assert torch.allclose(out, torch.ones_like(out))


def one_sequence(
    device: str, query: float, keys: torch.Tensor, values: torch.Tensor, q_len: int = 1, window: int = 4
) -> torch.Tensor:
    """`unified_attention` of equal queries over equal-sided keys: one number for each token."""
    tokens = keys.shape[0]
    caches = [x.view(-1, 4, 1, 1).expand(-1, -1, 1, 8).contiguous() for x in (keys, values)]
    out = torch.full((q_len, 1, 8), torch.nan, device=device)
    q = torch.full((q_len, 1, 8), query, device=device)
    index = {"dtype": torch.int32, "device": device}
    table = torch.arange(tokens // 4, **index).view(1, -1)
    starts, lens = torch.tensor([0, q_len], **index), torch.tensor([tokens], **index)
    unified_attention(q, *caches, out, starts, q_len, lens, tokens, 8**-0.5, True, (window - 1, 0), table, 0, None, None, None)
    return out


def test_softcap_does_not_overflow(device: str) -> None:
    """exp(S / cap) overflows from 88 on, and inf / inf is NaN."""
    case = in_cache(device, **MIXED, scale=40.0, softcap=0.5)
    unified(case, softcap=0.5)
    case.check()


def test_tables_are_not_read_beyond_their_cells(device: str) -> None:
    """Upstream reads up to a tile of cells past a row's last one. Here each row ends where its cells end, and bad ids follow."""
    case = build(device, **MIXED, page_size=4)
    exact = case.arguments["block_table"][:, : -(-75 // 4)]
    around = torch.full((exact.shape[0] + 2, exact.shape[1] + 9), 2**31 - 1, dtype=torch.int32, device=device)
    around[1:-1, : exact.shape[1]] = exact
    case.arguments["block_table"] = around[1:-1, : exact.shape[1]]
    case.run(chunked_prefill_paged_decode)
    case.check()


def test_a_table_may_have_more_rows_than_the_batch(device: str) -> None:
    """Engines keep one table for the largest batch; the ROCm kernel goes through all of its rows."""
    case = build(device, **MIXED)
    case.arguments["block_table"] = torch.nn.functional.pad(case.arguments["block_table"], (0, 0, 0, 5), value=-1)
    case.run(chunked_prefill_paged_decode)
    case.check()


def test_two_sided_windows_see_what_every_query_sees(device: str) -> None:
    """Upstream zeroes values by the window of the first query of a tile."""
    case = in_cache(device, **MIXED)
    unified(case, causal=False, window_size=(3, 3))
    for row in range(len(case.pages)):
        compare(case, row, visible=lambda distance: distance.abs() <= 3)


def test_alibi_with_sinks_in_unified_attention(device: str) -> None:
    """Upstream shifts ALiBi by a constant for each row, which the softmax forgives and a sink does not."""
    case = in_cache(device, **MIXED, alibi=True, sinks=True)
    unified(case)
    case.check()


def test_logits_far_below_zero_behind_a_hidden_tile(device: str) -> None:
    """Upstream lets the running maximum be 0 while everything is hidden: later logits below -88 then vanish."""
    # Every logit is -283; so each query sees the mean of the last four values up to its own.
    values = torch.arange(120.0, device=device)
    out = one_sequence(device, -100.0, torch.ones_like(values), values, q_len=60)
    wanted = values[60:] - 1.5
    assert torch.allclose(out, wanted.view(-1, 1, 1).expand_as(out), rtol=1e-3)


@pytest.mark.parametrize(
    "head_dim, heads, kv_heads, page_size", [(24, 4, 4, 16), (80, 8, 1, 64), (256, 34, 2, 8), (128, 2, 2, 544)]
)
def test_shapes_that_the_rocm_kernel_refuses(device: str, head_dim: int, heads: int, kv_heads: int, page_size: int) -> None:
    case = build(device, **DECODES, head_dim=head_dim, heads=heads, kv_heads=kv_heads, page_size=page_size)
    rocm(case)
    case.check()


@pytest.mark.parametrize("x", [1, 4, 8, 16])
def test_any_x(device: str, x: int) -> None:
    """The ROCm kernel computes with 16 bytes whatever the tensor says: an fp8 cache of x = 8 is read wrongly."""
    for kv_cache_dtype in ("auto", "fp8"):
        case = build(device, **DECODES, head_dim=32, x=x, kv_cache_dtype=kv_cache_dtype)
        rocm(case)
        case.check()
        case = build(device, **MIXED, head_dim=32, x=x, kv_cache_dtype=kv_cache_dtype)
        case.run(chunked_prefill_paged_decode)
        case.check()


def test_strides_are_those_of_the_tensors(device: str) -> None:
    """The ROCm kernel takes query heads and output rows to be packed, and V's strides to be K's."""
    case = build(device, **DECODES, head_dim=16)
    tokens, heads, dim = case.arguments["query"].shape
    fused = torch.full((tokens, heads + 3, dim + 8), torch.nan, dtype=torch.float16, device=device)
    fused[:, 1:-2, :dim] = case.arguments["query"]
    case.arguments["query"] = fused[:, 1:-2, :dim]
    case.arguments["output"] = torch.full((heads, tokens, dim), torch.nan, dtype=torch.float16, device=device).transpose(0, 1)
    case.arguments["value_cache"] = torch.cat([case.arguments["value_cache"]] * 2, 1)[:, :2]
    rocm(case)
    case.check()
    case.output.fill_(torch.nan)
    case.run(chunked_prefill_paged_decode)
    case.check()


def test_a_window_of_one_key_is_the_query_alone(device: str) -> None:
    case = build(device, **MIXED, window=1)
    case.run(chunked_prefill_paged_decode)
    case.check()


def test_prefill_may_look_ahead(device: str) -> None:
    """causal=False with a window: one-sided, as upstream; decodes are the same either way."""
    case = build(device, **MIXED, causal=False, window=6)
    case.run(chunked_prefill_paged_decode)
    case.check()


def test_sinks_and_fp8_output_go_with_alibi(device: str) -> None:
    """Upstream's ALiBi prefill has neither."""
    case = build(device, **MIXED, alibi=True, sinks=True)
    case.arguments["output"] = torch.zeros(case.output.shape, dtype=torch.float8_e4m3fn, device=device)
    case.run(chunked_prefill_paged_decode, output_scale=torch.tensor([0.01], device=device))
    close_in_fp8(case, case.output, 0.01)


def test_cached_keys_with_alibi_are_refused_as_upstream_does(device: str) -> None:
    case = build(device, **MIXED, dense_from=0, alibi=True)
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        case.run(context_attention_fwd)
    case.run(chunked_prefill_paged_decode)
    case.check()


def test_an_empty_batch(device: str) -> None:
    for padding in (0, 2):
        for op in (chunked_prefill_paged_decode, context_attention_fwd):
            case = build(device, [], [], padding=padding)
            case.run(op)
            case.check()
        kernel_2d(case)
        rocm(case)
        case.check()
        case = in_cache(device, q_lens=[], seq_lens=[], padding=padding)
        unified(case, qq_bias=torch.zeros(1, 1, device=device))
        case.check()


def forget(case: Case, rows: list[int]) -> None:
    """Makes nonsense of all that the batch says about rows that a call is not about."""
    for row in rows:
        case.arguments["block_table"][row] = -1
        case.arguments["seq_lens"][row] = 0


def test_skip_decode_leaves_decode_rows_alone(device: str) -> None:
    case = build(device, **MIXED, padding=2)
    forget(case, [0, 2])
    case.run(context_attention_fwd, skip_decode=True)
    case.check(rows=[1, 3, 5])


def test_the_decode_kernel_leaves_prefills_alone(device: str) -> None:
    case = build(device, **MIXED, dense_from=0, padding=2, alibi=True, sinks=True, window=11)
    forget(case, [1, 3, 5])
    kernel_2d(case)
    case.check(rows=[0, 2])
    case = build(device, **DECODES)
    kernel_2d(case, filter_by_query_len=False, query_start_len_ptr=None)
    case.check()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a graph needs a GPU")
def test_a_captured_call_replays_when_lengths_change() -> None:
    """Rows turn from prefill to decode and back between replays; nothing is read on the host."""
    first = build("cuda", [1, 9, 30], [40, 40, 75], head_dim=32)
    second = build("cuda", [30, 1, 9], [75, 40, 40], head_dim=32, seed=1)
    first.run(chunked_prefill_paged_decode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.run(chunked_prefill_paged_decode)
    tensors = [name for name, value in first.arguments.items() if isinstance(value, torch.Tensor) and name != "output"]
    for case in (first, second):
        for name in tensors:
            if case is second:
                first.arguments[name].copy_(second.arguments[name])
        first.output.fill_(torch.nan)
        graph.replay()
        case.check(first.output)
