"""The batch that the story is about, and a stand-in for the kernel that failed on it.

A test of vLLM's mixed-batch operator: ten sequences from `random.seed(0)`, 64 heads of 128, pages of 32, queries, keys and values
between -0.001 and 0.001. Nine prefill, the last one decodes. Lengths, sizes and tolerance are the test's; the values are drawn
here, since the generator of a GPU cannot be replayed on a CPU.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from quire.attend import attend
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.conformance.call import Call as KitCall
from quire.conformance.case import Case
from quire.conformance.plant import compute
from quire.conformance.target import Target

SEQS, PAGES, PAGE_SIZE, PAGES_PER_SEQ = 10, 640, 32, 64
HEADS, HEAD_DIM = 64, 128
LEAST, MOST = 16, 1024
"""The lengths that the test draws, of new tokens and of context."""
SMALL = 1e-3
"""Every number of the test lies between this and its negative."""
TOLERANCE = 1e-4
"""The test's, absolute; it has no relative one."""
PARTITION = 256
"""Keys that one workgroup of the ROCm kernel takes."""
DECODE = SEQS - 1
"""The sequence that decodes: the last."""


@dataclass(frozen=True)
class Seeds:
    """The batch: q [tokens, heads, head_dim], of each sequence k and v [kv_len, heads, head_dim], and where they are paged."""

    q_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    q: torch.Tensor = field(repr=False)
    k: tuple[torch.Tensor, ...] = field(repr=False)
    v: tuple[torch.Tensor, ...] = field(repr=False)
    page_table: torch.Tensor = field(repr=False)

    @classmethod
    def draw(cls) -> Seeds:
        """The test's lengths and sizes, from its seed."""
        lengths = random.Random(0)
        q_lens = [lengths.randint(LEAST, MOST) for _ in range(SEQS)]
        q_lens[-1] = 1
        contexts = [lengths.randint(LEAST, MOST) for _ in range(SEQS)]
        dice = torch.Generator().manual_seed(0)

        def numbers(tokens: int) -> torch.Tensor:
            return torch.empty(tokens, HEADS, HEAD_DIM, dtype=torch.float16).uniform_(-SMALL, SMALL, generator=dice)

        q = numbers(sum(q_lens))
        k, v = (tuple(numbers(a + b) for a, b in zip(q_lens, contexts)) for _ in range(2))
        table = torch.randperm(PAGES, generator=dice).view(SEQS, PAGES_PER_SEQ)
        return cls(tuple(q_lens), tuple(contexts), q, k, v, table)

    @property
    def kv_lens(self) -> list[int]:
        return [a + b for a, b in zip(self.q_lens, self.contexts)]

    @property
    def row(self) -> int:
        """The row of q that decodes."""
        return sum(self.q_lens) - 1

    def q_starts(self, dtype: torch.dtype) -> torch.Tensor:
        """As the test makes them: torch.cumsum turns int32 into int64."""
        return torch.cumsum(torch.tensor([0, *self.q_lens], dtype=dtype), dim=0)

    def rows_of(self, seq: int) -> slice:
        """Where a sequence's new tokens lie in q and out."""
        start = sum(self.q_lens[:seq])
        return slice(start, start + self.q_lens[seq])

    @cached_property
    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache of the test, K and V [pages, page_size, heads, head_dim]: zeros, then every token, except the one that decodes.

        The test leaves out the new tokens of the other sequences as well. Their kernel takes those beside the cache and does not
        look at these slots; with them in place one form of a call serves all."""
        k, v = (torch.zeros(PAGES, PAGE_SIZE, HEADS, HEAD_DIM, dtype=torch.float16) for _ in range(2))
        for seq in range(SEQS):
            self._page(k, v, seq)
        return k, v

    def _page(self, k: torch.Tensor, v: torch.Tensor, seq: int) -> None:
        """Puts the tokens of a sequence into pages, by the table."""
        count = self.kv_lens[seq] - (seq == DECODE)
        slots = (self.page_table[seq, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[:count]
        k.flatten(0, 1)[slots], v.flatten(0, 1)[slots] = self.k[seq][:count], self.v[seq][:count]

    @cached_property
    def prefill(self) -> torch.Tensor:
        """The rows of the nine that prefill, by `quire.attend`: no explanation touches them."""
        batch = Batch(self.page_table[:DECODE], torch.tensor(self.kv_lens[:DECODE]), self.q_starts(torch.int32)[: DECODE + 1])
        return attend(self.q[: self.row], KVCache.wrap(*self.pages, layout="nhd"), batch)

    @cached_property
    def expected(self) -> torch.Tensor:
        """The right answer, by torch's own attention over dense keys and values, sequence by sequence, in fp32."""
        out = torch.zeros_like(self.q)
        for seq in range(SEQS):
            out[self.rows_of(seq)] = self.dense(seq, self.k[seq], self.v[seq]).half()
        return out

    def dense(self, seq: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """One sequence over these keys and values, its new tokens last, fp32."""
        q = self.q[self.rows_of(seq)]
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)[0].transpose(0, 1)

    def looking_at_itself(self) -> Seeds:
        """The same batch, but the sequence that decodes holds numbers of ordinary size, and its new token looks at its own key."""
        dice = torch.Generator().manual_seed(1)
        q = self.q.clone()
        k, v = (torch.randn(self.k[DECODE].shape, generator=dice).half() for _ in range(2))
        q[self.row] = k[-1]
        v[-1] += v[-1].sign() * 0.5  # no element of it so small that it would not be missed
        other = replace(self, q=q, k=(*self.k[:DECODE], k), v=(*self.v[:DECODE], v))
        # Nine sequences are as they were: what was found for them is not found again.
        pages, expected = (self.pages[0].clone(), self.pages[1].clone()), self.expected.clone()
        other._page(*pages, DECODE)
        expected[self.row] = other.dense(DECODE, k, v)[0].half()
        other.__dict__.update(pages=pages, prefill=self.prefill, expected=expected)
        return other


@dataclass(frozen=True)
class Call:
    """How the operator is called: what documents propose to change, and what another fault would change. As it stands, the call
    of the test after its indices were made int32."""

    token_in_cache: bool = False
    """Whether the token that decodes is in the cache."""
    starts: torch.Tensor | None = None
    """`q_starts`, if not the test's."""
    index: torch.dtype = torch.int32
    """The type of the page table and of the lengths."""
    kv_cache_dtype: str = "auto"
    length: str = "kv_lens"
    """What the decode kernel takes for the length of a row; 'contexts' is a proposal."""
    reads_own_type: bool = False
    """Whether the kernel reads `q_starts` in its own type."""
    rows: int = SEQS
    """How many rows the kernel is launched for."""


def operator(batch: Seeds, call: Call, held: torch.Tensor) -> torch.Tensor:
    """The mixed-batch operator: two kernels for one output, a row going to the one that its length asks for. `held` is what the
    memory of the output holds when it comes from the allocator."""
    out = held.clone()
    out[: batch.row] = batch.prefill
    k, v = batch.pages
    starts = batch.q_starts(torch.int32) if call.starts is None else call.starts
    lens = torch.tensor(batch.kv_lens if call.length == "kv_lens" else batch.contexts, dtype=call.index)
    at = batch.contexts[DECODE]
    slot = batch.page_table[DECODE, at // PAGE_SIZE], at % PAGE_SIZE
    if call.token_in_cache:
        k[slot], v[slot] = batch.k[DECODE][-1], batch.v[DECODE][-1]
    try:
        rocm_decode(out, batch.q, k, v, batch.page_table.to(call.index), lens, starts, call)
    finally:
        k[slot] = v[slot] = 0.0
    return out


def rocm_decode(
    out: torch.Tensor,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    q_starts: torch.Tensor,
    call: Call,
) -> None:
    """What vLLM's `paged_attention_rocm` does with its arguments, its arithmetic included: partitions of 256 keys whose weights and
    partial results are rounded to 16 bits. Rows of other than one new token are the other kernel's, and are left alone."""
    if call.kv_cache_dtype not in ("auto", "fp8", "fp8_e4m3"):
        raise RuntimeError(f"Unsupported KV cache dtype: {call.kv_cache_dtype}")
    # These two pointers are asked for by type...
    for index in (page_table, kv_lens):
        if index.dtype is not torch.int32:
            raise RuntimeError("expected scalar type Int but found Long")
    # ...this one is not: its bytes are taken for int32, whatever they are.
    starts = q_starts if call.reads_own_type else q_starts.view(torch.int32)
    for seq in range(call.rows):
        start, end = int(starts[seq]), int(starts[seq + 1])
        if end - start == 1:
            out[start] = partitioned(q[start], k_pages, v_pages, page_table[seq], int(kv_lens[seq]))


def partitioned(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, cells: torch.Tensor, length: int) -> torch.Tensor:
    """One query [heads, head_dim] over the first `length` slots of a row of the table."""
    ids = cells[: -(-length // PAGE_SIZE)].long()
    k, v = (pages[ids].flatten(0, 1)[:length].float() for pages in (k_pages, v_pages))
    logits = torch.einsum("hd,khd->hk", q.float(), k) * HEAD_DIM**-0.5
    parts = []
    for some, x in zip(logits.split(PARTITION, 1), v.split(PARTITION)):
        most = some.amax(1, keepdim=True)
        weights = (some - most).exp()
        total = weights.sum(1, keepdim=True)
        rounded = (weights / (total + 1e-6)).half().float()
        parts.append((most, total, torch.einsum("hk,khd->hd", rounded, x).half().float()))
    top = torch.stack([most for most, _, _ in parts]).amax(0)
    shares = [total * (most - top).exp() for most, total, _ in parts]
    return (sum(share * x for share, (_, _, x) in zip(shares, parts)) / (sum(shares) + 1e-6)).half()


def leftover(batch: Seeds) -> torch.Tensor:
    """Memory as the test's machine gave it: the row that nobody wrote held numbers of ordinary size, 1.6855 in front."""
    held = torch.zeros_like(batch.q)
    held[batch.row] = torch.randn(HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(2)).clamp(-1.6, 1.6).half()
    held[batch.row] += held[batch.row].sign().where(held[batch.row] != 0, 1) * 0.01  # and nowhere zero, which would look right
    held[batch.row, 0, 0] = 1.685546875
    return held


SMALLER = Case(
    "seeds-smaller",
    q_lens=(55, 26, 50, 58, 28, 4, 18, 63, 34, 1),
    kv_lens=(82, 86, 101, 112, 48, 67, 49, 87, 72, 58),
    kv_heads=2,
    group=1,
    page_size=PAGE_SIZE,
    index=("int32", "int32", "int64"),
)
"""The batch, a sixteenth as long, with numbers of the kit's own: enough to have its kernel diagnosed by it."""


def suspect(name: str, *, reads_own_type: bool = False, leaves_out: int = 0) -> Target:
    """The operator as a target of the kit: rows of more than one new token are right, the others come from a kernel that may read
    q_starts as the one of the story does, or may be launched for too few rows."""

    def run(call: KitCall) -> None:
        scratch = replace(call, out=call.out.clone(), seals={}, memo={})
        compute(scratch)
        starts = call.q_starts
        read = starts if reads_own_type or starts.dtype is torch.int32 else starts.view(torch.int32)
        rows = [(int(starts[i]), int(starts[i + 1])) for i in range(call.seqs) if starts[i + 1] - starts[i] > 1]
        rows += [(int(read[i]), int(read[i]) + 1) for i in range(call.seqs - leaves_out) if read[i + 1] - read[i] == 1]
        for first, end in rows:
            call.out[first:end] = scratch.out[first:end]

    return Target(name, run)
