"""The runner of vLLM's own tests: files that import vLLM find Quire."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parent / "upstream" / "run.py"

FOREIGN = """
import pytest, torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, set_random_seed
from vllm.v1.attention.ops.chunked_prefill_paged_decode import chunked_prefill_paged_decode
from vllm.v1.attention.ops.prefix_prefill import context_attention_fwd
import quire.compat.vllm

pytestmark = pytest.mark.skip_global_cleanup

@pytest.mark.parametrize("device", [f"cuda:{i}" for i in range(torch.accelerator.device_count())])
def test_it_is_quire(device):
    set_random_seed(0)
    torch.accelerator.set_device_index(device)
    assert device == "cpu" and current_platform.has_device_capability(89) and not current_platform.is_rocm()
    assert STR_DTYPE_TO_TORCH_DTYPE["fp8_e5m2"] is torch.uint8
    assert chunked_prefill_paged_decode is quire.compat.vllm.chunked_prefill_paged_decode

@pytest.mark.optional
def test_optional():
    assert context_attention_fwd is quire.compat.vllm.context_attention_fwd

@pytest.mark.parametrize("head_size, kv_cache_dtype", [(24, "auto"), (128, "auto")])
def test_contexted_kv_attention_cached_kv(head_size, kv_cache_dtype):
    assert head_size == 24
"""
UNIFIED = """
import torch
from vllm.platforms import current_platform
from vllm.utils.math_utils import next_power_of_2
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.kv_cache_interface import KVQuantMode

def test_names():
    assert current_platform.device_type == "cpu" and current_platform.fp8_dtype() is torch.float8_e4m3fn
    assert next_power_of_2(96) == 128 and KVQuantMode.FP8_PER_TENSOR == 1

def test_that_fails():
    assert False
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RUN), *arguments], capture_output=True, text=True, timeout=900)


def test_foreign_files_find_quire(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "test_prefix_prefill.py").write_text(FOREIGN)
    (tmp_path / "test_triton_unified_attention.py").write_text(UNIFIED)
    (tmp_path / "conftest.py").write_text("raise RuntimeError('needs all of vLLM')")
    done = run(str(tmp_path), "--cpu", "-q")
    assert "1 failed, 3 passed, 1 skipped, 1 deselected" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1
    done = run(str(tmp_path), "--cpu", "-q", "--optional", "-k", "not fails")
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr


def test_a_folder_without_them(tmp_path: Path) -> None:
    done = run(str(tmp_path))
    assert done.returncode == 2 and "holds neither" in done.stderr
    assert run().returncode == 2
