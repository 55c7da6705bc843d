"""`import quire` loads nothing heavy, its names load torch and no more; help, completion and the pytest plugin load no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HEAVY = ("torch", "numpy", "triton", "transformers", "vllm", "rich", "quire.reference", "quire.cli", "quire.bench")

PROBE = """
import json, sys, time
{before}
before, start = set(sys.modules), time.perf_counter()
import {module}
{after}
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "loaded": sorted(set(sys.modules) - before)}}))
"""


def heavy_in(loaded: list[str]) -> list[str]:
    return [name for name in HEAVY if name in loaded]


def loaded_by(python: Callable, module: str, before: str = "", after: str = "") -> dict[str, Any]:
    probe = python("-c", PROBE.format(module=module, before=before, after=after))
    assert probe.returncode == 0, probe.stderr
    return json.loads(probe.stdout)


def test_import_quire_is_light(python: Callable, record_property: Callable) -> None:
    answer = loaded_by(python, "quire")
    record_property("import quire", f"{answer['seconds']:.2f} s")
    assert "quire" in answer["loaded"]
    assert heavy_in(answer["loaded"]) == []


def test_public_names_load_torch_and_no_more(python: Callable) -> None:
    names = "[getattr(quire, name) for name in quire.__all__ if name not in ('reference', 'record')]"
    answer = loaded_by(python, "quire", before="import torch", after=names)
    assert "quire.attend" in answer["loaded"]
    assert heavy_in(answer["loaded"]) == []


@pytest.mark.parametrize("module", ["rich.table", "quire.reference", "quire.attend"])
def test_the_probe_sees(python: Callable, module: str) -> None:
    assert heavy_in(loaded_by(python, module)["loaded"])


@pytest.mark.parametrize("line", [["--help"], ["--version"], ["help"], ["completion", "bash"], ["example"]], ids=" ".join)
def test_help_loads_no_torch(python: Callable, line: list[str]) -> None:
    answer = loaded_by(python, "quire.cli", before="import os", after=RUN.format(line=line))
    assert set(heavy_in(answer["loaded"])) <= {"quire.cli"}


RUN = "sys.stdout = open(os.devnull, 'w'); assert quire.cli.main({line}) == 0; sys.stdout = sys.__stdout__"


def test_completion_of_commands_loads_no_torch(python: Callable) -> None:
    code = (
        "import os, sys; os.environ.update(_QUIRE_COMPLETE='bash_complete', COMP_WORDS='quire ex', COMP_CWORD='1')\n"
        "import atexit; atexit.register(lambda: print('torch' in sys.modules))\n"
        "from quire.cli import main; sys.argv = ['quire']; main()"
    )
    done = python("-c", code)
    assert done.stdout.split() == ["plain,example", "plain,explain", "False"], done.stderr


def test_the_pytest_plugin_loads_no_torch(python: Callable, tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("import sys\n\ndef test():\n    assert 'torch' not in sys.modules\n")
    plugins = ("-p", "quire.conformance.plugin", "-p", "no:cacheprovider")
    done = python("-m", "pytest", "-q", *plugins, "--rootdir", str(tmp_path), "-c", os.devnull, str(tmp_path))
    assert done.returncode == 0, done.stdout


def test_quire_runs_where_triton_is_missing(python: Callable) -> None:
    """The package declares triton on Linux only: elsewhere everything but its kernels must work."""
    code = """
import sys
sys.modules["triton"] = sys.modules["rich"] = sys.modules["transformers"] = None
import torch, quire
pool = quire.PagePool(pages=4, page_size=4)
cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=torch.float32)
batch = pool.step({pool.sequence(): 5})
q, k, v = torch.randn(3, 5, 1, 8)
assert torch.isfinite(quire.step(q, k, v, cache, batch)).all()
print(quire.explain(q, cache, batch))
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
