"""The examples run as their first lines say, and their tokens are those of a single process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "distributed"
RANKS = {"tensor_parallel": 2, "context_parallel": 2, "combined": 4}


def test_every_example_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*RANKS, "decoder"}


@pytest.mark.parametrize("name", RANKS)
def test_example(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert f"torchrun --nproc-per-node {RANKS[name]} examples/distributed/{name}.py" in text
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS[name]), str(FOLDER / f"{name}.py")]
    # torchrun warns about threads that are not set, and its processes find quire where this one does.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal to a single process") == 1
    assert "rank 0 of" in done.stdout and done.stderr == ""


def test_attention_decides_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example that would generate the same tokens with wrong attention would show nothing."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import decoder
    import torch

    import quire

    model = decoder.Decoder()
    right = decoder.generate_alone(model)
    assert all(len(set(tokens)) > 4 for tokens in right)
    for wrong in (
        {"alibi": model.options.alibi.flip(0)},
        {"sinks": model.options.sinks.flip(0)},
        {"alibi": torch.zeros(8), "sinks": model.options.sinks},
    ):
        kept = {"alibi": model.options.alibi, "sinks": model.options.sinks}
        model.options = quire.Options(**kept | wrong)
        assert decoder.generate_alone(model) != right
        model.options = quire.Options(**kept)
