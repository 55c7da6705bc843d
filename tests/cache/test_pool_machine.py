"""Any sequence of operations on a pool, against a model of what the pages of a cache hold.

The model writes a token that occurs only once into every slot, applies copies before writes as `quire.write` does, and
remembers what each sequence should read. A ledger is kept alongside: its findings must be exactly the tokens that are wrong.
"""

import itertools
import random
from collections import Counter

import numpy
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from quire.cache.copies import Copies
from quire.cache.ledger import Ledger
from quire.cache.pool import PagePool
from quire.errors import ArgumentError, OutOfPages, StaleBatch
from support.pool_state import books, cached, unheld

PAGES, PAGE_SIZE = 16, 3
QUICK = settings(stateful_step_count=30, max_examples=60)
PLANTED = settings(QUICK, max_examples=2000, phases=(Phase.generate,), derandomize=True, database=None, report_multiple_bugs=False)

which = st.integers(0, 7)
fraction = st.floats(0, 1)


class Honest(RuleBasedStateMachine):
    """Everything the pool asks for is done."""

    make_pool = PagePool

    def __init__(self):
        super().__init__()
        self.pool = self.make_pool(PAGES, PAGE_SIZE)
        self.ledger = Ledger(PAGES, PAGE_SIZE, "cpu", self.pool)
        self.tokens = itertools.count()
        self.last = None
        self.ids = set()
        self.contents = {}
        self.history = {}
        self.kept_from = {}

    @property
    def live(self):
        return list(self.history)

    def pick(self, index):
        return self.live[index % len(self.live)]

    def state(self):
        return books(self.pool)

    def attempt(self, request):
        """The request's answer, or None if pages do not suffice and nothing has changed."""
        before = self.state()
        try:
            return request()
        except OutOfPages as error:
            assert error.needed > error.free == self.pool.free_pages
            assert self.state() == before
            return None

    def copy(self, copies):
        if not copies:
            return
        sources = {target: [self.contents.get(source * PAGE_SIZE + i) for i in range(PAGE_SIZE)] for source, target in copies}
        assert len(sources) == len(copies)
        for target, held in sources.items():
            self.contents.update({target * PAGE_SIZE + i: token for i, token in enumerate(held)})
        self.ledger.copy_pages(*torch.tensor(copies).unbind(1))

    def write(self, requests, slots, skipped=frozenset()):
        """One new token after the other into its slot, save those that are skipped."""
        flat = [(row, s, s.length - n + i) for row, (s, n) in enumerate(requests.items()) for i in range(n)]
        assert len(flat) == len(slots)
        rows, positions, writers = (torch.tensor([f(t) for t in flat], dtype=torch.int64) for f in (row_of, position_of, writer_of))
        assert self.ledger.audit_write(torch.tensor(slots), positions, rows, list(requests)) == []
        for index, ((_, sequence, position), slot) in enumerate(zip(flat, slots, strict=True)):
            page = sequence.pages[position // PAGE_SIZE]
            assert slot == page * PAGE_SIZE + position % PAGE_SIZE
            assert self.pool.holders[page] == 1, "a shared page is never written"
            token = next(self.tokens)
            self.history[sequence].append(token)
            if index not in skipped:
                self.contents[slot] = token
        done = torch.tensor([-1 if index in skipped else slot for index, slot in enumerate(slots)], dtype=torch.int64)
        self.ledger.record(done, positions, writers)

    @initialize()
    def start(self):
        self.sequence()

    @precondition(lambda self: len(self.history) < 8)
    @rule()
    def sequence(self):
        new = self.pool.sequence()
        assert (new.length, new.pages) == (0, [])
        self.history[new], self.kept_from[new] = [], 0

    @precondition(lambda self: self.history)
    @rule(wanted=st.lists(st.tuples(which, st.integers(0, 7)), max_size=5))
    def step(self, wanted):
        self.perform_step({self.pick(index): count for index, count in wanted})

    def perform_step(self, requests, apply_copies=True, skipped=frozenset()):
        batch = self.attempt(lambda: self.pool.step(requests))
        if batch is None:
            return
        assert batch.sequences == tuple(requests)
        assert batch.kv_lens.tolist() == [s.length for s in requests]
        assert batch.q_starts.diff().tolist() == list(requests.values())
        assert batch.max_q_len == max(requests.values(), default=0)
        assert batch.max_kv_len == max((s.length for s in requests), default=0)
        width = max([1, *(len(s.pages) for s in requests)])
        assert batch.page_table.tolist() == [s.pages + [-1] * (width - len(s.pages)) for s in requests]
        if self.last is not None:
            with pytest.raises(StaleBatch):
                self.last.check_current()
        batch.check_current()
        self.last = batch
        named = {("step", batch.step_id)} | ({("copies", batch.copies.id)} if batch.copies else set())
        assert not named & self.ids, "no step and no copies have the id of others"
        self.ids |= named
        if apply_copies:
            self.copy(batch.copies)
        self.write(requests, batch.slots_of_tokens(sum(requests.values()), PAGE_SIZE).tolist(), skipped)

    @precondition(lambda self: self.history)
    @rule(wanted=st.lists(st.tuples(which, st.integers(0, 7)), max_size=5))
    def step_and_roll_back(self, wanted):
        requests = {self.pick(index): count for index, count in wanted}
        before = self.state()
        batch = self.attempt(lambda: self.pool.step(requests))
        if batch is None:
            return
        wanted_pages, wanted_copies = batch.page_table.tolist(), tuple(batch.copies)
        slots = batch.slots_of_tokens(sum(requests.values()), PAGE_SIZE)
        self.copy(batch.copies)
        self.contents.update({slot: next(self.tokens) for slot in slots.tolist()})
        self.ledger.record(slots)
        self.pool.rollback(batch)
        assert self.state() == without_overwritten(before, cached(self.pool))
        with pytest.raises(StaleBatch):
            batch.check_current()
        with pytest.raises(ArgumentError):
            self.pool.rollback(batch)
        again = self.pool.step(requests)
        assert (again.page_table.tolist(), tuple(again.copies)) == (wanted_pages, wanted_copies)
        self.pool.rollback(again)

    @rule()
    def decode(self):
        """One token for everybody: forks meet in one step."""
        self.perform_step(dict.fromkeys(self.live, 1))

    @precondition(lambda self: self.history)
    @rule(index=which, count=st.integers(0, 7))
    def extend(self, index, count):
        sequence = self.pick(index)
        copies = self.attempt(lambda: self.pool.extend(sequence, count))
        if copies is None:
            return
        self.copy(copies)
        new = range(sequence.length - count, sequence.length)
        self.write({sequence: count}, [sequence.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in new])

    @precondition(lambda self: self.history)
    @rule(index=which, share=fraction)
    def trim(self, index, share):
        sequence = self.pick(index)
        least = self.kept_from[sequence]
        length = least + round(share * (sequence.length - least))
        self.pool.trim(sequence, length)
        del self.history[sequence][length:]

    @precondition(lambda self: self.history)
    @rule(indices=st.lists(which, max_size=4))
    def free(self, indices):
        sequences = list(dict.fromkeys(self.pick(index) for index in indices))
        if sequences:
            before = self.state()
            with pytest.raises(ArgumentError):
                self.pool.free(*sequences, sequences[0])
            assert self.state() == before
        self.pool.free(*sequences)
        for sequence in sequences:
            del self.history[sequence], self.kept_from[sequence]

    @precondition(lambda self: self.history and len(self.history) < 8)
    @rule(index=which)
    def fork(self, index):
        parent = self.pick(index)
        child = self.pool.fork(parent)
        self.history[child], self.kept_from[child] = self.history[parent][:], self.kept_from[parent]

    @precondition(lambda self: self.history)
    @rule(index=which, share=fraction)
    def drop(self, index, share):
        sequence = self.pick(index)
        before = round(share * sequence.length)
        self.pool.drop(sequence, before)
        self.kept_from[sequence] = max(self.kept_from[sequence], before // PAGE_SIZE * PAGE_SIZE)

    @invariant()
    def every_page_is_counted(self):
        held = Counter(page for s in self.live for page in s.pages if page >= 0)
        assert self.pool.holders.tolist() == [held[page] for page in range(PAGES)]
        assert self.pool.free_pages + len(held) == PAGES
        free = [*self.pool._free.listed(PAGES), *unheld(self.pool)]
        assert sorted(free) == sorted(set(range(PAGES)) - set(held))
        assert self.pool.usage()[2:] == (sum(n > 1 for n in held.values()), len(self.live), sum(s.length for s in self.live))
        assert self.pool.sequences == tuple(self.live)

    @invariant()
    def lengths_and_tables_agree(self):
        for s in self.live:
            assert s.length == len(self.history[s])
            assert len(s.pages) == -(-s.length // PAGE_SIZE)
            assert [page < 0 for page in s.pages] == [column * PAGE_SIZE < self.kept_from[s] for column in range(len(s.pages))]

    @invariant()
    def slots_with_tokens_have_numbers(self):
        issue = self.pool.issue.view(PAGES, PAGE_SIZE)
        free = {*self.pool._free.listed(PAGES), *unheld(self.pool)} - set(cached(self.pool))
        assert all((issue[page] == -1).all() for page in free)
        assert all((issue[page] >= 0).all() for page in cached(self.pool))
        assert all(self.pool.issue[slot] >= 0 for _, _, _, slot, _ in self.tokens_to_read())

    def tokens_to_read(self):
        """(row, sequence, position, slot, token) of all that any sequence should find."""
        for row, s in enumerate(self.live):
            for position in range(self.kept_from[s], s.length):
                slot = s.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
                yield row, s, position, slot, self.history[s][position]

    def wrong(self):
        """The tokens that are not where they should be, {(row, position, slot): whether anything was ever written there}."""
        return {
            (row, position, slot): self.contents.get(slot) is not None
            for row, _, position, slot, token in self.tokens_to_read()
            if self.contents.get(slot) != token
        }

    @invariant()
    def the_ledger_finds_what_is_wrong_and_nothing_else(self):
        read = list(self.tokens_to_read())
        rows, positions, slots = (torch.tensor([token[i] for token in read], dtype=torch.int64) for i in (0, 2, 3))
        found = self.ledger.audit_read(slots, positions, rows, self.live)
        assert {(f.seq, f.position, f.slot): f.reason != "never written" for f in found} == self.wrong()
        assert [(f.seq, f.position) for f in found] == sorted((f.seq, f.position) for f in found)
        assert all(divmod(f.slot, PAGE_SIZE) == (f.page, f.offset) for f in found)

    @invariant()
    def every_sequence_reads_its_history(self):
        assert not self.wrong()


def without_overwritten(state, kept):
    """A pool's state before a step that was rolled back: the step may have overwritten pages that were cached."""
    sequences, free, holders, issue, steps, usage, keys = state
    lost = {page for page in keys if page not in kept}
    issue = [-1 if slot // PAGE_SIZE in lost & set(free) else number for slot, number in enumerate(issue)]
    return sequences, free, holders, issue, steps, usage, {page: entry for page, entry in keys.items() if page not in lost}


def row_of(token):
    return token[0]


def position_of(token):
    return token[2]


def writer_of(token):
    return token[1].id


class Prefixed(Honest):
    """Tokens are registered, and prompts matched."""

    def __init__(self):
        super().__init__()
        self.past = []

    def register_tokens(self, sequence, count):
        self.pool.register(sequence, self.history[sequence][:count])
        self.past.append(self.history[sequence][:])

    @precondition(lambda self: self.history)
    @rule(index=which, share=fraction)
    def register(self, index, share):
        sequence = self.pick(index)
        self.register_tokens(sequence, round(share * sequence.length))

    @precondition(lambda self: self.history)
    @rule(indices=st.lists(which, min_size=1, max_size=3, unique=True))
    def finish(self, indices):
        for index in indices:
            self.register_tokens(self.pick(index), None)
        self.free(indices)

    @precondition(lambda self: self.past and len(self.history) < 8)
    @rule(index=st.integers(0, 3), cut=st.integers(0, 4), count=st.integers(0, 7), window=st.sampled_from((None, None, 1, 4, 7)))
    def match(self, index, cut, count, window):
        prompt = self.past[-1 - index % len(self.past)]
        prompt = [*prompt[: max(len(prompt) - cut, 0)], -1]
        found = self.pool.match(prompt, window=window)
        assert found.length % PAGE_SIZE == 0 and found.length < len(prompt)
        first_seen = 0 if window is None else max(found.length + 1 - window, 0)
        self.history[found], self.kept_from[found] = prompt[: found.length], first_seen // PAGE_SIZE * PAGE_SIZE
        self.perform_step({found: count})

    @precondition(lambda self: len(self.history) > 1)
    @rule(index=which, other=which, count=st.integers(0, 7))
    def swap(self, index, other, count):
        """A sequence is swapped out while another one grows, perhaps into its pages."""
        sequence, columns = self.pick(index), self.ledger.page_columns()
        pages = self.pool.swap_out(sequence)
        slots = [[page * PAGE_SIZE + i for i in range(PAGE_SIZE)] for page in pages]
        kept = [[self.contents.get(slot) for slot in page] for page in slots], [c[list(pages)].clone() for c in columns]
        length, history = sequence.length, self.history.pop(sequence)
        self.perform_step({self.pick(other): count})
        pages = self.attempt(lambda: self.pool.swap_in(sequence))
        if pages is None:
            self.pool.free(sequence)
            del self.kept_from[sequence]
            return
        assert sequence.length == length and [page for page in sequence.pages if page >= 0] == list(pages)
        self.history = dict(sorted([*self.history.items(), (sequence, history)], key=lambda entry: entry[0].id))
        for page, held, *numbers in zip(pages, kept[0], *kept[1]):
            self.contents.update({page * PAGE_SIZE + i: token for i, token in enumerate(held)})
            for column, number in zip(columns, numbers):
                column[page] = number

    @invariant()
    def a_cached_page_has_one_key(self):
        keys = cached(self.pool)
        assert len(keys) == len({key for key, _ in keys.values()})
        if self.pool._prefixes is not None:
            numbers = self.pool._prefixes
            assert {page for page in range(PAGES) if numbers.writers[page] != -2} == set(keys)
            assert all(numbers.key_of(page) == key for page, (key, _) in keys.items())
            assert self.pool.prefix_usage()[:2] == (len(keys), len(set(keys) - {page for s in self.live for page in s.pages}))


class Careless(Prefixed):
    """Some writes are skipped, some copies are not applied; the ledger must tell exactly which tokens suffer."""

    @precondition(lambda self: self.history)
    @rule(wanted=st.lists(st.tuples(which, st.integers(0, 7)), max_size=5), skipped=st.frozensets(st.integers(0, 20), max_size=4))
    def skip_writes(self, wanted, skipped):
        self.perform_step({self.pick(index): count for index, count in wanted}, skipped=skipped)

    @precondition(lambda self: self.history)
    @rule(wanted=st.lists(st.tuples(which, st.integers(1, 7)), max_size=5))
    def skip_copies(self, wanted):
        self.perform_step({self.pick(index): count for index, count in wanted}, apply_copies=False)

    @invariant()
    def every_sequence_reads_its_history(self):
        """Not here."""


def test_any_sequence_of_operations():
    run_state_machine_as_test(Honest, settings=QUICK)


INVARIANTS = [name for name in dir(Prefixed) if hasattr(getattr(Prefixed, name), "hypothesis_stateful_invariant")]


def run_long(machine, operations, seed=0):
    """Many operations on one pool, most of them admissions and ends of sequences, so that cached pages are found and evicted."""
    chance = random.Random(seed)
    machine.start()

    def indices():
        return [chance.randrange(8) for _ in range(chance.randint(1, 3))]

    def wanted():
        return [(index, chance.randint(0, 7)) for index in indices()]

    acts = {
        "match": lambda: machine.match(
            chance.randrange(6), chance.randrange(5), chance.randint(0, 7), chance.choice((None, None, 1, 4, 7))
        ),
        "step": lambda: machine.step(wanted()),
        "decode": machine.decode,
        "step_and_roll_back": lambda: machine.step_and_roll_back(wanted()),
        "extend": lambda: machine.extend(chance.randrange(8), chance.randint(0, 7)),
        "register": lambda: machine.register(chance.randrange(8), chance.random()),
        "finish": lambda: machine.finish(list(dict.fromkeys(indices()))),
        "trim": lambda: machine.trim(chance.randrange(8), chance.random()),
        "fork": lambda: machine.fork(chance.randrange(8)),
        "drop": lambda: machine.drop(chance.randrange(8), chance.random() / 2),
        "free": lambda: machine.free(indices()),
        "swap": lambda: machine.swap(chance.randrange(8), chance.randrange(8), chance.randint(0, 7)),
    }
    weights = (6, 4, 2, 4, 1, 4, 2, 2, 1, 1, 1, 2)
    for name in chance.choices(list(acts), weights, k=operations):
        if not machine.live:
            machine.sequence()
        if name in ("match", "fork") and (len(machine.live) == 8 or not machine.past):
            name = "finish"
        if name == "swap" and len(machine.live) < 2:
            name = "decode"
        acts[name]()
        for name in INVARIANTS:
            getattr(machine, name)()


def test_a_long_run_with_a_prefix_cache():
    machine = Prefixed()
    run_long(machine, 1500)
    found = machine.pool.prefix_usage()
    assert min(found.hits, found.misses, found.evictions) > 50, "the run is not worth its name"


def test_the_ledger_finds_exactly_what_an_engine_broke():
    run_state_machine_as_test(Careless, settings=QUICK)


def test_a_careless_engine_does_break_something():
    class Unnoticed(Careless):
        every_sequence_reads_its_history = Honest.every_sequence_reads_its_history

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Unnoticed, settings=PLANTED)


class NeverCopies(PagePool):
    def _plan(self, request, transaction):
        shared, self._shared = self._shared, 0
        try:
            return super()._plan(request, transaction)
        finally:
            self._shared = shared


class ForgetsToSayWhatToCopy(PagePool):
    def _plan(self, request, transaction):
        given, _ = super()._plan(request, transaction)
        return given, ()


class CopiesBackwards(PagePool):
    def _plan(self, request, transaction):
        given, copies = super()._plan(request, transaction)
        return given, Copies(((target, source) for source, target in copies), copies.id) if copies else copies


class UsesAnIdAgain(PagePool):
    def _plan(self, request, transaction):
        given, copies = super()._plan(request, transaction)
        self._copied = 0
        return given, copies


class FreesTwice(PagePool):
    def free(self, *sequences):
        pages = [page for s in sequences for page in s.pages if page >= 0]
        super().free(*sequences)
        if pages and not self.holders[pages[0]]:
            self._free._grow(self._free.count + 1)
            self._free._returned[self._free.count] = pages[0]
            self._free.count += 1


class FreesSharedPages(PagePool):
    def free(self, *sequences):
        pages = [page for s in sequences for page in s.pages if page >= 0]
        if len(set(pages)) == len(pages):
            self._holders[pages] = 1
        super().free(*sequences)


class CountsASharedPageOnce(PagePool):
    def free(self, *sequences):
        shared, self._shared = self._shared, 0
        super().free(*sequences)
        self._shared = shared


class ForgetsToCountAFork(PagePool):
    def fork(self, sequence):
        child = super().fork(sequence)
        for page in child.pages[-1:]:
            self.holders[page] -= 1
        return child


class LosesAStepWhenFull(PagePool):
    def _plan(self, request, transaction):
        self.steps += 1
        return super()._plan(request, transaction)


class TakesPagesBeforeItCounts(PagePool):
    def _plan(self, request, transaction):
        taken = self._free.used
        self._free.used = min(taken + 1, self.pages)
        planned = super()._plan(request, transaction)
        self._free.used = taken
        return planned


class NumbersOutliveTheirTokens(PagePool):
    def free(self, *sequences):
        issue = self._issue.copy()
        super().free(*sequences)
        self._issue[:] = issue


class OneNumberForAllSteps(PagePool):
    def _plan(self, request, transaction):
        planned = super()._plan(request, transaction)
        for i, (owner, name, index, new, old) in enumerate(transaction._cells):
            if name == "_issue":
                transaction._cells[i] = (owner, name, index, numpy.minimum(new, 1), old)
        return planned


class CopiesKeepTheirOldNumbers(PagePool):
    def _plan(self, request, transaction):
        given, copies = super()._plan(request, transaction)
        if len(given.targets):
            transaction.set_cells(self, "_issue", given.targets, self._numbers)
        return given, copies


class ForkForgetsItsAncestors(PagePool):
    def fork(self, sequence):
        child = super().fork(sequence)
        child._runs = [(0, child.id)] if child.length else []
        return child


class TrimRemembersItsRuns(PagePool):
    def trim(self, sequence, length):
        runs = sequence.runs
        super().trim(sequence, length)
        sequence._runs = runs


class RollbackForgetsTheFreePages(PagePool):
    def rollback(self, batch):
        count, used = self._free.count, self._free.used
        super().rollback(batch)
        self._free.count, self._free.used = count, used


class RollbackKeepsTheBatch(PagePool):
    def rollback(self, batch):
        super().rollback(batch)
        self._state.now = batch.state_number


class NeverStale(PagePool):
    def _advance_state(self, transaction):
        self._changes += 1
        return self._state.now


FAULTS = (
    NeverCopies,
    ForgetsToSayWhatToCopy,
    CopiesBackwards,
    UsesAnIdAgain,
    FreesTwice,
    FreesSharedPages,
    CountsASharedPageOnce,
    ForgetsToCountAFork,
    LosesAStepWhenFull,
    TakesPagesBeforeItCounts,
    NumbersOutliveTheirTokens,
    OneNumberForAllSteps,
    CopiesKeepTheirOldNumbers,
    ForkForgetsItsAncestors,
    TrimRemembersItsRuns,
    RollbackForgetsTheFreePages,
    RollbackKeepsTheBatch,
    NeverStale,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_machine_catches(fault):
    class Planted(Honest):
        make_pool = fault

    with pytest.raises((AssertionError, IndexError, ValueError, pytest.fail.Exception)):
        run_state_machine_as_test(Planted, settings=PLANTED)


class RollbackRestoresOverwrittenPages(PagePool):
    def rollback(self, batch):
        if self._latest is not None:
            self._latest[1]._cells += self._latest[1].lasting._cells
            self._latest[1]._removed += self._latest[1].lasting._removed
        super().rollback(batch)


class PagesWrittenInPlaceStayCached(PagePool):
    def _plan(self, request, transaction):
        planned = super()._plan(request, transaction)
        held = {page for s in request.sequences for page in s.pages}
        for _, _, entries in transaction.lasting._removed:
            for key in [key for key, page in entries.items() if page in held]:
                del entries[key]
        return planned


class EvictedPagesStayCached(PagePool):
    def _plan(self, request, transaction):
        planned = super()._plan(request, transaction)
        transaction.lasting._removed.clear()
        return planned


class EvictsHeldPages(PagePool):
    def match(self, token_ids, salt="", *, window=None):
        queue = self._prefix_cache().unheld
        remove, queue.remove = queue.remove, lambda pages, transaction: None
        try:
            return super().match(token_ids, salt, window=window)
        finally:
            queue.remove = remove


class FoundPagesAreNotCounted(PagePool):
    def match(self, token_ids, salt="", *, window=None):
        sequence = super().match(token_ids, salt, window=window)
        self._holders[[page for page in sequence.pages if page >= 0]] -= 1
        return sequence


class FoundTokensAreItsOwn(PagePool):
    def match(self, token_ids, salt="", *, window=None):
        sequence = super().match(token_ids, salt, window=window)
        sequence._runs = [(0, sequence.id)] if sequence.length else []
        return sequence


class CachedPagesLoseTheirNumbers(PagePool):
    def free(self, *sequences):
        pages = [page for s in sequences for page in s.pages if page >= 0]
        super().free(*sequences)
        gone = [page for page in pages if not self._holders[page]]
        self._issue[gone] = -1


class TrimmedPagesStayCached(PagePool):
    def trim(self, sequence, length):
        cache = self._prefix_cache()
        forget, cache.forget = cache.forget, lambda pages, transaction: None
        try:
            super().trim(sequence, length)
        finally:
            cache.forget = forget


class SwappedPagesLoseTheirNumbers(PagePool):
    def swap_in(self, sequence):
        pages = super().swap_in(sequence)
        self._issue[list(pages)] = self.steps
        return pages


class SwappedPagesStayHeld(PagePool):
    def swap_out(self, sequence):
        pages = super().swap_out(sequence)
        self._holders[list(pages)] += 1
        return pages


class SwapForgetsDroppedPages(PagePool):
    def swap_out(self, sequence):
        pages = super().swap_out(sequence)
        self._swapped[sequence.id] = self._swapped[sequence.id]._replace(first=len(sequence.pages) - len(pages) and 0)
        return pages


PREFIX_FAULTS = (
    RollbackRestoresOverwrittenPages,
    PagesWrittenInPlaceStayCached,
    EvictedPagesStayCached,
    EvictsHeldPages,
    FoundPagesAreNotCounted,
    FoundTokensAreItsOwn,
    CachedPagesLoseTheirNumbers,
    TrimmedPagesStayCached,
    SwappedPagesLoseTheirNumbers,
    SwappedPagesStayHeld,
    SwapForgetsDroppedPages,
)


@pytest.mark.parametrize("fault", PREFIX_FAULTS, ids=lambda fault: fault.__name__)
def test_the_long_run_catches(fault):
    class Planted(Prefixed):
        make_pool = fault

    with pytest.raises((AssertionError, IndexError, ValueError, pytest.fail.Exception)):
        for seed in range(8):
            run_long(Planted(), 1500, seed)
