"""The kernel folder: it loads as a repository of the Hub does, and has the functions of FlashAttention."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import kernels
import quire.integrations.transformers as integration
from quire.errors import ArgumentError
from quire.integrations.engines import Engine, EngineError

KERNEL = kernels.get_kernel(integration.FLASH, version=1)
EPS = torch.finfo(torch.float32).eps


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Within the rounding of sums of up to 64 products of numbers of magnitude 4 and less."""
    return bool((got - want).abs().max() <= 64 * EPS * 4)


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True, window: int | None = None) -> torch.Tensor:
    """Attention of [tokens, heads, dim] in float64; the queries are the last tokens."""
    at = torch.arange(len(q))[:, None] + len(k) - len(q)
    seen = torch.arange(len(k))[None] <= at if causal else torch.ones(len(q), len(k), dtype=torch.bool)
    if window is not None:
        seen = seen & (torch.arange(len(k))[None] >= at - window)
    group = q.shape[1] // k.shape[1]
    rows = [x.double().transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))]
    return scaled_dot_product_attention(*rows, attn_mask=seen).transpose(0, 1).float()


def test_the_folder_has_one_variant_for_every_device() -> None:
    """`kernels` accepts a universal variant everywhere; the backend that its metadata must name has no architectures to compare."""
    (variant,) = integration.hub_folder().iterdir()
    assert variant.name == "torch-universal"
    (loaded,) = [kernel for kernel in kernels.get_loaded_kernels() if kernel.module is KERNEL]
    assert (loaded.metadata.version, loaded.metadata.python_depends, loaded.metadata.backend.archs) == (1, [], None)


@pytest.mark.parametrize("causal, window", [(True, None), (False, None), (True, 5)])
def test_dense_and_packed(causal: bool, window: int | None) -> None:
    q, k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 20, 2, 16), torch.randn(2, 20, 2, 16)
    how = {"causal": causal, "window_size": (-1, -1) if window is None else (window, 0)}
    want = torch.stack([expected(*row, causal, window) for row in zip(q, k, v)])
    assert close(KERNEL.flash_attn_func(q, k, v, **how), want)
    starts_q, starts_k = torch.tensor([0, 9, 18], dtype=torch.int32), torch.tensor([0, 20, 40], dtype=torch.int32)
    packed = KERNEL.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), starts_q, starts_k, max_seqlen_q=9, max_seqlen_k=20, **how
    )
    assert close(packed, want.flatten(0, 1))


def test_paged_cache_is_written_and_read() -> None:
    lens = [5, 0, 11, -1]
    pages_k, pages_v = torch.randn(10, 4, 2, 16), torch.randn(10, 4, 2, 16)
    table = torch.tensor([[3, 1, -1], [7, -1, -1], [0, 9, 5], [-1, -1, -1]], dtype=torch.int32)
    q, k, v = torch.randn(4, 1, 4, 16), torch.randn(4, 1, 2, 16), torch.randn(4, 1, 2, 16)
    before = pages_k.clone()
    out = KERNEL.flash_attn_with_kvcache(
        q, pages_k, pages_v, k, v, cache_seqlens=torch.tensor(lens, dtype=torch.int32), block_table=table, causal=True
    )
    for i, length in enumerate(lens[:3]):
        rows_k, rows_v = (pages[table[i].long().clamp(min=0)].flatten(0, 1)[: length + 1] for pages in (pages_k, pages_v))
        assert torch.equal(rows_k[-1], k[i, 0]) and torch.equal(rows_v[-1], v[i, 0])
        assert close(out[i], expected(q[i], rows_k, rows_v))
    assert not out[3].any()
    assert int((before != pages_k).flatten(2).any(-1).sum()) == 3


def test_what_is_not_supported_is_refused() -> None:
    q = k = v = torch.randn(1, 4, 2, 16)
    with pytest.raises(ArgumentError, match="dropout_p"):
        KERNEL.flash_attn_func(q, k, v, dropout_p=0.1)
    with pytest.raises(TypeError, match="alibi_slopes"):
        KERNEL.flash_attn_func(q, k, v, alibi_slopes=torch.ones(2))


SCRIPT = """
import torch, transformers
config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=300)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="quire/flash-attn2").eval()
how = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
batching = transformers.ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64)
out = model.generate_batch([[5, 6, 7], [8, 9]], generation_config=how, continuous_batching_config=batching, progress_bar=False)
function = transformers.AttentionInterface()["quire/flash-attn2"]
print(function.__module__, function.__name__, [len(request.generated_tokens) for request in out.values()])
"""


def test_a_program_that_does_not_import_quire() -> None:
    """The variable that `python -m quire.integrations.transformers` prints is all that a program needs."""
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_KERNELS"}
    how = {"capture_output": True, "text": True, "check": True}
    printed = subprocess.run((sys.executable, "-m", "quire.integrations.transformers"), env=environment, **how).stdout.strip()
    name, value = printed.split("=", 1)
    assert name == "LOCAL_KERNELS"
    done = subprocess.run((sys.executable, "-c", SCRIPT), env={**environment, name: value, "HF_HUB_OFFLINE": "1"}, **how)
    assert done.stdout.split("\n")[-2] == "quire.integrations.transformers.paged paged_attention [5, 5]"


AFTER_A_FAILURE = """
from support.transformers_models import CONFIGS, batched, generated, padded, prompts
import torch, transformers, quire.integrations.transformers as integration
def made(implementation):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS["gpt_oss"](), attn_implementation=implementation).eval()
try:
    made(integration.FLASH)
except ValueError as error:
    assert "vllm-flash-attn3" in str(error), error
else:
    raise AssertionError("it loaded")
integration.register(replace="kernels-community/vllm-flash-attn3")
with torch.no_grad():
    expected, model = made("eager"), made(integration.FLASH)
    print(generated(model, padded(9), 6) == generated(expected, padded(9), 6), len(batched(model, prompts(9, 30), new=5)))
"""


def test_gpt_oss_after_a_failure() -> None:
    """A model that failed without `replace` can be loaded in the same process: transformers would not try its kernel again."""
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_KERNELS"} | {"PYTHONPATH": paths}
    done = subprocess.run((sys.executable, "-c", AFTER_A_FAILURE), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "True 2"


def test_replace_needs_kernels() -> None:
    with mock.patch.object(Engine, "missing", lambda engine: ["kernels"]):
        with pytest.raises(EngineError, match=r"replace needs the package kernels.*pip install 'quire\[transformers\]'"):
            integration.register(replace="kernels-community/vllm-flash-attn3")
