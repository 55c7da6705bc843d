"""`use_rocm_custom_paged_attention`: vLLM's rule, and no where its kernel would not run."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from quire import ArgumentError, Platform
from quire.compat.vllm import use_rocm_custom_paged_attention

FITS: dict[str, Any] = {"qtype": torch.float16, "head_size": 128, "block_size": 16, "gqa_ratio": 8, "max_seq_len": 4096}
FITS |= {"sliding_window": 0, "kv_cache_dtype": "auto"}


def ask(arch: str, **changes: Any) -> bool:
    return use_rocm_custom_paged_attention(**(FITS | changes), platform=Platform.named(arch))


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_it_is_chosen(arch: str) -> None:
    assert ask(arch)
    assert ask(arch, sliding_window=(-1, -1))
    assert ask(arch, qtype=torch.bfloat16)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 128},
        {"sliding_window": (127, 0)},
        {"sliding_window": None},
        {"sliding_window": -1},
        {"qtype": torch.float32},
        {"qtype": torch.float64},
        {"head_size": 96},
        {"block_size": 544},
        {"gqa_ratio": 64},
        {"max_seq_len": 131073},
        {"sinks": torch.zeros(8)},
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_it_is_not(arch: str, change: dict[str, Any]) -> None:
    assert not ask(arch, **change)


def test_two_documents_contradict_each_other() -> None:
    """64 heads over 64 kv heads are ratio 1, which CDNA takes and RDNA does not; over one kv head ratio 64, which nobody takes."""
    assert ask("gfx942", gqa_ratio=1) and not ask("gfx942", gqa_ratio=64)
    assert not ask("gfx1100", gqa_ratio=1) and ask("gfx1100", gqa_ratio=3)


@pytest.mark.parametrize(
    "arch, change", [("gfx906", {}), ("gfx908", {}), ("gfx1250", {}), ("gfx942", {"kv_cache_dtype": "fp8_e5m2"})]
)
def test_no_where_upstream_says_yes_and_then_traps_or_raises(arch: str, change: dict[str, Any]) -> None:
    assert not ask(arch, **change)


def test_alibi() -> None:
    assert ask("gfx942", alibi_slopes=torch.ones(8)) and not ask("gfx1100", alibi_slopes=torch.ones(8))


def test_on_this_machine() -> None:
    answer = use_rocm_custom_paged_attention(*FITS.values())
    assert answer == (torch.version.hip is not None and answer)


def test_the_rule_keeps_no_reference_to_its_arguments() -> None:
    """Upstream caches its answers by the tensors themselves."""
    slopes = torch.ones(8)
    ask("gfx942", alibi_slopes=slopes)
    watched = weakref.ref(slopes)
    del slopes
    gc.collect()
    assert watched() is None


def test_the_rule_of_november_2025() -> None:
    assert not use_rocm_custom_paged_attention(**FITS, rule="2025-11", platform=Platform.named("gfx908"))
    assert use_rocm_custom_paged_attention(**FITS, rule="2025-11", platform=Platform.named("gfx90a"))


def test_a_ratio_of_no_heads_is_refused_by_its_name() -> None:
    with pytest.raises(ArgumentError, match="gqa_ratio: given 0"):
        ask("gfx942", gqa_ratio=0)
