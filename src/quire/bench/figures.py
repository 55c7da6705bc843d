"""Single figures with a limit, as `quire bench --host` and `--pool` print them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from quire.bench.host import HostTiming


class Figure(NamedTuple):
    """One figure."""

    name: str
    value: float | None
    """Seconds, or bytes if the name says so; None if it could not be measured."""
    limit: float | None = None
    """The most that is allowed; None if there is no limit."""
    note: str = ""

    @property
    def unit(self) -> str:
        return "bytes" if "bytes" in self.name else "us"

    @property
    def passed(self) -> bool | None:
        return None if self.value is None or self.limit is None else self.value <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return self._asdict() | {"unit": "bytes" if self.unit == "bytes" else "seconds", "passed": self.passed}


CPU_LIMITS = {"attend": 60e-6, "step": 100e-6}
"""For one sequence, kernel included."""
MOST_OVERHEAD = 60e-6
"""The largest overhead of a call with more sequences."""


def of_cpu_host(timings: Iterable[HostTiming]) -> Iterator[Figure]:
    """Two figures for each timing. A limit applies to the total time for one sequence, and to the overhead for more."""
    for row in timings:
        name = f"{row.operation} on the CPU, {row.seqs} x {row.kv_len} keys"
        whole, beyond = row.total * 1e-6, (row.total - row.kernel) * 1e-6
        note = f"kernel {row.kernel:.1f} us, one small torch operator {row.operator:.2f} us"
        one = row.seqs == 1
        yield Figure(name, whole, CPU_LIMITS.get(row.operation) if one else None, f"{row.total / row.operator:.0f} x; {note}")
        times = f"{(row.total - row.kernel) / row.operator:.0f} x"
        yield Figure(f"{name}, beyond the kernel", beyond, None if one else MOST_OVERHEAD, times)


def table(figures: Iterable[Figure]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head, and a line for each figure."""
    words = {True: "pass", False: "FAIL", None: ""}
    return ("figure", "note", "us or bytes", "limit", ""), [
        (row.name, row.note, _number(row.value, row.unit) or "not measured", _number(row.limit, row.unit), words[row.passed])
        for row in figures
    ]


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value * (1e6 if unit == 'us' else 1.0):.1f}"
