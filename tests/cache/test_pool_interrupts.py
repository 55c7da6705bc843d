"""An exception at any line of the pool leaves its books as they were, or the operation done as a whole."""

import sys
from functools import cache
from pathlib import Path

import pytest

import quire
from quire.cache.pool import PagePool
from quire.cache.transaction import Transaction
from support.pool_state import books

HERE = Path(quire.__file__).parent
FILES = {str(path) for path in (HERE / "cache").glob("*.py")} | {str(HERE / "batch.py")}


class Interrupt:
    """Raises KeyboardInterrupt at one line of the pool's files, counted as they run from 1 on."""

    def __init__(self, line):
        self.line, self.seen = line, 0

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def trace(self, frame, event, _):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.line:
                raise KeyboardInterrupt
        return self.trace


def begin(name):
    """A pool with shared pages, dropped pages, freed pages, and a step that can be rolled back; for some operations also with
    cached pages, held and free, of which that step evicts one."""
    cached = name.endswith("cached")
    pool = PagePool(pages=29 if cached else 40, page_size=2)
    assert pool.issue.max() == -1
    a, b, c, d = (pool.sequence() for _ in range(4))
    at = {}
    if name == "swap in":
        at["f"] = pool.sequence()
        pool.step({at["f"]: 7})
        pool.drop(at["f"], 2)
        pool.swap_out(at["f"])
    if cached:
        f, g = pool.match(FIRST), pool.match(SECOND_PROMPT)
        pool.step({f: 20, g: 20})
        pool.register(f, FIRST[:18])
        pool.register(g, SECOND_PROMPT)
        pool.free(f)
        at = {"g": g}
    pool.step({a: 5, b: 9, c: 1})
    pool.free(d)
    e = pool.fork(b)
    pool.drop(e, 3)
    pool.step({a: 1, c: 1})
    batch = pool.step({a: 1, c: 2})
    assert pool.prefix_usage().evictions == cached
    return pool, at | {"a": a, "b": b, "c": c, "e": e, "batch": batch}


FIRST, SECOND_PROMPT = list(range(20)), list(range(100, 120))
ACTS = {
    "sequence": lambda pool, at: pool.sequence(),
    "step in place": lambda pool, at: pool.step({at["a"]: 1, at["c"]: 2}),
    "step with copies": lambda pool, at: pool.step({at["e"]: 1, at["b"]: 12, at["a"]: 0}),
    "extend": lambda pool, at: pool.extend(at["b"], 3),
    "trim": lambda pool, at: pool.trim(at["b"], 3),
    "drop": lambda pool, at: pool.drop(at["b"], 7),
    "fork": lambda pool, at: pool.fork(at["e"]),
    "free": lambda pool, at: pool.free(at["b"], at["a"], at["e"]),
    "rollback": lambda pool, at: pool.rollback(at["batch"]),
    "match free pages, cached": lambda pool, at: pool.match(FIRST),
    "match held pages, cached": lambda pool, at: pool.match(SECOND_PROMPT),
    "register, cached": lambda pool, at: pool.register(at["b"], list(range(200, 209))),
    "step with evictions, cached": lambda pool, at: pool.step({at["e"]: 1, at["b"]: 5}),
    "trim, cached": lambda pool, at: pool.trim(at["g"], 5),
    "free, cached": lambda pool, at: pool.free(at["g"], at["b"]),
    "rollback, cached": lambda pool, at: pool.rollback(at["batch"]),
    "swap out, cached": lambda pool, at: pool.swap_out(at["g"]),
    "swap in": lambda pool, at: pool.swap_in(at["f"]),
}
SECOND = [0]
"""The line of the next undoing that is interrupted too; 0 for none."""
MAY_BE_DONE = ("trim", "drop", "free", "rollback", "register")
"""Operations that return nothing. Of the others nobody has the result, so they are not done."""


def without_numbers(found):
    """The books without what an interrupted step may skip."""
    sequences, free, holders, issue, _, usage, keys = found
    keys = {page: key for page, (key, _) in keys.items()}
    return [s[1:3] for s in sequences], free, holders, [number >= 0 for number in issue], usage, keys


@cache
def whole(name):
    """The books before and after an operation that nothing interrupts."""
    pool, at = begin(name)
    before = books(pool)
    ACTS[name](pool, at)
    return before, books(pool)


def interrupted(name, line):
    """Interrupts one operation at a line, and checks what is left. False if it ended before."""
    pool, at = begin(name)
    with Interrupt(line) as interrupt:
        try:
            ACTS[name](pool, at)
        except KeyboardInterrupt:
            pass
    SECOND[0] = 0
    if interrupt.seen < line:
        return False
    before, after = whole(name)
    found = books(pool)
    assert found == before or (name.removesuffix(", cached") in MAY_BE_DONE and found == after)
    if found != before or line % 3:
        return True
    at["batch"].check_current()
    assert at["batch"].page_table.tolist() == [s.pages + [-1] * (4 - len(s.pages)) for s in (at["a"], at["c"])]
    undo = "rollback, cached" if name.endswith("cached") else "rollback"
    if name != undo:
        pool.rollback(at["batch"])
        assert name == "swap in" or books(pool) == whole(undo)[1], "the step before can still be rolled back"
        at = {**at, "batch": pool.step({at["a"]: 1, at["c"]: 2})}
    ACTS[name](pool, at)
    assert without_numbers(books(pool)) == without_numbers(after)
    return True


@pytest.mark.parametrize("name", ACTS)
def test_an_interrupt_at_any_line(name):
    line = 1
    while interrupted(name, line):
        line += 1
    assert line > 20


@pytest.mark.parametrize("name", ACTS)
def test_a_second_interrupt_while_the_first_is_undone(name, monkeypatch):
    real = Transaction.undo

    def undo(transaction):
        line, SECOND[0] = SECOND[0], 0
        if line:
            with Interrupt(line):
                real(transaction)
        else:
            real(transaction)

    monkeypatch.setattr(Transaction, "undo", undo)
    line = 1
    while True:
        # A line of the undoing that differs from one time to the next.
        SECOND[0] = 1 + line * 7 % 23
        if not interrupted(name, line):
            return
        line += 5


def test_a_second_interrupt_after_the_step_is_done(monkeypatch):
    """The first comes when everything is written, before the batch is returned: the step before can be rolled back."""
    real = Transaction.undo

    def undo(transaction):
        monkeypatch.setattr(Transaction, "undo", real)
        raise KeyboardInterrupt

    pool, at = begin("step with copies")
    with Interrupt(10**9) as count:
        ACTS["step with copies"](pool, at)

    pool, at = begin("step with copies")
    monkeypatch.setattr(Transaction, "undo", undo)
    with Interrupt(count.seen), pytest.raises(KeyboardInterrupt):
        ACTS["step with copies"](pool, at)
    pool.rollback(at["batch"])
    assert books(pool) == whole("rollback")[1]


def test_a_pool_that_undoes_nothing_is_caught(monkeypatch):
    monkeypatch.setattr(Transaction, "undo", lambda transaction: None)
    with pytest.raises(AssertionError):
        test_an_interrupt_at_any_line("step with copies")
