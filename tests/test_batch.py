"""Batch: it aliases, it translates the peers' words, and it says where each token is written."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.batch import Batch
from quire.cache.pool import PagePool
from quire.errors import ArgumentError, StaleBatch

int_types = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def make(**changed):
    tensors = {"page_table": ints([0, 1], [2, -1]), "kv_lens": ints(5, 1), "q_starts": ints(0, 3, 4)}
    return Batch(**{**tensors, **changed})


def test_it_aliases_and_never_copies():
    table, lens, starts, slots = ints([0, 1]), ints(5), ints(0, 3), ints(1, 2, 3)
    batch = Batch(table, lens, starts, slots=slots, max_q_len=3, max_kv_len=5)
    assert batch.page_table is table and batch.kv_lens is lens and batch.q_starts is starts and batch.slots is slots
    assert (batch.seqs, batch.device.type, batch.max_q_len, batch.max_kv_len) == (1, "cpu", 3, 5)
    assert (batch.copies, batch.sequences) == ((), None)


def test_repr():
    batch = make(max_q_len=3)
    assert repr(batch) == "Batch(page_table=int32[2, 2] on cpu, kv_lens=int32[2] on cpu, q_starts=int32[3] on cpu, max_q_len=3)"


@st.composite
def batches(draw):
    """(page_size, batch, tokens) with empty rows, padding rows, cells of -1 and tables that may be too narrow."""
    page_size = draw(st.sampled_from([1, 2, 3, 7, 16]))
    lens = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20)), max_size=6))
    starts = [0]
    for q_len, _ in lens:
        starts.append(starts[-1] + q_len)
    width = draw(st.integers(0, 12))
    table = [[draw(st.integers(-1, 50)) for _ in range(width)] for _ in lens]
    types = [draw(st.sampled_from([torch.int32, torch.int64])) for _ in range(3)]
    batch = Batch(
        torch.tensor(table, dtype=types[0]).view(len(lens), width),
        torch.tensor([q_len + context for q_len, context in lens], dtype=types[1]),
        torch.tensor(starts, dtype=types[2]),
    )
    return page_size, batch, starts[-1] + draw(st.integers(0, 4))


@given(batches())
def test_slots_follow_from_table_lengths_and_starts(example):
    page_size, batch, tokens = example
    rows, slots = [batch.seqs] * tokens, [-1] * tokens
    starts, table, lens = batch.q_starts.tolist(), batch.page_table.tolist(), batch.kv_lens.tolist()
    for row in range(batch.seqs):
        for token in range(starts[row], starts[row + 1]):
            rows[token] = row
            position = lens[row] - (starts[row + 1] - token)
            column = position // page_size
            if column < len(table[row]) and table[row][column] >= 0:
                slots[token] = table[row][column] * page_size + position % page_size
    got = batch.slots_of_tokens(tokens, page_size)
    assert got.dtype is torch.int64
    assert got.tolist() == slots
    assert batch.sequences_of_tokens(tokens).tolist() == rows


def test_given_slots_are_taken_as_they_are():
    got = make(slots=ints(9, -1, 4, 4)).slots_of_tokens(4, 16)
    assert (got.tolist(), got.dtype) == ([9, -1, 4, 4], torch.int64)


def test_index_tensors_may_be_strided():
    grid = ints([0, 7], [3, 7], [4, 7])
    batch = Batch(ints([0, 7, 1, 7], [2, 7, -1, 7])[:, ::2], ints(5, 9, 1)[::2], grid[:, 0])
    assert not batch.q_starts.is_contiguous()
    assert batch.slots_of_tokens(5, 4).tolist() == [2, 3, 4, 8, -1]


def test_a_slot_beyond_two_billion():
    assert Batch(ints([2**27]), ints(16), ints(0, 1)).slots_of_tokens(1, 64).tolist() == [2**33 + 15]


def test_no_sequences():
    batch = Batch(torch.empty(0, 1, dtype=torch.int32), ints(), ints(0))
    assert (batch.seqs, batch.slots_of_tokens(2, 4).tolist(), batch.slots_of_tokens(0, 4).tolist()) == (0, [-1, -1], [])
    assert batch.sequences_of_tokens(2).tolist() == [0, 0]


@int_types
def test_allocate_starts_empty(dtype):
    batch = Batch.allocate(3, 2, 5, max_q_len=4, max_kv_len=8, dtype=dtype)
    assert batch.page_table.tolist() == [[-1, -1]] * 3
    assert (batch.kv_lens.tolist(), batch.q_starts.tolist(), batch.slots) == ([0] * 3, [0] * 4, None)
    assert {t.dtype for t in (batch.page_table, batch.kv_lens, batch.q_starts)} == {dtype}
    assert (batch.max_q_len, batch.max_kv_len) == (4, 8)


@int_types
def test_fill_changes_the_same_memory(dtype):
    batch = Batch.allocate(3, 3, 5)
    memory = [t.data_ptr() for t in (batch.page_table, batch.kv_lens, batch.q_starts)]
    full = ints([1, 2, 3], [4, 5, 6], [7, 8, 9], dtype=dtype)
    assert batch.fill(full, ints(9, 8, 7, dtype=dtype), ints(0, 1, 3, 5, dtype=dtype)) is batch
    assert (batch.page_table.tolist(), batch.kv_lens.tolist(), batch.q_starts.tolist()) == (full.tolist(), [9, 8, 7], [0, 1, 3, 5])
    batch.fill(ints([6, 5], dtype=dtype), ints(4, dtype=dtype), ints(0, 2, dtype=dtype))
    assert batch.page_table.tolist() == [[6, 5, -1], [-1] * 3, [-1] * 3]
    assert (batch.kv_lens.tolist(), batch.q_starts.tolist()) == ([4, 0, 0], [0, 2, 2, 2]), "rows left over are empty"
    batch.fill(torch.empty(0, 0, dtype=dtype), ints(dtype=dtype), ints(0, dtype=dtype))
    assert (batch.kv_lens.tolist(), batch.q_starts.tolist()) == ([0, 0, 0], [0, 0, 0, 0])
    assert memory == [t.data_ptr() for t in (batch.page_table, batch.kv_lens, batch.q_starts)]


def test_fill_with_slots():
    batch = Batch.allocate(1, 1, 4)
    batch.fill(ints([3]), ints(2), ints(0, 2), slots=ints(12, 13))
    assert batch.slots.tolist() == [12, 13, -1, -1]
    memory = batch.slots.data_ptr()
    batch.fill(ints([3]), ints(3), ints(0, 1), slots=ints(14))
    assert (batch.slots.tolist(), batch.slots.data_ptr()) == ([14, -1, -1, -1], memory)
    with pytest.raises(ArgumentError) as caught:
        batch.fill(ints([3]), ints(4), ints(0, 1))
    assert str(caught.value) == "slots: given nothing (None); allowed: a tensor [tokens]: this batch was filled with slots before"


def test_from_vllm_copies_nothing():
    table, lens, starts, slots = ints([0, 1]), ints(5), ints(0, 3), ints(2, 3, 4, dtype=torch.int64)
    batch = Batch.from_vllm(
        block_table=table, seq_lens=lens, query_start_loc=starts, slot_mapping=slots, max_query_len=3, max_seq_len=5
    )
    assert batch.page_table is table and batch.kv_lens is lens and batch.q_starts is starts and batch.slots is slots
    assert (batch.max_q_len, batch.max_kv_len) == (3, 5)


def test_from_flash_attn_varlen():
    table, lens, starts = ints([0, 1]), ints(5), ints(0, 3)
    batch = Batch.from_flash_attn(block_table=table, cu_seqlens_q=starts, seqused_k=lens, max_seqlen_q=3, max_seqlen_k=5)
    assert batch.page_table is table and batch.kv_lens is lens and batch.q_starts is starts
    assert (batch.max_q_len, batch.max_kv_len) == (3, 5)


@int_types
def test_from_flash_attn_with_a_cache(dtype):
    table, lens = ints([0, 1], [2, 3], dtype=dtype), ints(5, 1, dtype=dtype)
    batch = Batch.from_flash_attn(block_table=table, seqlen_q=2, cache_seqlens=lens, appends=True)
    assert (batch.kv_lens.tolist(), batch.q_starts.tolist(), batch.max_q_len) == ([7, 3], [0, 2, 4], 2)
    assert batch.kv_lens.dtype is batch.q_starts.dtype is dtype
    assert lens.tolist() == [5, 1], "the caller's lengths are left alone"
    batch = Batch.from_flash_attn(block_table=table, seqlen_q=1, cache_seqlens=lens, appends=False)
    assert batch.kv_lens is lens
    batch = Batch.from_flash_attn(block_table=table, cu_seqlens_q=ints(0, 3, 4), cache_seqlens=lens, appends=True)
    assert (batch.kv_lens.tolist(), batch.max_q_len) == ([8, 2], None)


@given(
    page_size=st.integers(1, 20),
    sequences=st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=5),
    wider=st.none() | st.integers(0, 3),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    data=st.data(),
)
def test_from_flashinfer_is_the_table_of_its_csr(page_size, sequences, wider, dtype, data):
    indptr = [0]
    for pages in sequences:
        indptr.append(indptr[-1] + len(pages))
    last = [data.draw(st.integers(1, page_size)) if pages else 0 for pages in sequences]
    widest = max(map(len, sequences), default=0)
    width = None if wider is None else widest + wider
    batch = Batch.from_flashinfer(
        kv_indptr=ints(*indptr, dtype=dtype),
        kv_indices=ints(*[page for pages in sequences for page in pages], dtype=dtype),
        kv_last_page_len=ints(*last, dtype=dtype),
        page_size=page_size,
        pages_per_seq=width,
    )
    columns = widest if width is None else width
    assert batch.page_table.shape == (len(sequences), columns)
    assert batch.page_table.tolist() == [pages + [-1] * (columns - len(pages)) for pages in sequences]
    assert batch.kv_lens.tolist() == [(len(pages) - 1) * page_size + tail if pages else 0 for pages, tail in zip(sequences, last)]
    assert batch.q_starts.tolist() == list(range(len(sequences) + 1))
    assert {t.dtype for t in (batch.page_table, batch.kv_lens, batch.q_starts)} == {dtype}


def test_from_flashinfer_takes_the_prefill_wrappers_starts():
    starts = ints(0, 4)
    given = {"kv_indptr": ints(0, 1), "kv_indices": ints(7), "kv_last_page_len": ints(4), "page_size": 16}
    assert Batch.from_flashinfer(**given, qo_indptr=starts).q_starts is starts


@int_types
def test_fill_with_spans(dtype):
    batch = Batch.allocate(1, 1, 4, dtype=dtype, spans=True)
    assert batch.spans.tolist() == [[0, 0]] * 4 and batch.spans.dtype is dtype
    memory = batch.spans.data_ptr()
    batch.fill(ints([3]), ints(2), ints(0, 2), spans=ints([0, 1], [0, 2], [5, 2**40], dtype=torch.int64))
    most = torch.iinfo(dtype).max
    assert batch.spans.tolist() == [[0, 1], [0, 2], [5, min(2**40, most)], [0, 0]]
    batch.fill(ints([3]), ints(3), ints(0, 1), spans=ints([1, 2]))
    assert (batch.spans.tolist(), batch.spans.data_ptr()) == ([[1, 2], [0, 0], [0, 0], [0, 0]], memory)
    assert batch.with_spans(None).page_table is batch.page_table and batch.with_spans(None).spans is None


def test_with_spans_shares_everything_else():
    batch = make(max_q_len=2, copies=((1, 2),), page_size=4)
    spans = ints([0, 2], [1, 2], [0, 0])
    other = batch.with_spans(spans)
    assert other.spans is spans and batch.spans is None and other.with_spans(None).spans is None
    for name in ("page_table", "kv_lens", "q_starts", "copies", "page_size", "max_q_len", "pool_state", "step_id"):
        assert getattr(other, name) is getattr(batch, name)
    assert "spans=int32[3, 2]" in repr(other)
    for copy in (other.clone(), pickle.loads(pickle.dumps(other)), other.to("meta")):
        assert copy.spans.shape == (3, 2) and copy.spans.dtype is torch.int32
    assert other.clone().spans.data_ptr() != spans.data_ptr() and other.clone().spans.tolist() == spans.tolist()


def test_a_batch_with_spans_is_stale_with_its_pool():
    pool = PagePool(4, 4)
    batch = pool.step({pool.sequence(): 3}).with_spans(ints([0, 1], [0, 2], [0, 3]))
    batch.check_current()
    pool.step({pool.sequence(): 1})
    with pytest.raises(StaleBatch):
        batch.check_current()


def flashinfer(**changed):
    given = {"kv_indptr": ints(0, 1, 3), "kv_indices": ints(7, 8, 9), "kv_last_page_len": ints(4, 1), "page_size": 16}
    return lambda: Batch.from_flashinfer(**{**given, **changed})


def flash_attn(**given):
    return lambda: Batch.from_flash_attn(block_table=ints([0, 1]), **given)


def fill(*given, **slots):
    return lambda: Batch.allocate(2, 2, 3).fill(*given, **slots)


INDEX = "a tensor of int32 or int64"
HINT = "an int of 0 or more, known on the host, or None"
ONE = "exactly one of them"
RISING = "0 first, never falling, at most 3 (kv_indices)"

REFUSED = {
    "list": (lambda: make(page_table=[[0]]), f"page_table: given [[0]]; allowed: {INDEX}"),
    "no-lens": (lambda: make(kv_lens=None), f"kv_lens: given nothing (None); allowed: {INDEX}"),
    "number": (lambda: make(q_starts=3), f"q_starts: given 3; allowed: {INDEX}"),
    "slots": (lambda: make(slots=[1]), f"slots: given [1]; allowed: {INDEX}"),
    "spans": (lambda: make(spans=[[0, 1]]), f"spans: given [[0, 1]]; allowed: {INDEX}"),
    "with-spans": (lambda: make().with_spans(7), f"spans: given 7; allowed: {INDEX}"),
    "fill-spans-missing": (
        lambda: Batch.allocate(1, 1, 3, spans=True).fill(ints([0]), ints(1), ints(0, 1)),
        "spans: given nothing (None); allowed: a tensor [tokens, 2]: it has spans",
    ),
    "fill-spans-unasked": (
        fill(ints([0]), ints(1), ints(0, 1), spans=ints([0, 1])),
        "spans: given int32[1, 2] on cpu; allowed: None: the batch was allocated without spans",
    ),
    "fill-spans-shape": (
        lambda: Batch.allocate(1, 1, 3, spans=True).fill(ints([0]), ints(1), ints(0, 1), spans=ints(0, 1)),
        "spans: given int32[2] on cpu; allowed: int32 or int64 [tokens, 2] of at most 3 tokens, as allocated",
    ),
    "fill-of-shared-buffers": (
        lambda: Batch.allocate(1, 1, 3).with_spans(ints([0, 1])).fill(ints([0]), ints(1), ints(0, 1), spans=ints([0, 1])),
        "fill: given a batch that aliases the caller's tensors; allowed: a batch made by Batch.allocate",
    ),
    "hint-negative": (lambda: make(max_q_len=-1), f"max_q_len: given -1; allowed: {HINT}"),
    "hint-on-device": (lambda: make(max_kv_len=torch.tensor(3)), f"max_kv_len: given int64[] on cpu; allowed: {HINT}"),
    "allocate-size": (lambda: Batch.allocate(-1, 1, 1), "seqs: given -1; allowed: an int of 0 or more"),
    "allocate-dtype": (
        lambda: Batch.allocate(1, 1, 1, dtype=torch.int16),
        "dtype: given torch.int16; allowed: torch.int32 or torch.int64",
    ),
    "fill-alias": (
        lambda: make().fill(ints([0]), ints(1), ints(0, 1)),
        "fill: given a batch that aliases the caller's tensors; allowed: a batch made by Batch.allocate",
    ),
    "fill-shapes": (
        fill(ints([0]), ints(1), ints(1)),
        "fill: given page_table [1, 1], kv_lens [1], q_starts [1]; "
        "allowed: page_table [seqs, pages_per_seq], kv_lens [seqs], q_starts [seqs + 1]",
    ),
    "fill-seqs": (fill(ints([0], [1], [2]), ints(1, 1, 1), ints(0, 1, 2, 3)), "seqs: given 3; allowed: at most 2, as allocated"),
    "fill-width": (fill(ints([0, 1, 2]), ints(1), ints(0, 1)), "pages_per_seq: given 3; allowed: at most 2, as allocated"),
    "fill-tokens": (
        fill(ints([0]), ints(1), ints(0, 1), slots=ints(0, 1, 2, 3)),
        "tokens: given 4; allowed: at most 3, as allocated",
    ),
    "fill-float-table": (
        fill(torch.zeros(1, 1), ints(1), ints(0, 1)),
        f"page_table: given float32[1, 1] on cpu; allowed: {INDEX}",
    ),
    "fill-short-lens": (
        fill(ints([0]), ints(1, dtype=torch.int16), ints(0, 1)),
        f"kv_lens: given int16[1] on cpu; allowed: {INDEX}",
    ),
    "fill-byte-slots": (
        fill(ints([0]), ints(1), ints(0, 1), slots=ints(1, dtype=torch.uint8)),
        f"slots: given uint8[1] on cpu; allowed: {INDEX}",
    ),
    "flash-no-lens": (
        flash_attn(seqlen_q=1),
        f"seqused_k: given both or neither of seqused_k and cache_seqlens; allowed: {ONE}",
    ),
    "flash-two-lens": (
        flash_attn(seqlen_q=1, seqused_k=ints(1), cache_seqlens=ints(1), appends=True),
        f"seqused_k: given both or neither of seqused_k and cache_seqlens; allowed: {ONE}",
    ),
    "flash-two-starts": (
        flash_attn(seqlen_q=1, cu_seqlens_q=ints(0, 1), seqused_k=ints(1)),
        f"cu_seqlens_q: given both or neither of cu_seqlens_q and seqlen_q; allowed: {ONE}",
    ),
    "flash-appends-unsaid": (
        flash_attn(seqlen_q=1, cache_seqlens=ints(1)),
        "appends: given nothing (None); allowed: True or False with cache_seqlens, None with seqused_k",
    ),
    "flash-appends-said": (
        flash_attn(seqlen_q=1, seqused_k=ints(1), appends=False),
        "appends: given False; allowed: True or False with cache_seqlens, None with seqused_k",
    ),
    "csr-type": (flashinfer(kv_indices=torch.zeros(3)), f"kv_indices: given float32[3] on cpu; allowed: {INDEX}"),
    "csr-length": (
        flashinfer(kv_indptr=ints(0, 1)),
        "kv_indptr: given int32[2] on cpu; allowed: [3]: one more than kv_last_page_len",
    ),
    "csr-falling": (flashinfer(kv_indptr=ints(0, 2, 1)), f"kv_indptr: given [0, 2, 1]; allowed: {RISING}"),
    "csr-start": (flashinfer(kv_indptr=ints(1, 2, 3)), f"kv_indptr: given [1, 2, 3]; allowed: {RISING}"),
    "csr-end": (flashinfer(kv_indptr=ints(0, 1, 4)), f"kv_indptr: given [0, 1, 4]; allowed: {RISING}"),
}


@pytest.mark.parametrize(("act", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(act, message):
    with pytest.raises(ArgumentError) as caught:
        act()
    assert str(caught.value) == message


def test_a_refused_fill_changes_nothing():
    batch = Batch.allocate(2, 2, 3).fill(ints([4, 5]), ints(7), ints(0, 2))
    for table, starts in ((ints([0, 1, 2]), ints(0, 1)), (ints([0]), ints(1)), (torch.zeros(1, 1), ints(0, 1))):
        with pytest.raises(ArgumentError):
            batch.fill(table, ints(1), starts)
    assert (batch.page_table.tolist(), batch.kv_lens.tolist(), batch.q_starts.tolist()) == ([[4, 5], [-1, -1]], [7, 0], [0, 2, 2])
