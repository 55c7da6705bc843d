"""Quire under vLLM's own distribution, with two CPU ranks: tensor parallelism and decode context parallelism."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import VOCABULARY
from running import HERE, compare, start


def parallel_request(model: Path, **engine: Any) -> dict[str, Any]:
    """A few prompts."""
    common = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return {
        "engine": {"model": str(model), "block_size": 32, "num_gpu_blocks_override": 64} | common | engine,
        "requests": 6,
        "longest": 200,
        "max_tokens": 12,
        "seed": 5,
        "vocabulary": VOCABULARY,
    }


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_two_ranks_of_heads_give_the_tokens_of_one_rank(name: str, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    model = model_path(name)
    one = start(tmp_path, "one", parallel_request(model), "parallel_run.py").wait()
    request = parallel_request(model, tensor_parallel_size=2)
    two = start(tmp_path, "two", request, "parallel_run.py", QUIRE_VLLM_OVERRIDE="CPU_ATTN").wait()
    # Each of two ranks has half of the 4 heads, in each layer.
    ran = two.counts["ran"]
    assert len(ran) == 2 and all(layer == "QuireImpl 2" for rank in ran for layer in rank) and all(len(rank) >= 3 for rank in ran)
    found = compare(one, two, model)
    print(name, found)
    assert found.agrees, found


@pytest.mark.parametrize("interleave", [1, 16])
def test_two_ranks_of_keys_give_attention_over_all_keys(interleave: int) -> None:
    """Decode context parallelism, in vLLM's process groups. vLLM's engine itself refuses it on CPUs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = (sys.executable, str(HERE / "context_parallel_ranks.py"))
    ranks = [
        subprocess.Popen((*command, str(rank), port, str(interleave)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    for rank, text in enumerate(printed):
        assert f"rank {rank} of 2: 4 sequences agree" in text, text[-4000:]
