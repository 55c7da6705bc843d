"""Spans: every kind of them with every feature in both forms, against a reference that compares each key with each span."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quire
from quire import KVCache, Options, PagePool
from quire.contract.call import Call
from quire.kernels.triton.host.tuning import SMALL, SMALLEST
from support.launched import attend, audit, card, run
from support.scenario import build

LENS: dict[str, Any] = {"q_lens": [1, 40, 3, 0, 20, 1], "kv_lens": [5, 40, 100, 7, 90, 70], "padding": 2, "page_size": 8}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi": {"alibi": True},
    "softcap-sinks": {"softcap": 2.0, "sinks": True},
    "shard": {"shard": (1, 3, 5), "alibi": True},
    "invariant": {"batch_invariant": True},
    "quantised": {"format": "int8", "scales": "token", "layout": "vllm_x", "group": 3, "q_dtype": "bf16"},
}


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
@pytest.mark.parametrize("form", ["full", "context"])
@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, form: str, kernel: str, device: str) -> None:
    which = list(FEATURES).index(name) + 2 * (form == "context") + (kernel == "mixed")
    index = (torch.int64,) * 3 if which % 2 else (torch.int32,) * 3
    kind = ("any", "images", "chunks")[which % 3]
    attend(kernel, device, **LENS, form=form, spans=kind, index=index, **FEATURES[name])


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
@pytest.mark.parametrize("form", ["full", "context"])
@pytest.mark.parametrize("kind", ["causal", "any", "chunks"])
def test_work_is_split(kind: str, form: str, kernel: str, device: str) -> None:
    """More programs than sequences: the parts of a unit are combined."""
    case: dict[str, Any] = {"q_lens": [1, 3, 25, 1], "kv_lens": [300, 150, 200, 250], "form": form, "page_size": 4}
    attend(kernel, device, **case, spans=kind, how={"platform": card(device, 40), "tuning": SMALL})
