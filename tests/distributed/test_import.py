"""quire.distributed is imported only by its name."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, quire
[getattr(quire, name) for name in quire.__all__]
print("quire.distributed" in sys.modules)
import quire.distributed
print("quire.distributed" in sys.modules)
"""


def test_quire_does_not_import_it() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_without_a_process_group() -> None:
    code = "import quire.distributed\nquire.distributed.TensorParallel(q_heads=8, kv_heads=2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert "ArgumentError: group: given no process group: torch.distributed is not initialized" in done.stderr
