"""No false alarm over our Triton kernels in Triton's interpreter: some cases of each; `interpreted.py` runs whole levels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
numpy = pytest.importorskip("numpy")


def version(module: Any) -> tuple[int, ...]:
    return tuple(map(int, module.__version__.split(".")[:2]))


pytestmark = pytest.mark.skipif(
    version(triton) < (3, 7) and version(numpy) >= (2, 4),
    reason=f"the interpreter of Triton {triton.__version__} does not work with NumPy {numpy.__version__}",
)


@pytest.mark.parametrize(
    ("kernel", "right", "refused"),
    [
        ("triton-mixed", ["mixed", "context-form", "tree", "everything"], []),
        ("triton-decode", ["decode-fp8", "decode-far", "decode-everything", "mixed"], []),
        ("triton-shared", ["prefixes-decode"], ["mixed", "prefixes"]),
        ("write.triton", ["write-skipped", "write-nvfp4", "rope-interleaved", "rope-int8-tokens", "write-hadamard"], []),
    ],
    ids=["mixed", "decode", "shared", "write"],
)
def test_no_false_alarm(kernel: str, right: list[str], refused: list[str]) -> None:
    only = f"^({'|'.join((*right, *refused))})$"
    script = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, str(script), kernel, "--level", "standard", "--json", "--only", only]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    statuses = {result["name"]: result["status"] for result in json.loads(done.stdout)["results"]}
    assert statuses == dict.fromkeys(right, "correct") | dict.fromkeys(refused, "refused")
