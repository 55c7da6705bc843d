"""The ledger's check kernel: it counts every required token that is not in its slot, keeps the first, and reports nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import Batch, KVCache, Options, PagePool, Select
from quire.cache.ledger import LedgerFinding
from quire.contract.call import Call
from quire.kernels.triton.host.audit import AuditLauncher
from quire.kernels.triton.host.program import as_bytes
from quire.kernels.triton.host.tuning import AUDIT, SMALLEST, WorkPerProgram
from quire.problem import ANY, Extent
from support.launched import audit, audit_launcher

PAGE_SIZE = 4
Q_LENS, KV_LENS = [1, 6, 0, 3], [30, 6, 9, 17]
INT32, INT64 = torch.int32, torch.int64


class Setting:
    """A batch whose pages are in random order, and a cache whose ledger holds every one of its tokens."""

    def __init__(
        self,
        device: str,
        q_lens: list[int] = Q_LENS,
        kv_lens: list[int] = KV_LENS,
        index: torch.dtype = INT32,
        page_size: int = PAGE_SIZE,
        width: int | None = None,
        pages: int = 40,
        new: bool = False,
        select: Select | None = None,
        heads: int = 1,
        **options: Any,
    ):
        columns = [-(-n // page_size) for n in kv_lens]
        ids = torch.randperm(pages, generator=torch.Generator().manual_seed(5)).tolist()
        table = torch.full((len(kv_lens), width or max(columns) + 2), -1)
        for row, count in enumerate(columns):
            table[row, :count] = torch.tensor([ids.pop() for _ in range(count)])
        starts = torch.tensor([0, *q_lens]).cumsum(0)
        tokens = sum(q_lens)
        self.device, self.page_size = device, page_size
        self.cache = cache_of(device, pages, page_size, heads=heads)
        self.batch = Batch(table.to(device, index), torch.tensor(kv_lens, dtype=index, device=device), starts.to(device, index))
        self.batch = self.batch.with_select(select)
        self.q = torch.zeros(tokens, heads, 16, device=device)
        self.new = (self.q, self.q) if new else None
        self.options = Options(**options)
        for row, kv_len in enumerate(kv_lens):
            self.note(row, range(kv_len))

    @property
    def ledger(self) -> Any:
        return self.cache.ledger

    def slot(self, row: int, position: int) -> int:
        return int(self.batch.page_table[row, position // self.page_size]) * self.page_size + position % self.page_size

    def note(self, row: int, positions: range, held: int | None = None) -> None:
        """Lets the ledger say that a row's tokens were written, as those of their own positions or of another."""
        slots = torch.tensor([self.slot(row, p) for p in positions], dtype=INT64, device=self.device)
        says = torch.tensor([p if held is None else held for p in positions], dtype=INT64, device=self.device)
        self.ledger.record(slots, says)

    def forget(self, row: int, *positions: int) -> None:
        for position in positions:
            self.note(row, range(position, position + 1), held=-1)

    def prepared(
        self, *, context_from: int = 1, only: tuple[int, int] = (0, ANY), work: WorkPerProgram = AUDIT
    ) -> tuple[Call, AuditLauncher]:
        call = Call(self.cache, self.batch, self.q, self.options, self.new, context_from=context_from, only=only)
        return call, audit_launcher(call, work)

    def launch(self, **how: Any) -> Any:
        """One check; what the ledger reports."""
        call, launcher = self.prepared(**how)
        launcher(call)
        return self.ledger.report()

    def finding(self, row: int, position: int, reason: str) -> LedgerFinding:
        slot = self.slot(row, position)
        return LedgerFinding(row, position, slot, *divmod(slot, self.page_size), reason)


def cache_of(device: str, pages: int, page_size: int, pool: PagePool | None = None, heads: int = 1) -> KVCache:
    k = torch.zeros(pages, page_size, heads, 16, device=device)
    return KVCache.wrap(k, torch.zeros_like(k), layout="nhd", pool=pool, ledger=True)


def needed(s: Setting) -> set[tuple[int, int]]:
    """What the contract says that the call takes from the cache."""
    rows, positions = Call(s.cache, s.batch, s.q, s.options, s.new).needed
    return set(zip(rows.tolist(), positions.tolist()))


def tree(q_lens: list[int], positions: list[int] | None = None, **options: Any) -> dict[str, Any]:
    """Options with a mask in which every new token sees all of its row's."""
    mask = torch.ones(sum(q_lens), max(q_lens), dtype=torch.bool)
    return {"mask": mask, "positions": None if positions is None else torch.tensor(positions), **options}


def on(device: str, options: dict[str, Any]) -> dict[str, Any]:
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    if isinstance(select := options.get("select"), Select):
        moved["select"] = Select(**{select.kind: select.entries.to(device)})  # type: ignore[arg-type]
    return moved


@pytest.mark.parametrize("index", [INT32, INT64], ids=str)
@pytest.mark.parametrize("new", [False, True], ids=["full", "context"])
def test_a_correct_batch_has_no_violations(index: torch.dtype, new: bool, device: str) -> None:
    s = Setting(device, index=index, new=new)
    assert s.launch() is None
    assert s.ledger.violations.tolist() == [0] * 9


COLUMNS = torch.tensor([[[7, 0, -1, 3]], [[1, -1, -1, 0]], [[-1, -1, -1, 2]], [[4, 2, -1, -1]]], dtype=INT32)
"""Pages of each sequence, which select its keys."""
POSITIONS = torch.tensor(
    [[29, 3, -1], *([0, -1, min(row + 2, 5)] for row in range(6)), [14, 16, 2], [-1, 15, 16], [0, 6, -1]], dtype=INT32
)[:, None]
"""Keys of each new token, some of which no token sees."""
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "full-int64": {"index": INT64},
    "context": {"new": True},
    "window": {"window": 5},
    "window-one-key": {"window": 1},
    "window-far": {"window": 2**62},
    "window-context": {"window": (7, None), "new": True},
    "window-not-causal": {"window": (3, 2), "causal": False},
    "not-causal": {"causal": False, "q_lens": [1, 9, 0, 3]},
    "one-column": {"width": 1, "page_size": 32},
    "many-stretches": {"q_lens": [2, 1], "kv_lens": [2100, 1023], "page_size": 7, "pages": 460},
    "columns": {"select": Select(columns=COLUMNS)},
    "columns-window": {"select": Select(columns=COLUMNS.long()), "window": 5},
    "columns-none": {"select": Select(columns=COLUMNS[..., :0])},
    "columns-heads": {"select": Select(columns=torch.cat((COLUMNS, COLUMNS // 2), dim=1)), "heads": 2},
    "positions-heads": {"select": Select(positions=torch.cat((POSITIONS, POSITIONS // 2), dim=1)), "heads": 2},
    "positions": {"select": Select(positions=POSITIONS)},
    "positions-strided": {"select": Select(positions=POSITIONS.permute(2, 1, 0).contiguous().permute(2, 1, 0)), "index": INT64},
    "positions-window": {"select": Select(positions=POSITIONS), "window": (9, None)},
    "positions-not-causal": {"select": Select(positions=POSITIONS), "causal": False},
    "positions-per-sequence": {"select": Select(positions=POSITIONS), "causal": torch.tensor([True, False, True, True])},
    "positions-right": {"select": Select(positions=POSITIONS), "window": (9, 1), "causal": False},
    "one-token": {"q_lens": [1], "kv_lens": [1], "width": 1},
    "tree-context": {**tree(Q_LENS), "new": True},
    "tree-window-context": {**tree(Q_LENS, [29, *range(6), 14, 12, 15], window=5), "new": True},
    "tree-window-context-int64": {**tree(Q_LENS, [29, *range(6), 14, 12, 15], window=5), "new": True, "index": INT64},
}


@pytest.mark.parametrize("name", CASES)
def test_exactly_the_required_slots_are_checked(name: str, device: str) -> None:
    """An empty ledger: every required token is missing, and nothing else is counted."""
    s = Setting(device, **on(device, CASES[name]))
    s.ledger.position.fill_(-1)
    required = needed(s)
    report = s.launch()
    assert (report.missing if report else 0) == len(required)
    if required:
        assert report.first == s.finding(*min(required), "never written")


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_required_is_not_reported(name: str, device: str) -> None:
    s = Setting(device, **on(device, CASES[name]))
    required = needed(s)
    for row, kv_len in enumerate(s.batch.kv_lens.tolist()):
        hidden = [p for p in range(kv_len) if (row, p) not in required]
        s.forget(row, *(hidden[:3] + hidden[-3:]))
    assert s.launch() is None


@pytest.mark.parametrize("how", [{}, {"work": SMALLEST}], ids=["usual", "smallest"])
def test_a_missing_token_is_named(how: dict[str, Any], device: str) -> None:
    s = Setting(device)
    s.forget(0, 21, 22)
    s.forget(3, 2)
    report = s.launch(**how)
    assert report.missing == 3
    assert report.first == s.finding(0, 21, "never written")
    slot = s.slot(0, 21)
    where = f"sequence 0, position 21: slot {slot} (page {slot // 4}, offset 1): never written"
    assert str(report) == f"3 required tokens were not in the cache, first {where}"


def test_another_position(device: str) -> None:
    s = Setting(device)
    s.note(3, range(16, 17), held=12)
    assert s.launch() == (1, s.finding(3, 16, "another position's: written at position 12"))


def test_a_released_page_is_stale(device: str) -> None:
    s = Setting(device)
    s.ledger.release(s.batch.page_table[1, 1].reshape(1).long())
    assert s.launch() == (2, s.finding(1, 4, "stale: freed after it was written"))


def test_new_tokens_of_a_tree_in_the_cache_are_left_out(device: str) -> None:
    """Which of them are visible depends on the tree mask, which the kernel does not read: a hidden token must not be reported."""
    s = Setting(device, **on(device, tree(Q_LENS)))
    s.forget(3, 14, 15, 16)
    assert s.launch() is None
    s.forget(3, 13)
    assert s.launch() == (1, s.finding(3, 13, "never written"))


def test_rows_of_two_forms(device: str) -> None:
    """A row's form is a value of its own: here rows with fewer than three new tokens have them in the cache."""
    s = Setting(device, new=True)
    s.forget(0, 29)
    s.forget(3, 14)
    assert s.launch(context_from=3) == (1, s.finding(0, 29, "never written"))


def test_rows_that_are_not_asked_for(device: str) -> None:
    s = Setting(device)
    for row in (0, 1, 3):
        s.forget(row, 0)
    assert s.launch(only=(2, 4)) == (1, s.finding(3, 0, "never written"))


def test_missing_pages_are_not_reported(device: str) -> None:
    s = Setting(device, index=INT64)
    s.note(0, range(32))
    s.batch.page_table[0, 2], s.batch.page_table[3, 0], s.batch.page_table[1, 1] = -1, 40, 2**40
    s.batch.kv_lens[0] = 2**40
    assert s.launch() is None, "beyond its eighth page, the first row's table holds no page, and then ends"
    s.forget(0, 0)
    assert s.launch() == (1, s.finding(0, 0, "never written"))


def test_a_slot_that_was_free_when_it_was_written(device: str) -> None:
    s = Setting(device)
    s.cache = cache_of(device, 40, PAGE_SIZE, PagePool(40, PAGE_SIZE, device))
    for row, kv_len in enumerate(KV_LENS):
        s.note(row, range(kv_len))
    assert s.launch() == (30 + 6 + 17, s.finding(0, 0, "stale: written while the slot was free"))


def test_a_reallocated_page_is_stale(device: str) -> None:
    pool = PagePool(8, PAGE_SIZE, device)
    cache = cache_of(device, 8, PAGE_SIZE, pool)
    assert cache.ledger is not None

    def step(requests: Any, write: bool = True) -> Any:
        batch = pool.step(requests)
        count = sum(requests.values())
        slots = batch.slots_of_tokens(count, PAGE_SIZE)
        rows = batch.sequences_of_tokens(count)
        at = torch.arange(count, device=device) - batch.q_starts[rows + 1] + batch.kv_lens[rows]
        if write:
            assert cache.ledger is not None
            cache.ledger.record(slots, at)
        q = torch.zeros(count, 1, 16, device=device)
        audit(Call(cache, batch, q))
        return batch

    a, b = pool.sequence(), pool.sequence()
    step({a: 6, b: 3})
    step({a: 1, b: 9})
    assert cache.ledger.report() is None
    pool.free(a)
    c = pool.sequence()
    batch = step({c: 2}, write=False)
    slot = int(batch.page_table[0, 0]) * PAGE_SIZE
    report = cache.ledger.report()
    assert report is not None and report.missing == 2
    assert (report.first.seq, report.first.position, report.first.slot) == (0, 0, slot)
    assert report.first.reason == "stale: written at step 1, the slot was allocated again in step 3"


def test_counts_add_up_and_the_first_call_is_kept(device: str) -> None:
    s = Setting(device)
    s.forget(3, 5)
    assert s.launch() == (1, s.finding(3, 5, "never written"))
    s.forget(0, 1)
    assert s.launch() == (3, s.finding(3, 5, "never written"))
    s.ledger.clear()
    assert s.ledger.report() is None
    assert s.launch() == (2, s.finding(0, 1, "never written"))


@pytest.mark.parametrize("q_lens, kv_lens, width", [([], [], 3), ([0, 0], [4, 4], 3)], ids=["no-rows", "no-new-tokens"])
def test_an_empty_batch(q_lens: list[int], kv_lens: list[int], width: int, device: str) -> None:
    s = Setting(device, q_lens=q_lens, kv_lens=kv_lens, width=width)
    s.ledger.position.fill_(-1)
    call, launcher = s.prepared()
    assert list(launcher.launches(call, Extent.of(s.q, s.cache, s.batch), as_bytes)) == []
    assert s.launch() is None


def test_a_launcher_checks_the_given_call(device: str) -> None:
    first, second = Setting(device), Setting(device)
    second.forget(1, 3)
    launcher = first.prepared()[1]
    for _ in range(2):
        for s in (first, second):
            launcher(s.prepared()[0])
    assert first.ledger.report() is None
    assert second.ledger.report() == (2, second.finding(1, 3, "never written"))
