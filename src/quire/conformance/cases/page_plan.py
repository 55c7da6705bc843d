"""Which pages a case has, which sequence owns which, and its page table."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from quire.conformance.cases.case import Case

FAR = {"far": 2**31, "very-far": 2**32}
"""The address of the first page in use, in elements."""
HIGH = 2**16
"""The first page id that does not fit into 16 bits."""


def generator(case: Case, *purpose: object) -> torch.Generator:
    """A generator for one purpose: its numbers do not depend on other purposes or other fields of the case."""
    return torch.Generator().manual_seed(zlib.crc32(f"{case.code} {purpose}".encode()))


def kept_positions(case: Case, kv_len: int) -> torch.Tensor:
    """The positions of a sequence whose keys are in the cache, in order: the n-th of them is the n-th key of its pages."""
    rank, ranks, interleave = case.shard
    positions = torch.arange(max(kv_len, 0))
    return positions if ranks == 1 else positions[positions // interleave % ranks == rank]


@dataclass
class PagePlan:
    """The pages of a case."""

    pages: int
    """How many there are."""
    owned: list[list[int]]
    """The pages of each sequence in order."""
    leader: int
    """The sequence whose first pages others share."""
    shared: list[int]
    """How many of the leader's pages each sequence begins with; 0 for the leader itself."""
    touched: torch.Tensor
    """Ids of the pages with contents. Negative ids are pages before page 0 in the same memory, where wrapped addresses end up."""
    spare: list[int]
    """Pages of no sequence. Entries of the page table that must not be read contain their ids."""
    before: int = 0
    """Elements before page 0 in the same memory."""
    sparse: bool = False
    """Whether most pages have no contents."""


def page_plan(case: Case) -> PagePlan:
    """Assigns pages to every sequence."""
    contexts = [kept_positions(case, kv_len - q_len).numel() // case.page_size for q_len, kv_len in zip(case.q_lens, case.kv_lens)]
    columns = [-(-kept_positions(case, kv_len).numel() // case.page_size) for kv_len in case.kv_lens]
    leader, shared = 0, [0] * case.seqs
    if case.table in ("shared", "partly"):
        leader = contexts.index(max(contexts))
        shared = [0 if i == leader else max(min(pages, contexts[leader]), 0) for i, pages in enumerate(contexts)]
    if case.table == "partly":
        # Every second sequence has pages of its own only.
        shared = [pages if i % 2 else 0 for i, pages in enumerate(shared)]
    need = sum(columns) - sum(shared)
    plan = _sparse(case, need) if case.table in FAR or case.table == "high" else _compact(case, need)
    ids = iter(plan.owned.pop())
    own = [[next(ids) for _ in range(n - skip)] for n, skip in zip(columns, shared)]
    plan.leader, plan.shared = leader, shared
    plan.owned = [own[leader][:skip] + rest for skip, rest in zip(shared, own)]
    return plan


def prefixes_of(case: Case, plan: PagePlan) -> tuple[tuple[tuple[int, ...], int, int], ...] | None:
    """The sequences that share pages, and the columns, if the call says so: first the columns that most of them share."""
    if not case.prefixes:
        return None
    ends = sorted({pages for pages in plan.shared if pages})
    members = [tuple(i for i, n in enumerate(plan.shared) if n >= end or i == plan.leader) for end in ends]
    return tuple(zip(members, (0, *ends), ends))


def _compact(case: Case, need: int) -> PagePlan:
    """As many pages as are needed, and four of no sequence."""
    pages = need + 4
    ids = list(range(pages)) if case.table == "identity" else _shuffled(case, pages)
    # The last page belongs to no sequence: a kernel that reads id -1 as the last page finds poison.
    ids.remove(pages - 1)
    return PagePlan(pages, [ids[:need]], 0, [], torch.arange(pages), [pages - 1, *ids[need:]])


def _sparse(case: Case, need: int) -> PagePlan:
    """Pages at the end of a large cache. Only they, and the pages where a wrapped id or address ends up, have contents."""
    element = case.page_size * case.kv_heads * max(case.dims.values())
    far = FAR.get(case.table)
    first = HIGH if far is None else far // element
    ids = [first + 2 + 3 * i for i in _shuffled(case, need)]
    # Some low pages too, so that a wrapped id finds the page of another sequence.
    ids[1::4] = [7 + 3 * i for i in range(len(ids[1::4]))]
    if far is None:
        # And some that fit into 16 bits but not into 15.
        ids[2::4] = [HIGH // 2 + 7 + 3 * i for i in range(len(ids[2::4]))]
    pages = first + 3 * need + 8
    around = {page + n for page in ids for n in (-2, -1, 0, 1, 2)}
    around |= {page % HIGH for page in ids} | {page % (HIGH // 2) for page in ids} | set(range(4))
    before = 0
    if far is not None:
        before = 2**31 if case.table == "far" else 0
        around |= {page - 2**32 // element for page in around}
    touched = torch.tensor(sorted(page for page in around if -(before // element) <= page < pages), dtype=torch.long)
    return PagePlan(pages, [ids], 0, [], touched, [page for page in (0, 1) if page not in ids], before, sparse=True)


def _shuffled(case: Case, count: int) -> list[int]:
    order: list[int] = torch.randperm(count, generator=generator(case, "pages")).tolist()
    return order


def page_table(case: Case, plan: PagePlan, cached: list[torch.Tensor]) -> torch.Tensor:
    """The page table, [seqs, columns]. Entries of pages that must not be read are filled like those after the end."""
    size = case.page_size
    read = [
        [bool(seen[column * size : (column + 1) * size].any()) for column in range(len(pages))]
        for seen, pages in zip((of_positions[kept_positions(case, len(of_positions))] for of_positions in cached), plan.owned)
    ]
    if case.tail == "none":
        width = max((column + 1 for columns in read for column, needed in enumerate(columns) if needed), default=0)
    else:
        width = max(map(len, plan.owned), default=0) + 2
    table = torch.full((case.seqs, width), -1 if case.tail == "-1" else plan.spare[0])
    if case.tail != "-1" and len(plan.spare) > 1:
        table[:, 1::2] = plan.spare[1]
    for i, (columns, pages) in enumerate(zip(read, plan.owned)):
        for column, needed in enumerate(columns):
            if needed:
                table[i, column] = pages[column]
    return table
