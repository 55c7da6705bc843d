"""The cases for compute-sanitizer, without it: they are right, and compiled by the time it looks at them."""

from __future__ import annotations

import pytest

from gpu import sanitize
from gpu.calls import needs_gpu

pytestmark = needs_gpu


@pytest.mark.parametrize("name", sanitize.CASES)
def test_attend(name: str) -> None:
    sanitize.run_case(name)


def test_write() -> None:
    sanitize.run_write()
