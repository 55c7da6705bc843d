"""What the ledger says about each way a token can be missing, stale or somebody else's."""

import pytest
import torch

from quire.cache.ledger import Ledger, LedgerFinding
from quire.cache.pool import PagePool

PAGE_SIZE = 4


class Engine:
    """A pool and a ledger, without the keys and values between them."""

    def __init__(self, pages=8, device="cpu", pool=True):
        self.pool = PagePool(pages, PAGE_SIZE, device)
        self.ledger = Ledger(pages, PAGE_SIZE, device, self.pool if pool else None)

    def tokens(self, batch):
        """slots, positions and rows of a batch's new tokens."""
        count = int(batch.q_starts[-1])
        rows = batch.sequences_of_tokens(count)
        at = torch.arange(count, device=batch.device) - batch.q_starts[rows + 1] + batch.kv_lens[rows]
        return batch.slots_of_tokens(count, PAGE_SIZE), at, rows

    def write(self, batch, copies=True):
        if copies and batch.copies:
            self.ledger.copy_pages(*torch.tensor(batch.copies, device=batch.device).unbind(1))
        slots, positions, rows = self.tokens(batch)
        self.ledger.record(slots, positions, torch.tensor([s.id for s in batch.sequences], device=batch.device)[rows])

    def audit_write(self, batch):
        return self.ledger.audit_write(*self.tokens(batch), batch.sequences)

    def step(self, requests):
        batch = self.pool.step(requests)
        self.write(batch)
        return batch

    def read(self, batch, sequences=None):
        """Audits all that the rows of a batch see."""
        lens = batch.kv_lens.tolist()
        positions = torch.tensor([p for n in lens for p in range(n)], dtype=torch.int64)
        rows = torch.tensor([row for row, n in enumerate(lens) for _ in range(n)], dtype=torch.int64)
        page = batch.page_table.cpu()[rows, positions // PAGE_SIZE].to(torch.int64)
        slots = torch.where(page < 0, -1, page * PAGE_SIZE + positions % PAGE_SIZE)
        return self.ledger.audit_read(slots, positions, rows, batch.sequences if sequences is None else sequences)


@pytest.fixture
def engine():
    return Engine()


def reasons(findings):
    return [(f.seq, f.position, f.reason) for f in findings]


def test_correct_use_has_no_findings(engine):
    a, b = engine.pool.sequence(), engine.pool.sequence()
    for requests in ({a: 6, b: 1}, {b: 3, a: 1}, {a: 5}):
        batch = engine.pool.step(requests)
        assert engine.audit_write(batch) == []
        engine.write(batch)
        assert engine.read(batch) == []


def test_never_written(engine):
    a, b = engine.pool.sequence(), engine.pool.sequence()
    engine.pool.step({a: 1})
    batch = engine.step({b: 2})
    batch = engine.pool.step({b: 4, a: 1})
    assert engine.read(batch) == [
        LedgerFinding(0, 2, 6, 1, 2, "never written"),
        LedgerFinding(0, 3, 7, 1, 3, "never written"),
        LedgerFinding(0, 4, 8, 2, 0, "never written"),
        LedgerFinding(0, 5, 9, 2, 1, "never written"),
        LedgerFinding(1, 0, 0, 0, 0, "never written"),
        LedgerFinding(1, 1, 1, 0, 1, "never written"),
    ]
    assert str(engine.read(batch)[0]) == "sequence 0, position 2: slot 6 (page 1, offset 2): never written"


def test_stale_after_free(engine):
    a = engine.pool.sequence()
    batch = engine.step({a: 2})
    engine.pool.free(a)
    assert reasons(engine.read(batch)) == [(0, p, "stale: freed after it was written") for p in range(2)]


def test_stale_after_trim(engine):
    a = engine.pool.sequence()
    batch = engine.step({a: 3})
    engine.pool.trim(a, 1)
    assert reasons(engine.read(batch)) == [(0, p, "stale: freed after it was written") for p in (1, 2)]


def test_stale_after_drop(engine):
    a = engine.pool.sequence()
    batch = engine.step({a: 6})
    engine.pool.drop(a, 5)
    assert reasons(engine.read(batch)) == [(0, p, "stale: freed after it was written") for p in range(4)]
    assert engine.read(engine.step({a: 1})) == [], "pages that were dropped are -1 in the next table"


def test_stale_when_a_trimmed_slot_is_handed_out_again(engine):
    a = engine.pool.sequence()
    engine.step({a: 3})
    engine.pool.trim(a, 2)
    batch = engine.pool.step({a: 1})
    stale = "stale: written at step 1, the slot was allocated again in step 2"
    assert reasons(engine.read(batch)) == [(0, 2, stale)]
    assert engine.audit_write(batch) == []
    engine.write(batch)
    assert engine.read(batch) == []


def test_stale_when_a_freed_page_is_handed_out_again(engine):
    a, b = engine.pool.sequence(), engine.pool.sequence()
    engine.step({a: 1})
    engine.pool.free(a)
    stale = "stale: written at step 1, the slot was allocated again in step 2"
    assert reasons(engine.read(engine.pool.step({b: 2}))) == [(0, 0, stale), (0, 1, "never written")]


def test_stale_when_written_while_free(engine):
    a = engine.pool.sequence()
    batch = engine.pool.step({a: 1})
    engine.pool.trim(a, 0)
    engine.write(batch)
    assert reasons(engine.read(batch)) == [(0, 0, "stale: written while the slot was free")]
    assert reasons(engine.read(engine.pool.step({a: 1}))) == [(0, 0, "stale: written while the slot was free")]


def test_stale_when_a_copy_was_not_applied(engine):
    pool = engine.pool
    a, other = pool.sequence(), pool.sequence()
    engine.step({a: 2, other: 2})
    pool.free(other)
    b = pool.fork(a)
    batch = pool.step({b: 1})
    assert batch.copies == ((0, 1),)
    engine.write(batch, copies=False)
    wrong = "another sequence's: written by sequence 1 at position {}"
    assert reasons(engine.read(batch)) == [(0, p, wrong.format(p)) for p in range(2)], "written in the same step"
    pool.free(b)

    late = pool.sequence()
    engine.step({late: 2})
    pool.free(late)
    b = pool.fork(a)
    batch = pool.step({b: 1})
    engine.write(batch, copies=False)
    stale = "stale: written at step 3, the slot was allocated again in step 1"
    assert reasons(engine.read(batch)) == [(0, p, stale) for p in range(2)], "written later than what should be copied"
    engine.ledger.copy_pages(torch.tensor([0]), torch.tensor([1]))
    assert reasons(engine.read(batch)) == [(0, 2, "never written")], "a copy after the write destroys the write"


def test_another_sequences(engine):
    a, b = engine.pool.sequence(), engine.pool.sequence()
    batch = engine.step({a: 2, b: 3})
    batch.page_table[0] = batch.page_table[1]
    assert reasons(engine.read(batch)) == [(0, p, f"another sequence's: written by sequence 1 at position {p}") for p in range(2)]


def test_another_positions(engine):
    a = engine.pool.sequence()
    batch = engine.step({a: 8})
    batch.page_table[0] = batch.page_table[0].flip(0)
    found = [(0, p, f"another position's: written at position {(p + 4) % 8}") for p in range(8)]
    assert reasons(engine.read(batch)) == found
    assert reasons(engine.ledger.audit_read(torch.tensor([3]), torch.tensor([2]), torch.tensor([0]))) == [
        (0, 2, "another position's: written at position 3")
    ]


def test_a_fork_reads_its_ancestors_up_to_the_fork_and_no_further(engine):
    pool = engine.pool
    a = pool.sequence()
    engine.step({a: 6})
    b = pool.fork(a)
    c = pool.fork(b)
    batch = engine.step({c: 1, a: 3, b: 2})
    assert engine.read(batch) == []
    batch = engine.step({c: 1})
    assert engine.read(batch) == []
    batch.page_table[0, 1] = a.pages[1]
    wrong = [(0, p, f"another sequence's: written by sequence 0 at position {p}") for p in (6, 7)]
    assert reasons(engine.read(batch)) == wrong, "positions 4 and 5 lie before the fork: a's page has them too"


def test_a_trimmed_fork_does_not_read_what_its_parent_kept(engine):
    pool = engine.pool
    a = pool.sequence()
    engine.step({a: 4})
    b = pool.fork(a)
    pool.trim(b, 2)
    batch = pool.step({b: 0})
    batch.kv_lens[0] = 4
    assert reasons(engine.read(batch)) == [(0, p, "beyond its sequence, which has 2 tokens") for p in (2, 3)]


def test_written_twice_in_one_call(engine):
    a = engine.pool.sequence()
    engine.pool.step({a: 3})
    found = engine.ledger.audit_write(
        torch.tensor([2, 0, 2, -1, -1]), torch.tensor([2, 0, 1, 3, 4]), torch.zeros(5, dtype=torch.int64)
    )
    assert found == [LedgerFinding(0, 1, 2, 0, 2, "written twice in one call")]


def test_written_twice_since_it_was_handed_out(engine):
    a, b = engine.pool.sequence(), engine.pool.sequence()
    batch = engine.step({a: 1, b: 1})
    expected = "written twice: already at step 1, by sequence {} at position 0"
    assert reasons(engine.audit_write(batch)) == [(row, 0, expected.format(row)) for row in (0, 1)]
    engine.ledger.record(torch.tensor([0]), torch.tensor([0]))
    assert reasons(engine.audit_write(batch))[0] == (0, 0, "written twice: already at step 1, at position 0")


def test_writing_a_slot_that_is_free(engine):
    a = engine.pool.sequence()
    batch = engine.pool.step({a: 2})
    engine.pool.trim(a, 1)
    assert reasons(engine.audit_write(batch)) == [(0, 1, "free: the pool has not allocated the slot")]


def test_writing_beyond_the_sequence(engine):
    a = engine.pool.sequence()
    batch = engine.pool.step({a: 2})
    engine.pool.trim(engine.pool.fork(a), 0)
    engine.pool.fork(a)
    engine.pool.trim(a, 1)
    assert reasons(engine.audit_write(batch)) == [(0, 1, "beyond its sequence, which has 1 tokens")]


def test_without_a_pool_positions_and_releases_count():
    ledger = Ledger(2, PAGE_SIZE, "cpu")
    slots, positions, rows = torch.tensor([0, 1, 4, 5]), torch.tensor([0, 1, 0, 2]), torch.tensor([0, 0, 1, 1])
    assert [f.reason for f in ledger.audit_read(slots, positions, rows)] == ["never written"] * 4
    ledger.record(slots, positions)
    assert ledger.audit_read(slots, positions, rows) == []
    assert ledger.audit_write(slots, positions, rows) == [], "who knows whether an engine has handed a slot out again"
    assert reasons(ledger.audit_read(slots.flip(0), positions, rows)) == [
        (0, 0, "another position's: written at position 2"),
        (0, 1, "another position's: written at position 0"),
        (1, 0, "another position's: written at position 1"),
        (1, 2, "another position's: written at position 0"),
    ]
    ledger.release(torch.tensor([1]))
    freed = [(1, p, "stale: freed after it was written") for p in (0, 2)]
    assert reasons(ledger.audit_read(slots, positions, rows)) == freed
    ledger.record(slots[2:], positions[2:])
    assert ledger.audit_read(slots, positions, rows) == []
    ledger.copy_pages(torch.tensor([0]), torch.tensor([1]))
    assert reasons(ledger.audit_read(slots, positions, rows)) == [(1, 2, "another position's: written at position 1")]


def test_copies_read_all_sources_first():
    ledger = Ledger(2, 1, "cpu")
    ledger.record(torch.tensor([0, 1]), torch.tensor([5, 6]))
    ledger.copy_pages(torch.tensor([0, 1]), torch.tensor([1, 0]))
    assert ledger.position.tolist() == [6, 5]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slots_outside_the_cache_are_skipped(dtype):
    ledger = Ledger(2, 2, "cpu")
    slots = torch.tensor([-1, 3, 4, 1000, -7], dtype=dtype)
    positions = torch.tensor([1, 2, 3, 4, 5], dtype=dtype)
    rows = torch.zeros(5, dtype=dtype)
    ledger.record(slots, positions, rows)
    assert ledger.position.tolist() == [-1, -1, -1, 2]
    assert ledger.writer.tolist() == [-1, -1, -1, 0]
    assert ledger.audit_read(slots, positions, rows) == []
    assert ledger.audit_write(slots, positions, rows) == []


def test_findings_come_in_order_of_row_and_position():
    ledger = Ledger(2, PAGE_SIZE, "cpu")
    slots, positions, rows = torch.tensor([5, 0, 4, 1]), torch.tensor([9, 0, 2, 1]), torch.tensor([1, 0, 1, 0])
    assert [(f.seq, f.position) for f in ledger.audit_read(slots, positions, rows)] == [(0, 0), (0, 1), (1, 2), (1, 9)]


def test_nothing_to_audit():
    engine = Engine()
    none = torch.empty(0, dtype=torch.int64)
    for audit in (engine.ledger.audit_read, engine.ledger.audit_write):
        assert audit(none, none, none) == []
        assert audit(none, none, none, ()) == []


def test_unknown_writers_are_not_compared(engine):
    a, b = engine.pool.sequence(), engine.pool.sequence()
    batch = engine.pool.step({a: 1, b: 1})
    engine.ledger.record(torch.tensor([0, 4]), torch.tensor([0, 0]))
    batch.page_table[0] = batch.page_table[1]
    assert engine.read(batch) == []


def test_a_late_write_counts_for_the_step_that_handed_its_slots_out(engine):
    a, b = engine.pool.sequence(), engine.pool.sequence()
    first, second = engine.pool.step({a: 2}), engine.pool.step({b: 2})
    engine.write(second)
    engine.write(first)
    assert engine.read(first) == engine.read(second) == []


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
def test_recording_on_a_gpu_reads_nothing_back():
    engine = Engine(device="cuda")
    pool, ledger = engine.pool, engine.ledger
    a = pool.sequence()
    batch = pool.step({a: 6})
    slots, positions, rows = engine.tokens(batch)
    pairs = torch.tensor([[1, 2]], device="cuda").unbind(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ledger.record(slots, positions, rows)
        ledger.record(slots, positions)
        ledger.copy_pages(*pairs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.read(batch) == []
    pool.trim(a, 5)
    stale = "stale: written at step 1, the slot was allocated again in step 2"
    again = pool.step({a: 1})
    assert reasons(engine.read(again)) == [(0, 5, stale)]
    engine.write(again)
    assert engine.read(again) == []


@gpu
def test_a_captured_record_follows_the_pool():
    engine = Engine(device="cuda")
    a = engine.pool.sequence()
    slots, positions = torch.full((2,), -1, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        engine.ledger.record(slots, positions)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.ledger.record(slots, positions)
    for _ in range(3):
        batch = engine.pool.step({a: 2})
        new_slots, new_positions, _ = engine.tokens(batch)
        slots.copy_(new_slots)
        positions.copy_(new_positions)
        graph.replay()
        assert engine.read(batch) == []
    engine.pool.trim(a, 4)
    assert [f.position for f in engine.read(batch)] == [4, 5]
