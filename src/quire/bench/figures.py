"""Single figures with a limit, as `quire bench --host` and `--pool` print them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """One figure."""

    name: str
    value: float | None
    """Seconds, or bytes if the name says so; None if it could not be measured."""
    limit: float | None = None
    """The most that is allowed; None if nothing is said about it."""
    note: str = ""

    @property
    def unit(self) -> str:
        return "bytes" if "bytes" in self.name else "us"

    @property
    def passed(self) -> bool | None:
        return None if self.value is None or self.limit is None else self.value <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return self._asdict() | {"unit": "bytes" if self.unit == "bytes" else "seconds", "passed": self.passed}


def figures(rows: Iterable[Any]) -> list[Figure]:
    """Rows of any measurement: mappings or tuples of a name, a value and a limit. Whatever follows becomes the note."""
    found = []
    for row in rows:
        if isinstance(row, Figure):
            found.append(row)
            continue
        if not isinstance(row, Mapping):
            names = getattr(row, "_fields", ("name", "value", "limit"))
            row = dict(zip(names, row))
        (_, name), (_, value), *more = row.items()
        rest = dict(more)
        limit = rest.pop("limit", None)
        note = ", ".join(f"{key} {_short(entry)}" for key, entry in rest.items() if entry not in (None, ""))
        found.append(Figure(str(name), value, limit, note))
    return found


CPU_LIMITS = {"attend": 60e-6, "step": 100e-6}
"""For one sequence, kernel included."""
MOST_OVERHEAD = 60e-6
"""What a call of more sequences may take beyond its kernel."""


def of_cpu_host(rows: Iterable[Any]) -> list[Figure]:
    """The rows of `quire.bench.host`, in microseconds: one sequence by its whole time, more by the time beyond the kernel."""
    found = []
    for row in rows:
        name = f"{row.operation} on the CPU, {row.seqs} x {row.kv_len} keys"
        whole, beyond = row.total * 1e-6, (row.total - row.kernel) * 1e-6
        note = f"kernel {row.kernel:.1f} us, one small torch operator {row.operator:.2f} us"
        one = row.seqs == 1
        found.append(
            Figure(name, whole, CPU_LIMITS.get(row.operation) if one else None, f"{row.total / row.operator:.0f} x; {note}")
        )
        times = f"{(row.total - row.kernel) / row.operator:.0f} x"
        found.append(Figure(f"{name}, beyond the kernel", beyond, None if one else MOST_OVERHEAD, times))
    return found


def table(rows: Iterable[Figure]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head, and a line for each figure."""
    words = {True: "pass", False: "FAIL", None: ""}
    return ("figure", "note", "us or bytes", "limit", ""), [
        (row.name, row.note, _number(row.value, row.unit) or "not measured", _number(row.limit, row.unit), words[row.passed])
        for row in rows
    ]


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value * (1e6 if unit == 'us' else 1.0):.1f}"


def _short(entry: Any) -> str:
    return f"{entry:.1f}" if isinstance(entry, float) else str(entry)
