"""The example of the documentation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "integrations" / "vllm_generate.py"


def run(**environment: str) -> list[str]:
    """What the example prints, with a model of its own."""
    settings = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    inherited = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    done = subprocess.run(
        (sys.executable, EXAMPLE), env=inherited | settings | environment, capture_output=True, text=True, timeout=400
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout.splitlines()[-4:]


def test_the_example_gives_the_tokens_of_the_stock_backend() -> None:
    *stock, of_stock = run()
    *tokens, attention = run(QUIRE_VLLM_OVERRIDE="CPU_ATTN")
    assert tokens == stock and len(tokens) == 3
    assert (of_stock, attention) == ("attention: CPUAttentionBackendImpl", "attention: QuireImpl")
