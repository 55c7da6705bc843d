"""`generate` with attn_implementation="quire": the tokens of eager attention, for every cache and way to generate."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from quire.integrations.transformers import alibi, dense, visible_keys
from support.transformers_models import CONFIGS, LAYERS, OWN_CODE, SLIDING, generated, launches, model, one_by_one, padded

LENGTHS = {"equal": (37, 37, 37), "padded": (37, 12, 30), "alone": (33,)}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_equal_eager(name: str, cache: str, lengths: str) -> None:
    """Both caches have sliding layers where the model has a window, and the texts grow to three windows."""
    inputs = padded(*LENGTHS[lengths])
    how = {"cache_implementation": "static"} if cache == "static" else {}
    expected = generated(model(name, "eager"), inputs, **how)
    with launches() as seen:
        assert generated(model(name, "quire"), inputs, **how) == expected
    # One forward pass for the prompt and one for each further token.
    assert len(seen) == LAYERS * len(expected[0])
    assert {launch.kernel for launch in seen} <= {"native", "torch"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_padded_row_is_as_if_alone(name: str) -> None:
    """Tokens of a batch with padding equal those of each request alone, without padding."""
    made, inputs = model(name, "quire"), padded(29, 7, 18)
    rows = [row[mask.bool()].tolist() for row, mask in zip(*inputs.values())]
    assert generated(made, inputs) == one_by_one(made, rows)


HOW: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 8},
    "hybrid cache": {"cache_implementation": "hybrid"},
    "sliding cache": {"cache_implementation": "sliding_window"},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bloom", "mpt"])
def test_ways_to_generate(name: str, how: str) -> None:
    alone = how == "prompt lookup"
    inputs = padded(*LENGTHS["alone" if alone else "padded"])
    if alone:
        # A prompt that repeats itself, so that lookup finds something.
        inputs = {key: torch.cat((rows, rows), 1) for key, rows in inputs.items()}
    with launches() as seen:
        assert generated(model(name, "quire"), inputs, **HOW[how]) == generated(model(name, "eager"), inputs, **HOW[how])
    assert seen
    if how == "chunked prefill":
        assert {launch.tokens for launch in seen} == {8 * 3, 5 * 3, 3}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_assisted_decoding(name: str) -> None:
    inputs = padded(33)
    tokens = [generated(model(name, kind), inputs, assistant_model=model(name, kind, seed=9)) for kind in ("eager", "quire")]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_a_conversation_continues_from_its_cache(name: str, kind: str) -> None:
    """Several new tokens after a cache that is full already: neither a prompt nor a decode step."""
    first, second = padded(31)["input_ids"], padded(9, seed=5)["input_ids"]
    results = []
    for implementation in ("eager", "quire"):
        made = model(name, implementation)
        more = {"max_cache_len": 128} if kind == "StaticCache" else {}
        cache = getattr(transformers, kind)(config=made.config, **more)
        with torch.no_grad():
            made(input_ids=first, past_key_values=cache)
            results.append(made(input_ids=second, past_key_values=cache).logits)
    error = (results[0] - results[1]).abs().max()
    # fp32, three layers: rounding of sums over a few hundred terms of logits this large.
    assert error <= 64 * torch.finfo(torch.float32).eps * results[0].abs().max()
    assert torch.equal(results[0].argmax(-1), results[1].argmax(-1))


@pytest.mark.parametrize("name", OWN_CODE)
def test_slopes_of_other_heads_are_noticed(name: str) -> None:
    inputs, right = padded(*LENGTHS["padded"]), getattr(alibi, f"_{name}_slopes")
    expected = generated(model(name, "eager"), inputs)
    with mock.patch.object(alibi, right.__name__, lambda *given: right(*given).flip(0)):
        assert generated(model(name, "quire"), inputs) != expected


def test_copies_for_a_growing_cache_on_a_gpu_change_nothing() -> None:
    """On a GPU the keys of a `DynamicCache` are copied to a length of which there are few; here the copy is forced."""
    inputs = padded(*LENGTHS["padded"])
    for name in ("llama", "gemma2"):
        expected = generated(model(name, "quire"), inputs)
        with mock.patch.object(dense, "paged", lambda k, v, visible: paged(dense.repacked(k), dense.repacked(v), visible)):
            with launches() as seen:
                assert generated(model(name, "quire"), inputs) == expected
        assert seen


paged = dense.paged


def test_compiled_forward_over_a_static_cache() -> None:
    inputs = padded(*LENGTHS["padded"])
    expected = generated(model("llama", "eager"), inputs, 6, cache_implementation="static")
    made = model("llama", "quire")
    made.forward = torch.compile(made.forward, backend="eager")
    with launches() as seen:
        assert generated(made, inputs, 6, cache_implementation="static") == expected
    assert seen


def _no_window(*given: Any) -> Any:
    causal, _ = _meaning(*given)
    return causal, None


def _one_more_key(*given: Any) -> Any:
    starts = _starts(*given)
    return None if starts is None else (starts - 1).clamp(min=0)


_meaning, _starts = visible_keys._meaning, visible_keys._starts
FAULTS = {"_meaning": (_no_window, SLIDING), "_starts": (_one_more_key, tuple(CONFIGS))}


@pytest.mark.parametrize("fault", FAULTS)
def test_these_tests_detect_faults(fault: str) -> None:
    """A window that is ignored, and one key of padding that is seen, change tokens of every model they concern."""
    broken, names = FAULTS[fault]
    inputs = padded(*LENGTHS["padded"])
    for name in names:
        expected = generated(model(name, "eager"), inputs)
        with mock.patch.object(visible_keys, fault, broken):
            assert generated(model(name, "quire"), inputs) != expected, name
