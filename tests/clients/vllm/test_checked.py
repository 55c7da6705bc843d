"""QUIRE_VLLM_CHECKED in a running engine: it names faults of the engine, with the rule, the layer and the place, and finds none in
a correct one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import start
from test_tokens import happened, mixed_request

LAYER = "layer model.layers.1.self_attn.attn"
CHECKED = {"QUIRE_VLLM_OVERRIDE": "CPU_ATTN", "QUIRE_VLLM_CHECKED": "1"}


def request(model: Path, fault: str | None, **engine: Any) -> dict[str, Any]:
    """A few requests, with a fault."""
    return mixed_request(model, **engine) | {"requests": 3, "fault": fault}


def test_dropped_scales_are_named(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    asked = request(model_path("llama"), "dropped scales", kv_cache_dtype="fp8")
    text = start(tmp_path, "faulty", asked, **CHECKED).text()
    print(text[-1500:])
    assert f"attention of {LAYER}: " in text
    assert "[written-scales]" in text and "written with other values of k_scale and v_scale" in text and "slot" in text


def test_a_cache_that_was_never_written_is_named(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    text = start(tmp_path, "faulty", request(model_path("llama"), "cache never written"), **CHECKED).text()
    print(text[-1500:])
    assert f"attention of {LAYER}: " in text
    assert "[residency]" in text and "never written" in text and "slot" in text


def test_unchecked_runs_do_not_notice(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    """What the setting is for: without it both faults give wrong tokens and nothing else."""
    asked = request(model_path("llama"), "cache never written")
    start(tmp_path, "unnoticed", asked, QUIRE_VLLM_OVERRIDE="CPU_ATTN").wait()


@pytest.mark.parametrize(("name", "cache_type"), [("gemma2", "auto"), ("llama", "fp8")])
def test_a_correct_engine_passes(name: str, cache_type: str, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    """With reused, shared and preempted pages, rejected drafts and pages that windows released."""
    asked = mixed_request(model_path(name), kv_cache_dtype=cache_type)
    happened(start(tmp_path, "right", asked | {"fault": "none, with scales"}, **CHECKED).wait())
