"""What single arguments mean, where no other test could tell: each has a value here that is not the usual one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from compat.calls import close_in_fp8, in_cache, kernel_2d, rocm, unified
from compat.case import Case, build
from quire.compat.vllm import caches, chunked_prefill_paged_decode, context_attention_fwd
from quire.platform import Platform

MIXED: dict[str, Any] = {"q_lens": [1, 9, 1, 30, 0, 2], "seq_lens": [40, 40, 1, 75, 33, 18]}
DECODES: dict[str, Any] = {"q_lens": [1, 1, 1, 1], "seq_lens": [40, 1, 130, 17]}
MIXTURES = [chunked_prefill_paged_decode, context_attention_fwd]


def mixture(op: Any, device: str, **spec: Any) -> Case:
    """A case for an operator: which rows bring their new tokens along differs."""
    return build(device, **MIXED, dense_from=2 if op is chunked_prefill_paged_decode else 1, **spec)


@pytest.mark.parametrize("spec", [{"causal": False}, {"causal": False, "window": 6}, {"scale": 0.05}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("op", MIXTURES)
def test_of_a_mixed_batch(op: Any, spec: dict[str, Any], device: str) -> None:
    case = mixture(op, device, **spec)
    case.run(op)
    case.check()


@pytest.mark.parametrize("off", [-1, 0, None])
@pytest.mark.parametrize("op", MIXTURES)
def test_no_window(op: Any, off: int | None, device: str) -> None:
    case = mixture(op, device)
    case.run(op, sliding_window=off)
    case.check()


@pytest.mark.parametrize("scale", [0.01, 0.007])
@pytest.mark.parametrize("op, name", [(MIXTURES[0], "output_scale"), (MIXTURES[1], "fp8_out_scale")])
def test_the_scale_of_an_fp8_output(op: Any, name: str, scale: float, device: str) -> None:
    case = mixture(op, device)
    case.arguments["output"] = torch.zeros(case.output.shape, dtype=torch.float8_e4m3fn, device=device)
    case.run(op, **{name: torch.tensor([scale], device=device)})
    close_in_fp8(case, case.output, scale)


@pytest.mark.parametrize("call", [rocm, kernel_2d])
def test_the_scale_of_logits(call: Callable[[Case], None], device: str) -> None:
    case = build(device, **DECODES, scale=0.05)
    call(case)
    case.check()


@pytest.mark.parametrize("window", [1, 2])
def test_a_window_of_a_querys_own_key(window: int, device: str) -> None:
    """`window_size` counts the keys before it: 0 is a window."""
    case = in_cache(device, **MIXED, window=window)
    unified(case)
    case.check()


@pytest.fixture
def formats() -> Iterator[None]:
    """What strings mean is remembered: not from one platform to the next."""
    caches.format_named.cache_clear()
    yield
    caches.format_named.cache_clear()


@pytest.mark.parametrize("arch, flavour", [("gfx942", "e4m3fnuz"), ("gfx950", "e4m3fn"), ("gfx1201", "e4m3fn"), ("sm90", "e4m3fn")])
@pytest.mark.parametrize("string", ["fp8", "fp8_e4m3"])
def test_fp8_bytes_are_the_platforms(string: str, arch: str, flavour: str, formats: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Platform, "detect", classmethod(lambda cls, device=None: cls.named(arch)))
    keys, values = torch.zeros(2, 1, 2, 16, 8, dtype=torch.uint8), torch.zeros(2, 1, 16, 16, dtype=torch.uint8)
    assert caches.x_packed(string, keys, values, 1.0, 1.0).format.name == flavour
    # A type says it itself.
    typed = [t.view(torch.float8_e4m3fn) for t in (keys, values)]
    assert caches.x_packed(string, *typed, 1.0, 1.0).format.name == "e4m3fn"
