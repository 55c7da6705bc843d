"""The host overhead of CPU calls: every figure is there, and the report shows each row. No time is asserted."""

from __future__ import annotations

import pytest

from quire.bench.host import measure_cpu_host, report
from quire.kernels.native.library import FILE, library
from support.kernels import NO_LIBRARY

pytestmark = pytest.mark.skipif(not FILE.exists(), reason=NO_LIBRARY)


def test_rows_and_report() -> None:
    rows = list(measure_cpu_host((1, 3), repetitions=2))
    assert [(row.operation, row.seqs, row.kv_len) for row in rows] == [
        ("attend", 1, 16),
        ("step", 1, 16),
        ("attend", 3, 16),
        ("step", 3, 16),
    ]
    for row in rows:
        assert min(row.total, row.kernel, row.checks, row.first_checks, row.launch, row.operator) > 0
        assert row.overhead == row.total - row.kernel
    text = report(rows)
    assert all(f"{row.operation}, {row.seqs} x 16 keys" in text for row in rows)
    assert "attend" not in vars(library()), "the library is used as it was"
