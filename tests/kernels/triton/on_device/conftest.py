"""These tests run where Triton can run something: on a GPU, or in its interpreter, which TRITON_INTERPRET=1 switches on.

`../test_interpreter.py` runs all of them in processes of their own, in the interpreter. One by one, by hand:
TRITON_INTERPRET=1 python -m pytest tests/kernels/triton/on_device -k window
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from support import hopper, interpreter

DEVICE = "cpu" if interpreter.ON else "cuda"

if interpreter.ON:
    TAKEN = interpreter.install()
    hopper.install()
    torch.set_num_threads(1)  # tensors are small: threads would only wait for each other
elif not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> str:
    return DEVICE


def pytest_sessionfinish(session: Any) -> None:
    """Leaves the outcomes of the kernels' branches in the file that BRANCHES_TAKEN names."""
    if interpreter.ON and "BRANCHES_TAKEN" in os.environ:
        with open(os.environ["BRANCHES_TAKEN"], "w") as file:
            json.dump(sorted(TAKEN.seen), file)
