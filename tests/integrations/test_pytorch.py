"""`torch.nn.attention.varlen` on Quire, chosen by name: every form of keys, what is refused, and the way back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import attention
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

import quire.integrations.pytorch
from quire.errors import ArgumentError, QuireError
from quire.integrations.pytorch import attention as implementation
from quire.integrations.pytorch import registration
from support.float64 import assert_exact

Q_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
WINDOWS = {"full": (-1, -1), "causal": (-1, 0), "window": (5, 0), "both-sides": (4, 3)}
SAME, MORE_KEYS, MORE_QUERIES = ([5, 1, 20], [5, 1, 20]), ([1, 5, 3], [33, 5, 20]), ([7, 2], [3, 9])


@pytest.fixture(autouse=True)
def active() -> Iterator[None]:
    attention.activate_flash_attention_impl("quire")
    yield
    if attention.current_flash_attention_impl():
        attention.restore_flash_attention_impl()


def starts(lens: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(dtype)


def tensors(q_lens: list[int], kv_lens: list[int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(sum(q_lens) + sum(kv_lens))
    q = torch.randn(sum(q_lens), Q_HEADS, HEAD_DIM).to(dtype)
    return q, *(torch.randn(sum(kv_lens), KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))


def options_of(window: tuple[int, int], **options: Any) -> dict[str, Any]:
    sides = tuple(None if side < 0 else side for side in window)
    return {"window": sides, "causal": False, **options}


def assert_sequences_exact(
    result: tuple[torch.Tensor, torch.Tensor], qkv: tuple[torch.Tensor, ...], lens: tuple[list[int], list[int]], **options: Any
) -> None:
    """Compares sequence by sequence; the LSE is [q_heads, tokens]."""
    out, lse = result
    assert out.shape == qkv[0].shape and out.dtype == qkv[0].dtype
    assert lse.shape == (Q_HEADS, qkv[0].shape[0]) and lse.dtype is torch.float32 and lse.is_contiguous()
    q_at = k_at = 0
    for q_len, kv_len in zip(*lens):
        rows, keys = slice(q_at, q_at + q_len), slice(k_at, k_at + kv_len)
        assert_exact(out[rows], qkv[0][rows], qkv[1][keys], qkv[2][keys], lse[:, rows].T, **options)
        q_at, k_at = q_at + q_len, k_at + kv_len


LSE = AuxRequest(lse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("lens", [SAME, MORE_KEYS, MORE_QUERIES], ids=["same", "more-keys", "more-queries"])
def test_ragged_keys(lens: tuple[list[int], list[int]], window: tuple[int, int], dtype: torch.dtype) -> None:
    """Keys without pages: those of the queries' own tokens, a context before them, and fewer keys than queries."""
    q, k, v = tensors(*lens, dtype)
    q_starts, k_starts = map(starts, lens)
    how: dict[str, Any] = {"window_size": window, "enable_gqa": True, "scale": 0.3}
    result = varlen_attn(q, k, v, q_starts, k_starts, max(lens[0]), max(lens[1]), return_aux=LSE, **how)
    assert_sequences_exact(result, (q, k, v), lens, **options_of(window, scale=0.3))
    out = torch.full_like(q, torch.nan)
    again = varlen_attn_out(out, q, k, v, q_starts, k_starts, max(lens[0]), max(lens[1]), return_aux=LSE, **how)
    assert torch.equal(out, result[0]) and torch.equal(again[1], result[1])


def in_pages(k: torch.Tensor, v: torch.Tensor, kv_lens: list[int], page_size: int) -> tuple[torch.Tensor, ...]:
    """Pages in a shuffled order, NaN where no token is; table entries after the last page are -1."""
    counts = [-(-length // page_size) for length in kv_lens]
    order = torch.randperm(sum(counts) + 2)
    pages = torch.full((2, len(order), page_size, KV_HEADS, HEAD_DIM), torch.nan, dtype=k.dtype)
    table = torch.full((len(kv_lens), max(counts)), -1, dtype=torch.int32)
    used = at = 0
    for seq, (length, count) in enumerate(zip(kv_lens, counts)):
        ids = order[used : used + count]
        table[seq, :count] = ids
        for token in range(length):
            page, offset = ids[token // page_size], token % page_size
            pages[0, page, offset], pages[1, page, offset] = k[at + token], v[at + token]
        used, at = used + count, at + length
    return *pages, table


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("page_size", [1, 16, 20])
def test_block_table(page_size: int, window: tuple[int, int]) -> None:
    lens = MORE_KEYS
    q, k, v = tensors(*lens)
    k_pages, v_pages, table = in_pages(k, v, lens[1], page_size)
    lengths = torch.tensor(lens[1], dtype=torch.int32)
    how: dict[str, Any] = {"window_size": window, "enable_gqa": True, "seqused_k": lengths, "block_table": table}
    result = varlen_attn(q, k_pages, v_pages, starts(lens[0]), None, 5, 33, return_aux=LSE, **how)
    assert_sequences_exact(result, (q, k, v), lens, **options_of(window))
    out = torch.full_like(q, torch.nan)
    varlen_attn_out(out, q, k_pages, v_pages, starts(lens[0]), None, 5, 33, **how)
    assert torch.equal(out, result[0])
    by_starts = {**how, "seqused_k": None}
    assert torch.equal(varlen_attn(q, k_pages, v_pages, starts(lens[0]), starts(lens[1]), 5, 33, **by_starts), result[0])


@pytest.mark.parametrize("form", ["k-is-v", "expanded", "expanded-twice"])
@pytest.mark.parametrize("lens", [SAME, MORE_KEYS], ids=["same", "more-keys"])
def test_keys_that_share_memory(lens: tuple[list[int], list[int]], form: str) -> None:
    """Keys and values are only read: they may be one tensor, and their heads may be one."""
    q, k, v = tensors(*lens)
    if form == "k-is-v":
        v = k
    else:
        k = k[:, :1].expand_as(k)
        v = v[:, :1].expand_as(v) if form == "expanded-twice" else v
    how: dict[str, Any] = {"enable_gqa": True, "return_aux": LSE}
    result = varlen_attn(q, k, v, *map(starts, lens), max(lens[0]), max(lens[1]), **how)
    assert_sequences_exact(result, (q, k, v), lens, **options_of((-1, -1)))


@pytest.mark.parametrize("form", ["k-is-v", "expanded"])
def test_pages_that_share_memory(form: str) -> None:
    lens = MORE_KEYS
    q, k, v = tensors(*lens)
    k, v = (k, k) if form == "k-is-v" else (k[:, :1].expand_as(k), v[:, :1].expand_as(v))
    k_pages, v_pages, table = in_pages(k, v, lens[1], 16)
    pages = (k_pages, k_pages) if form == "k-is-v" else tuple(p[:, :, :1].expand_as(p) for p in (k_pages, v_pages))
    how: dict[str, Any] = {"seqused_k": torch.tensor(lens[1], dtype=torch.int32), "block_table": table, "enable_gqa": True}
    result = varlen_attn(q, *pages, starts(lens[0]), None, 5, 33, return_aux=LSE, **how)
    assert_sequences_exact(result, (q, k, v), lens, **options_of((-1, -1)))


@pytest.mark.parametrize("form", ["k-is-v", "expanded"])
def test_dense_keys_that_share_memory(form: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, Q_HEADS, HEAD_DIM), *(torch.randn(2, 32, KV_HEADS, HEAD_DIM) for _ in range(2))
    k, v = (k, k) if form == "k-is-v" else (k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v))
    out, lse = torch.ops.aten._flash_attention_forward(q, k, v, None, None, 3, 32, 0.0, False, False)[:2]
    for i in range(2):
        assert_exact(out[i], q[i], k[i], v[i], lse[i].T, **options_of((-1, -1)))


def test_only_the_used_keys_of_a_longer_reservation() -> None:
    """`seqused_k` without a block table: keys from there on may be anything."""
    q, k, v = tensors([1, 4], [16, 16])
    used = torch.tensor([9, 4], dtype=torch.int32)
    live = torch.cat((torch.arange(9), 16 + torch.arange(4)))
    k[9:16] = v[20:] = torch.nan
    result = varlen_attn(
        q, k, v, starts([1, 4]), starts([16, 16]), 4, 16, window_size=(-1, 0), enable_gqa=True, seqused_k=used, return_aux=LSE
    )
    assert_sequences_exact(result, (q, k[live], v[live]), ([1, 4], [9, 4]), **options_of((-1, 0)))


def test_strided_queries_and_rows_of_no_sequence() -> None:
    """q, k and v are views of one projection, and two rows are padding: their output is zero."""
    qkv = torch.randn(9, Q_HEADS + 2 * KV_HEADS, HEAD_DIM)
    qkv[7:] = torch.nan
    q, k, v = qkv.split((Q_HEADS, KV_HEADS, KV_HEADS), 1)
    index = starts([3, 4])
    out, lse = varlen_attn(q, k, v, index, index, 4, 4, window_size=(-1, 0), enable_gqa=True, return_aux=LSE)
    assert_sequences_exact((out[:7], lse[:, :7].contiguous()), (q[:7], k[:7], v[:7]), ([3, 4], [3, 4]), **options_of((-1, 0)))
    assert not out[7:].any()


def test_int64_indices() -> None:
    q, k, v = tensors(*MORE_KEYS)
    q_starts, k_starts = (starts(lens, torch.int64) for lens in MORE_KEYS)
    result = varlen_attn(q, k, v, q_starts, k_starts, 5, 33, enable_gqa=True, return_aux=LSE)
    assert_sequences_exact(result, (q, k, v), MORE_KEYS, **options_of((-1, -1)))


@pytest.mark.parametrize("kv_len", [6, 24, 7])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_batches(causal: bool, heads_first: bool, kv_len: int) -> None:
    """What `scaled_dot_product_attention` calls on CUDA; on the CPU torch has another operator for it."""
    torch.manual_seed(kv_len)
    sizes = ((6, Q_HEADS), (kv_len, KV_HEADS), (kv_len, KV_HEADS))
    if heads_first:
        q, k, v = (torch.randn(3, heads, length, HEAD_DIM).transpose(1, 2) for length, heads in sizes)
    else:
        q, k, v = (torch.randn(3, length, heads, HEAD_DIM) for length, heads in sizes)
    out, lse, seed, offset, mask = torch.ops.aten._flash_attention_forward(q, k, v, None, None, 6, kv_len, 0.0, causal, False)
    assert out.shape == q.shape and out.stride() == torch.empty_like(q).stride()
    assert lse.shape == (3, Q_HEADS, 6) and lse.is_contiguous()
    assert (seed.shape, seed.dtype, offset.shape, mask.shape) == ((2,), torch.uint64, (), (0,))
    for seq in range(3):
        assert_exact(out[seq], q[seq], k[seq], v[seq], lse[seq].T, **options_of((-1, 0 if causal else -1)))


def test_results_are_as_aten_declares_them() -> None:
    """Shapes, types and strides equal those of aten's own declaration for tracing."""
    q, k, v = tensors(*SAME)
    index = starts(SAME[0])
    arguments = (q, k, v, index, index, 20, 20, 0.0, True, False)
    made = torch.ops.aten._flash_attention_forward(*arguments)
    meta = (x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments)
    for ours, declared in zip(made, torch.ops.aten._flash_attention_forward(*meta), strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (declared.shape, declared.dtype, declared.stride())


def test_alibi_slopes() -> None:
    q, k, v = tensors(*MORE_KEYS)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    q_starts, k_starts = map(starts, MORE_KEYS)
    made = torch.ops.aten._flash_attention_forward(q, k, v, q_starts, k_starts, 5, 33, 0.0, True, False, alibi_slopes=slopes)
    assert_sequences_exact(made[:2], (q, k, v), MORE_KEYS, **options_of((-1, 0), alibi=slopes))


def test_one_split_is_batch_invariant() -> None:
    """The documented meaning of `num_splits=1`: a sequence has the same bits alone and among others."""
    q, k, v = tensors([1, 1, 1, 1], [700, 33, 5, 2100])
    many = varlen_attn(q, k, v, starts([1] * 4), starts([700, 33, 5, 2100]), 1, 2100, enable_gqa=True, num_splits=1)
    alone = varlen_attn(q[:1], k[:700], v[:700], starts([1]), starts([700]), 1, 700, enable_gqa=True, num_splits=1)
    assert torch.equal(many[:1], alone)
    seen = []
    original = implementation.attend

    def spy(*arguments: Any, **named: Any) -> Any:
        seen.append(arguments[3].batch_invariant)
        return original(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementation, "attend", spy)
        for splits in (None, 0, 1):
            varlen_attn(q[:1], k[:700], v[:700], starts([1]), starts([700]), 1, 700, enable_gqa=True, num_splits=splits)
    assert seen == [False, False, True]


def test_compiled_without_a_graph_break() -> None:
    q, k, v = tensors(*SAME)
    index = starts(SAME[0])

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return varlen_attn(q * 2, k, v, index, index, 20, 20, window_size=(-1, 0), enable_gqa=True) + 1

    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(q, k, v, index), layer(q, k, v, index))


TABLE, PAGES = torch.zeros(3, 1, dtype=torch.int32), torch.zeros(3, 8, KV_HEADS, HEAD_DIM)
REFUSED = {
    "dropout_p": ({"dropout_p": 0.1}, "dropout_p"),
    "return_debug_mask": ({"return_debug_mask": True}, "return_debug_mask"),
    "num_splits": ({"num_splits": 4}, "num_splits"),
    "alibi_slopes": ({"alibi_slopes": torch.ones(2, Q_HEADS)}, "alibi_slopes"),
    "cum_seq_k": ({"cum_seq_k": None}, "cum_seq_k"),
    "seqused_k": ({"cum_seq_k": None, "block_table": TABLE, "key": PAGES, "value": PAGES}, "seqused_k"),
    "value": ({"value": torch.zeros(26, KV_HEADS, 8)}, "value"),
    "key": ({"block_table": TABLE}, "key"),
    "query": ({"cum_seq_q": None}, "query"),
    "query float64": ({name: torch.zeros(26, Q_HEADS, 8, dtype=torch.float64) for name in ("query", "key", "value")}, "query"),
    "head_dim 600": ({name: torch.zeros(26, Q_HEADS, 600) for name in ("query", "key", "value")}, "query"),
    "key head_dim": ({name: torch.zeros(26, KV_HEADS, 8) for name in ("key", "value")}, "key"),
    "key type": ({name: torch.zeros(26, KV_HEADS, HEAD_DIM, dtype=torch.int16) for name in ("key", "value")}, "key"),
    "value type": ({"value": torch.zeros(26, KV_HEADS, HEAD_DIM, dtype=torch.float16)}, "value"),
    "max_k": ({"max_k": 19}, "max_k"),
    "max_q": ({"max_q": 19}, "max_q"),
    "max_k of other keys": ({"cum_seq_k": torch.tensor([0, 6, 6, 26], dtype=torch.int32), "max_k": 19}, "max_k"),
}


@pytest.mark.parametrize("changed, name", REFUSED.values(), ids=REFUSED)
def test_refused_by_name(changed: dict[str, Any], name: str) -> None:
    q, k, v = tensors(*SAME)
    index = starts(SAME[0])
    call = {
        "query": q, "key": k, "value": v, "cum_seq_q": index, "cum_seq_k": index, "max_q": 20, "max_k": 20, "dropout_p": 0.0,
        "is_causal": True, "return_debug_mask": False,
    }  # fmt: skip
    with pytest.raises(ArgumentError, match=name) as caught:
        torch.ops.aten._flash_attention_forward(**{**call, **changed})
    assert caught.value.argument == name


def test_an_argument_of_a_later_torch_is_refused_unless_it_is_none() -> None:
    q, k, v = tensors(*SAME)
    index = starts(SAME[0])
    arguments = (q, k, v, index, index, 20, 20, 0.0, True, False)
    assert torch.equal(registration.forward(*arguments, softcap=None)[0], registration.forward(*arguments)[0])
    with pytest.raises(ArgumentError, match="softcap"):
        registration.forward(*arguments, softcap=30.0)


def test_backward_is_refused() -> None:
    q, k, v = tensors(*SAME)
    index = starts(SAME[0])
    out = varlen_attn(q.requires_grad_(), k, v, index, index, 20, 20, enable_gqa=True)
    with pytest.raises(QuireError, match="no backward"):
        out.sum().backward()


def test_selected_and_restored_by_name() -> None:
    """Importing alone selects nothing; restoring gives torch's own operator back, which the CPU lacks."""
    q, k, v = tensors(*SAME)
    index = starts(SAME[0])
    assert quire.integrations.pytorch.NAME in attention.list_flash_attention_impls()
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        varlen_attn(q, k, v, index, index, 20, 20, enable_gqa=True)
    handle = registration.Activation()
    varlen_attn(q, k, v, index, index, 20, 20, enable_gqa=True)
    handle.remove()  # torch's registry may keep the handle: its kernels are gone even so
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        varlen_attn(q, k, v, index, index, 20, 20, enable_gqa=True)
    attention.activate_flash_attention_impl("quire")
    attention.activate_flash_attention_impl("quire")  # twice is once
    assert varlen_attn(q, k, v, index, index, 20, 20, enable_gqa=True).shape == q.shape


def test_the_example_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "integrations" / "pytorch_varlen.py"
    done = subprocess.run((sys.executable, example), capture_output=True, text=True)
    assert done.returncode == 0 and "from float64" in done.stdout, done.stderr
    assert done.stderr == ""
