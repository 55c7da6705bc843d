"""The batch of vLLM's `test_contexted_kv_attention` (tests/kernels/attention/test_prefix_prefill.py, November 2025).

Ten sequences from `random.seed(0)`, 64 heads of 128, pages of 32 tokens; queries, keys and values lie between -0.001 and 0.001.
Nine sequences prefill, the last one decodes. Lengths, sizes and tolerance are the test's. The values are drawn here, because the
random generator of a GPU cannot be reproduced on a CPU.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

import quire

SEQS, PAGES, PAGE_SIZE, PAGES_PER_SEQ = 10, 640, 32, 64
HEADS, HEAD_DIM = 64, 128
SHORTEST, LONGEST = 16, 1024
"""The range of lengths that the test draws, for new tokens and for context."""
MAX_VALUE = 1e-3
"""Every value of the test lies between this and its negative."""
TOLERANCE = 1e-4
"""The test's absolute tolerance; it has no relative one."""
DECODE = SEQS - 1
"""The sequence that decodes: the last one."""


@dataclass(frozen=True)
class TestBatch:
    """q [tokens, heads, head_dim], for each sequence k and v [kv_len, heads, head_dim], and the page table."""

    __test__ = False  # pytest would take the class for a test

    q_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    q: torch.Tensor = field(repr=False)
    k: tuple[torch.Tensor, ...] = field(repr=False)
    v: tuple[torch.Tensor, ...] = field(repr=False)
    page_table: torch.Tensor = field(repr=False)

    @classmethod
    def draw(cls) -> TestBatch:
        """The test's lengths and sizes, from its seed."""
        lengths = random.Random(0)
        q_lens = [lengths.randint(SHORTEST, LONGEST) for _ in range(SEQS)]
        q_lens[-1] = 1
        contexts = [lengths.randint(SHORTEST, LONGEST) for _ in range(SEQS)]
        generator = torch.Generator().manual_seed(0)

        def values(tokens: int) -> torch.Tensor:
            empty = torch.empty(tokens, HEADS, HEAD_DIM, dtype=torch.float16)
            return empty.uniform_(-MAX_VALUE, MAX_VALUE, generator=generator)

        q = values(sum(q_lens))
        k, v = (tuple(values(a + b) for a, b in zip(q_lens, contexts)) for _ in range(2))
        table = torch.randperm(PAGES, generator=generator).view(SEQS, PAGES_PER_SEQ)
        return cls(tuple(q_lens), tuple(contexts), q, k, v, table)

    @property
    def kv_lens(self) -> list[int]:
        return [a + b for a, b in zip(self.q_lens, self.contexts)]

    @property
    def decode_row(self) -> int:
        """The row of q and out that belongs to the decoding sequence."""
        return sum(self.q_lens) - 1

    def q_starts(self, dtype: torch.dtype) -> torch.Tensor:
        """As the test computes them: torch.cumsum promotes int32 to int64."""
        return torch.cumsum(torch.tensor([0, *self.q_lens], dtype=dtype), dim=0)

    def rows_of(self, seq: int) -> slice:
        """The rows of q and out that belong to a sequence."""
        start = sum(self.q_lens[:seq])
        return slice(start, start + self.q_lens[seq])

    @cached_property
    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache, K and V [pages, page_size, heads, head_dim]: zeros, then every token except the one that decodes.

        The test leaves out the new tokens of the prefilling sequences too. Its prefill kernel takes them as separate arguments and
        does not read those slots; with the tokens in place, one form of call serves all sequences here."""
        k, v = (torch.zeros(PAGES, PAGE_SIZE, HEADS, HEAD_DIM, dtype=torch.float16) for _ in range(2))
        for seq in range(SEQS):
            self._fill_pages(k, v, seq)
        return k, v

    def _fill_pages(self, k: torch.Tensor, v: torch.Tensor, seq: int) -> None:
        """Writes the tokens of a sequence into its pages."""
        count = self.kv_lens[seq] - (seq == DECODE)
        slots = (self.page_table[seq, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[:count]
        k.flatten(0, 1)[slots], v.flatten(0, 1)[slots] = self.k[seq][:count], self.v[seq][:count]

    @cached_property
    def prefill(self) -> torch.Tensor:
        """The output rows of the nine prefilling sequences, computed by `quire.attend`."""
        starts = self.q_starts(torch.int32)[: DECODE + 1]
        batch = quire.Batch(self.page_table[:DECODE], torch.tensor(self.kv_lens[:DECODE]), starts)
        return quire.attend(self.q[: self.decode_row], quire.KVCache.wrap(*self.pages, layout="nhd"), batch)

    @cached_property
    def expected(self) -> torch.Tensor:
        """The correct output: torch's attention over dense keys and values, one sequence at a time, in fp32."""
        out = torch.zeros_like(self.q)
        for seq in range(SEQS):
            out[self.rows_of(seq)] = self.dense(seq, self.k[seq], self.v[seq]).half()
        return out

    def dense(self, seq: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of one sequence over these keys and values, its new tokens last; fp32."""
        q = self.q[self.rows_of(seq)]
        visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)[0].transpose(0, 1)

    def with_ordinary_values(self) -> TestBatch:
        """The same batch, but the decoding sequence holds values of ordinary size, and its new token attends to its own key."""
        generator = torch.Generator().manual_seed(1)
        q = self.q.clone()
        k, v = (torch.randn(self.k[DECODE].shape, generator=generator).half() for _ in range(2))
        q[self.decode_row] = k[-1]
        v[-1] += v[-1].sign() * 0.5  # every element is large enough for its absence to be visible
        other = replace(self, q=q, k=(*self.k[:DECODE], k), v=(*self.v[:DECODE], v))
        # The other nine sequences are unchanged, so their results are reused.
        pages, expected = (self.pages[0].clone(), self.pages[1].clone()), self.expected.clone()
        other._fill_pages(*pages, DECODE)
        expected[self.decode_row] = other.dense(DECODE, k, v)[0].half()
        other.__dict__.update(pages=pages, prefill=self.prefill, expected=expected)
        return other


def memory_before_the_call(batch: TestBatch) -> torch.Tensor:
    """What the memory of the output held before the call on the machine where the test failed: in the row that no kernel wrote,
    values of ordinary size, the first of them 1.6855."""
    row = batch.decode_row
    memory = torch.zeros_like(batch.q)
    memory[row] = torch.randn(HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(2)).clamp(-1.6, 1.6).half()
    memory[row] += memory[row].sign().where(memory[row] != 0, 1) * 0.01  # no element is zero, which would look correct
    memory[row, 0, 0] = 1.685546875
    return memory


def mismatched(out: torch.Tensor, expected: torch.Tensor) -> int:
    """How many elements the test reports as wrong."""
    return int((~torch.isclose(out.float(), expected.float(), atol=TOLERANCE, rtol=0)).sum())
