"""Quire in transformers, the part that every run of the suite has; the rest is in tests/clients/transformers."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'quire[transformers]'")

import quire.integrations.transformers as integration
from support.transformers_models import LAYERS, batched, generated, launches, model, one_by_one, padded, prompts


@pytest.mark.parametrize("name, cache", [("llama", "dynamic"), ("gemma2", "static"), ("gpt_oss", "dynamic"), ("bloom", "dynamic")])
def test_generate(name: str, cache: str) -> None:
    inputs = padded(29, 9)
    how = {"cache_implementation": "static"} if cache == "static" else {}
    expected = generated(model(name, "eager"), inputs, 12, **how)
    with launches() as seen:
        assert generated(model(name, "quire"), inputs, 12, **how) == expected
    assert len(seen) == LAYERS * 12


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generate_batch(name: str) -> None:
    # Not importorskip: tests/kernels is a folder on the path, which can be imported too.
    if find_spec("kernels.importer") is None:
        pytest.skip("the package kernels is not installed: pip install 'quire[transformers]'")
    rows = prompts(3, 70, 30)
    expected = one_by_one(model(name, "eager"), rows, 12)
    with launches() as seen:
        assert batched(model(name, integration.FLASH), rows, 12) == expected
    assert seen
    assert any(step.is_ring for _, step in seen.steps) == (name == "gemma3")
