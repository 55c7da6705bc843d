"""Facts about cases and sequences that a failure may depend on, and how to make a case without one.

Most facts follow from the fields of `Case`: a field has another value than its default, or a number is at least so large. The
others relate a sequence's lengths to the page size and the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from quire.cache.kv_cache import MOST_DIM
from quire.conformance.cases.case import Case

IGNORED = ("name", "operation", "q_lens", "kv_lens", "seed", "fill_byte", "x", "poison", "only")
"""Fields that a kernel does not depend on, or that other facts cover."""
WORDS = {
    "lse": "with LSE output",
    "form": "in the {} form",
    "queries": "without queries to rotate",
    "hadamard": "with Hadamard-transformed keys",
    "mask": "with a tree mask",
    "causal": "with causal={}",
    "alibi": "with ALiBi",
    "padding": "with padding rows",
    "data": "with {} data",
    "format": "with format {}",
    "layout": "with layout {}",
    "q_dtype": "with {} queries",
}
"""How a fact about a field is worded; otherwise the field's name and its value."""
WORDS_OF_VALUES = {
    ("v_format", ""): "with one format for K and V",
    ("strides", "views"): "with queries, table and new tokens that are views of wider tensors",
    ("strides", "dense"): "with dense queries, table and new tokens",
    ("tail", "page"): "with page ids in the page-table cells beyond a sequence's end",
    ("tail", "-1"): "with -1 in the page-table cells beyond a sequence's end",
    ("tail", "none"): "without page-table cells beyond the longest sequence",
    ("hints", "exact"): "with exact hints (max_q_len and max_kv_len)",
    ("hints", "low"): "with hints (max_q_len and max_kv_len) that are too low",
    ("hints", "none"): "without hints (max_q_len and max_kv_len)",
    ("table", "shuffled"): "with shuffled page ids",
    ("table", "identity"): "with page ids in order",
    ("table", "shared"): "with pages that all sequences share",
    ("table", "partly"): "with pages that some sequences share",
    ("table", "high"): "with page ids above 65536",
    ("table", "far"): "with element offsets above 2^31",
    ("table", "very-far"): "with element offsets above 2^32",
    ("scales", "none"): "without scales",
    ("slots", "batch"): "with slots of the page table",
    ("slots", "skipped"): "with tokens of slot -1",
    ("slots", "scattered"): "with slots in any order",
    ("rope", "none"): "without RoPE",
    ("rope", "half-split"): "with half-split RoPE",
    ("rope", "interleaved"): "with interleaved RoPE",
    ("norm", "none"): "without a norm",
    ("norm", "weight"): "with a norm",
    ("norm", "unit-offset"): "with a norm by 1 + weight",
    ("positions", "own"): "with positions of the sequences",
    ("positions", "given"): "with given positions",
    ("scales", "tensor"): "with one scale per tensor",
    ("scales", "head"): "with scales per head",
    ("scales", "token"): "with scales per token",
    ("storage", "native"): "with pages of the cache's own type",
    ("storage", "bytes"): "with pages stored as bytes",
    ("storage", "padded"): "with padded pages",
}
"""The same for single values."""
WORDS_OF_OTHERS = {"rope": "with RoPE", "norm": "with a norm", "slots": "with slots that do not follow from the page table"}
"""The same for all values but the default."""
SIZES = ("kv_heads", "group", "head_dim", "page_size")
"""Numeric fields for which thresholds make sense."""


@dataclass(frozen=True)
class Fact:
    """Something that holds for some cases or sequences."""

    text: str
    """As it follows "only"."""
    holds: Callable[[Case, int], bool]
    """For a case and one of its sequences; facts about the case ignore the latter."""
    without: Callable[[Case], Case | None]
    """The case with this fact removed and nothing else changed; None if that makes no sense."""
    of_sequence: bool = False
    opposite: str = ""
    """What is correct, where that says more: "correct with int32 indices"."""
    threshold: Threshold | None = None


class Threshold(NamedTuple):
    """The number in a fact such as "from kv_len 257 on"."""

    what: str
    value: int
    """The smallest that fails."""
    passing: int
    """The largest below it that passes."""
    set_to: Callable[[Case, int], Case]
    """The case with that number."""


def queried(case: Case) -> list[int]:
    """Sequences that have a query."""
    return [i for i, q_len in enumerate(case.q_lens) if q_len > 0]


def field_facts(cases: Iterable[Case]) -> Iterator[Fact]:
    """For every field: that it differs from its default, and that it has one of the values that occur."""
    population = list(cases)
    for spec in fields(Case):
        if spec.name in IGNORED:
            continue
        values = list(dict.fromkeys(getattr(case, spec.name) for case in population))
        special = [value for value in values if value != spec.default]
        if spec.name == "index":
            yield from _index_facts()
            continue
        if not special:
            continue
        if spec.name == "window":
            yield Fact("with a window", _differs(spec.name, spec.default), _reset(spec.name, spec.default))
            continue
        if spec.default is None or isinstance(spec.default, bool) or spec.name == "padding":
            words = WORDS.get(spec.name, f"with {spec.name}")
            yield Fact(words, _differs(spec.name, spec.default), _reset(spec.name, spec.default))
            continue
        if isinstance(spec.default, str):
            if len(special) > 1:
                words = WORDS_OF_OTHERS.get(spec.name, f"with {spec.name} other than {spec.default}")
                yield Fact(words, _differs(spec.name, spec.default), _reset(spec.name, spec.default))
            for value in values:
                words = WORDS_OF_VALUES.get((spec.name, value)) or WORDS.get(spec.name, f"with {spec.name} {{}}").format(value)
                other = spec.default if value != spec.default else special[0]
                yield Fact(words, _equals(spec.name, value), _reset(spec.name, other))
    yield Fact(
        "with a quantised cache",
        lambda case, i: case.scales != "none",
        lambda case: case.replace(scales="none", format="fp16", v_format="", storage="native"),
    )


def _index_facts() -> Iterator[Fact]:
    yield Fact(
        "with int64 indices",
        lambda case, i: "int64" in case.index,
        lambda case: case.replace(index=("int32",) * 3),
        opposite="correct with int32 indices",
    )
    for n, name in enumerate(("page_table", "kv_lens", "q_starts")):

        def without(case: Case, n: int = n) -> Case:
            return case.replace(index=tuple("int32" if i == n else one for i, one in enumerate(case.index)))

        def holds(case: Case, i: int, n: int = n) -> bool:
            return case.index[n] == "int64"

        yield Fact(
            f"with int64 {name}",
            holds,
            without,
            opposite=f"correct with int32 {name}",
        )


def _differs(name: str, default: Any) -> Callable[[Case, int], bool]:
    return lambda case, i: getattr(case, name) != default


def _equals(name: str, value: Any) -> Callable[[Case, int], bool]:
    return lambda case, i: getattr(case, name) == value


def _reset(name: str, value: Any) -> Callable[[Case], Case | None]:
    def without(case: Case) -> Case | None:
        if getattr(case, name) == value:
            return None
        changes: dict[str, Any] = {name: value}
        if name == "format" and value in ("fp16", "bf16", "fp32"):
            changes |= {"scales": "none", "storage": "native"}
        if name == "rope" and value == "none":
            changes |= {"rotary_dim": 0, "norm": "none", "queries": True, "positions": "own"}
        return case.replace(**changes)

    return without


def shape_facts() -> Iterator[Fact]:
    """Odd groups, sizes that are no power of two, empty sequences."""

    def power_of_two(n: int) -> bool:
        return n & (n - 1) == 0

    yield Fact(
        "with an odd group of query heads (more than 1)",
        lambda case, i: case.group % 2 == 1 and case.group > 1,
        lambda case: case.replace(group=case.group + 1),
    )
    numbers = {"group": "a group size", "page_size": "a page size", "head_dim": "a head_dim", "kv_heads": "a number of kv heads"}
    for name, words in numbers.items():

        def holds(case: Case, i: int, name: str = name) -> bool:
            return not power_of_two(getattr(case, name))

        def without(case: Case, name: str = name) -> Case:
            return case.replace(**{name: 1 << (getattr(case, name).bit_length() - 1)})

        yield Fact(f"with {words} that is no power of two", holds, without)
    yield Fact(
        "with element offsets of 2^31 and more",
        lambda case, i: case.table in ("far", "very-far"),
        lambda case: case.replace(table="high"),
    )
    yield Fact(
        "with values of another head_dim than keys",
        lambda case, i: case.v_head_dim not in (0, case.head_dim),
        lambda case: case.replace(v_head_dim=0),
    )
    yield Fact(
        "with values that are a part of keys",
        lambda case, i: case.v_in_k > 0,
        lambda case: case.replace(v_in_k=0, head_dim=min(case.head_dim, MOST_DIM)),
    )
    yield Fact(
        "with a head that is rotated in part",
        lambda case, i: case.rotary_dim not in (0, case.head_dim),
        lambda case: case.replace(rotary_dim=0),
    )
    yield Fact(
        "with a sequence without queries",
        lambda case, i: 0 in case.q_lens,
        lambda case: _lens(case, lambda q, n: (max(q, 1), max(n, 1))),
    )
    yield Fact(
        "with a right side of the window",
        lambda case, i: (case.window[1] or 0) > 0,
        lambda case: case.replace(window=(case.window[0], 0)),
    )


def _lens(case: Case, change: Callable[[int, int], tuple[int, int]]) -> Case:
    lens = [change(q, n) for q, n in zip(case.q_lens, case.kv_lens)]
    return case.replace(q_lens=tuple(q for q, _ in lens), kv_lens=tuple(n for _, n in lens))


def sequence_facts() -> Iterator[Fact]:
    """Relations of a sequence's lengths to the page size and the window. Removing one changes the lengths by a few tokens."""

    def fact(text: str, holds: Callable[[Case, int, int], bool], change: Callable[[Case, int, int], tuple[int, int]]) -> Fact:
        return Fact(
            text,
            lambda case, i: holds(case, case.q_lens[i], case.kv_lens[i]),
            lambda case: _lens(case, lambda q, n: change(case, q, n) if q and holds(case, q, n) else (q, n)),
            of_sequence=True,
        )

    yield fact("in sequences with queries and without keys", lambda c, q, n: n == 0, lambda c, q, n: (q, q))
    yield fact("in sequences with one new token", lambda c, q, n: q == 1, lambda c, q, n: (2, max(n, 2)))
    yield fact("in sequences with several new tokens", lambda c, q, n: q > 1, lambda c, q, n: (1, n))
    yield fact("in sequences without context", lambda c, q, n: q == n, lambda c, q, n: (q, n + 3))
    yield fact("in sequences with context", lambda c, q, n: n > q, lambda c, q, n: (q, q))
    yield fact("in sequences with several new tokens and a context", lambda c, q, n: 1 < q < n, lambda c, q, n: (1, n))
    yield fact("in sequences with more new tokens than a page", lambda c, q, n: q > c.page_size, lambda c, q, n: (c.page_size, n))
    yield fact("in sequences that end within a page", lambda c, q, n: n % c.page_size > 0, _to_page_end)
    yield fact("in sequences that fill their last page", lambda c, q, n: n > 0 and n % c.page_size == 0, lambda c, q, n: (q, n + 1))
    yield fact(
        "in sequences whose context is a multiple of the page size",
        lambda c, q, n: n > q and (n - q) % c.page_size == 0,
        lambda c, q, n: (q, n + 1),
    )
    yield fact(
        "in sequences of more than one page", lambda c, q, n: n > c.page_size, lambda c, q, n: (min(q, c.page_size), c.page_size)
    )
    yield fact(
        "in sequences longer than the window",
        lambda c, q, n: c.window[0] is not None and n > c.window[0] + 1,
        lambda c, q, n: (min(q, (c.window[0] or 0) + 1), (c.window[0] or 0) + 1),
    )


def _to_page_end(case: Case, q: int, n: int) -> tuple[int, int]:
    return q, -(-n // case.page_size) * case.page_size


def thresholds(failing: list[tuple[Case, int]], passing: list[tuple[Case, int]], of_sequence: bool) -> Iterator[Fact]:
    """Numbers that are larger, or smaller, in all failing cases or sequences than in the passing ones."""
    for number in OF_SEQUENCES if of_sequence else OF_CASES:
        bad, good = [number.value(*one) for one in failing], [number.value(*one) for one in passing]
        under = [n for n in good if n < min(bad, default=0)]
        over = [n for n in good if n > max(bad, default=0)]
        if bad and under:
            yield _at_least(number, min(bad), max(under), of_sequence)
        if bad and over:
            yield _at_most(number, max(bad), min(over), of_sequence)


class CaseNumber(NamedTuple):
    """A number of a case or a sequence."""

    name: str
    value: Callable[[Case, int], int]
    set_to: Callable[[Case, int], Case]
    """The case with another value."""


def _at_least(number: CaseNumber, least: int, passing: int, of_sequence: bool) -> Fact:
    return Fact(
        f"from {number.name} {least} on",
        lambda case, i: number.value(case, i) >= least,
        lambda case: number.set_to(case, passing),
        of_sequence,
        f"correct up to {passing}",
        Threshold(number.name, least, passing, number.set_to),
    )


def _at_most(number: CaseNumber, most: int, passing: int, of_sequence: bool) -> Fact:
    return Fact(
        f"up to {number.name} {most}",
        lambda case, i: number.value(case, i) <= most,
        lambda case: number.set_to(case, passing),
        of_sequence,
        f"correct from {passing} on",
    )


def _of_field(name: str) -> CaseNumber:
    return CaseNumber(name, lambda case, i: int(getattr(case, name)), lambda case, n: case.replace(**{name: n}))


def _with_sequences(case: Case, n: int) -> Case:
    times = -(-n // max(case.seqs, 1))
    return case.replace(q_lens=(case.q_lens * times)[:n], kv_lens=(case.kv_lens * times)[:n])


OF_CASES = (*map(_of_field, SIZES), CaseNumber("a number of sequences of", lambda case, i: case.seqs, _with_sequences))
OF_SEQUENCES = (
    CaseNumber(
        "kv_len",
        lambda case, i: case.kv_lens[i],
        lambda case, n: _lens(case, lambda q, kv: (min(q, n), min(kv, n)) if q else (q, kv)),
    ),
    CaseNumber("q_len", lambda case, i: case.q_lens[i], lambda case, n: _lens(case, lambda q, kv: (min(q, n), kv))),
    CaseNumber(
        "a context of",
        lambda case, i: case.kv_lens[i] - case.q_lens[i],
        lambda case, n: _lens(case, lambda q, kv: (q, q + min(kv - q, n)) if q else (q, kv)),
    ),
)
