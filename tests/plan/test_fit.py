"""The parameters of the time model are those of a fit to these rows and no others. Each has as many rows as parameters, or more."""

from __future__ import annotations

import pytest

from quire.plan.kernel_rates import FITTED, LONG_KERNELS
from support.plan_rows import FACTORS_FIT, FIT_KEYS, KERNELS_FIT, RATES_FIT, TODAYS, Row, all_rows, solve

ROUNDING = 5e-3
"""The constants are written with three digits."""


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], Row]:
    return {row.key: row for row in all_rows()}


@pytest.mark.parametrize("names", RATES_FIT, ids="-".join)
def test_rates_are_the_fit(names: tuple[str, ...], rows: dict[tuple[str, str], Row]) -> None:
    start = {name: 0.8 * getattr(FITTED, name) for name in names}  # from the slow side: a faster conversion has no effect
    found = solve([rows[key] for key in RATES_FIT[names]], start, lambda given: (FITTED._replace(**given), LONG_KERNELS))
    assert found == pytest.approx({name: getattr(FITTED, name) for name in names}, rel=ROUNDING)


@pytest.mark.parametrize("names", KERNELS_FIT, ids="-".join)
def test_kernels_are_the_fit(names: tuple[str, ...], rows: dict[tuple[str, str], Row]) -> None:
    kernel, *fields = names
    rates = LONG_KERNELS[kernel]
    start = {field: 0.8 * getattr(rates, field) for field in fields}
    found = solve(
        [rows[key] for key in KERNELS_FIT[names]], start, lambda given: (FITTED, {**LONG_KERNELS, kernel: rates._replace(**given)})
    )
    assert found == pytest.approx({field: getattr(rates, field) for field in fields}, rel=ROUNDING)


@pytest.mark.parametrize("name", FACTORS_FIT)
def test_factors_are_the_fit(name: str, rows: dict[tuple[str, str], Row]) -> None:
    assert abs(rows[TODAYS, name].error) <= ROUNDING


def test_most_rows_are_not_in_the_fit(rows: dict[tuple[str, str], Row]) -> None:
    assert FIT_KEYS <= rows.keys()
    parameters = sum(map(len, RATES_FIT)) + sum(len(names) - 1 for names in KERNELS_FIT) + len(FACTORS_FIT)
    assert parameters == 20 and len(rows) - len(FIT_KEYS) >= 2.5 * parameters
