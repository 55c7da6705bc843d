"""The demo's verification: each comparison can fail, and reports the place."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import quire
from quire.cache.format import FORMATS
from quire.demo import verification
from quire.demo.engine import DemoEngine
from quire.demo.model import HEAD_DIM, KV_HEADS, LAYERS
from quire.demo.verification import Comparison, Verification


def with_out(engine: DemoEngine, index: int, out: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves one record, with another output."""
    monkeypatch.setattr(engine, "records", [engine.records[index]._replace(out=out)])


def test_a_correct_run_is_verified(finished: DemoEngine) -> None:
    for comparisons in (verification.outputs(finished), verification.tokens(finished)):
        found = Verification.of(comparisons)
        assert found.holds and found.where == ""
        assert 0 < found.worst.used < 0.2  # far below the bound


@pytest.mark.parametrize("index", [0, 101, 200])
@pytest.mark.parametrize("error", [1e-3, -1e-3, math.nan, math.inf])
def test_one_wrong_number_is_detected(finished: DemoEngine, index: int, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    record = finished.records[index]
    out = record.out.clone()
    out[-1, 5, 7] += error
    with_out(finished, index, out, monkeypatch)
    found = Verification.of(verification.outputs(finished))
    assert not found.holds
    assert f"step {record.step}, layer {record.layer} " in found.where
    assert f"request {record.request.name}: 1 of {record.q.shape[0]} tokens wrong" in found.where
    assert f"the worst at position {record.kv_len - 1}, head 5" in found.where
    assert "^^" in found.where and "dim 7: off by" in found.where


def test_a_lost_token_is_over_the_bound(finished: DemoEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention without its first key: the error that a cache without a ledger would not report."""
    index = max(i for i, record in enumerate(finished.records) if record.layer == 0)
    record = finished.records[index]
    k, v = (verification.as_stored(x[1 : record.kv_len], 0) for x in record.dense.read(0))
    with_out(finished, index, verification.attention(record.q, k, v, finished.model.options[0]).float(), monkeypatch)
    assert Verification.of(verification.outputs(finished)).worst.used > 10


def test_a_wrong_token_is_detected(finished: DemoEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = finished.requests[2]
    tokens = request.tokens[:]
    tokens[-1] = ord("#")
    monkeypatch.setattr(request, "tokens", tokens)
    found = Verification.of(verification.tokens(finished))
    assert not found.holds
    assert f"request 2, token {request.wanted - 1}: '#' was sampled, alone it samples '" in found.where


def test_another_prompt_is_detected(finished: DemoEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of another prompt: the outputs are correct for those, but the request had another prompt."""
    request = finished.requests[1]
    tokens = request.tokens[:]
    tokens[70] = ord("#")
    monkeypatch.setattr(request, "tokens", tokens)
    assert Verification.of(verification.outputs(finished)).holds
    found = Verification.of(verification.tokens(finished))
    assert not found.holds and "request 1: its keys of layer 0 differ by" in found.where


def test_a_verification_without_comparisons_fails() -> None:
    assert not Verification.of([]).holds
    assert Verification.of([Comparison(1, 0.5, 1.0)]).holds
    assert not Verification.of([Comparison(1, 0.5, 1.0), Comparison(1, 1.5, 1.0, "here"), Comparison(1, 2.0, 1.0, "there")]).holds


def test_the_first_fault_is_named_and_the_worst_is_measured() -> None:
    found = Verification.of([Comparison(1, 1.5, 1.0, "here"), Comparison(2, 2.0, 1.0, "there")])
    assert (found.where, found.worst.error, found.compared) == ("here", 2.0, 3)


@pytest.mark.parametrize("layer", range(len(LAYERS)), ids=[layer.summary for layer in LAYERS])
def test_as_stored_matches_the_cache(layer: int) -> None:
    """Two codes, one result: the proof's own rounding, and `quire.write`."""
    pool = quire.PagePool(4, 16)
    kept = LAYERS[layer]
    scales = "token" if kept.token_scales else None
    cache = quire.KVCache.allocate(
        pool, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=FORMATS[kept.format].dtype, layout=kept.layout, scales=scales
    )
    k, v = torch.randn(2, 64, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(layer))
    k[3] = 0
    quire.write(k, v, cache, pool.step({pool.sequence(): 64}))
    for x, stored, order, scale in ((k, cache.k, cache.layout.k, cache.k_scale), (v, cache.v, cache.layout.v, cache.v_scale)):
        read = order.unpack(stored).double()
        if scale is not None:
            read = read * scale.double().unsqueeze(-1)
        assert torch.equal(verification.as_stored(x, layer), read.flatten(0, 1))


def test_the_bound_grows_with_what_it_depends_on() -> None:
    q, k = torch.ones(1, 8, HEAD_DIM), torch.ones(10, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    want = size = torch.ones(1, 8, HEAD_DIM, dtype=torch.float64)
    base = verification.allowed_error(q, k, want, size)
    for more in (
        verification.allowed_error(2 * q, k, want, size),
        verification.allowed_error(q, 2 * k, want, size),
        verification.allowed_error(q, k.repeat(9, 1, 1), want, size),
        verification.allowed_error(q, k, 100 * want, size),
        verification.allowed_error(q, k, want, 2 * size),
        verification.allowed_error(q.bfloat16(), k, want, size),
    ):
        assert (more > base).all()
    assert (base < 1e-4).all()


def test_options_of_a_layer_reach_the_reference(finished: DemoEngine) -> None:
    q, k, v = torch.randn(3, 80, 8, HEAD_DIM, generator=torch.Generator().manual_seed(0)).double().unbind(0)
    k, v = k[:, :KV_HEADS], v[:, :KV_HEADS]
    options = finished.model.options
    plain = verification.attention(q, k, v, options[0])
    for layer in (1, 3):
        assert not torch.allclose(verification.attention(q, k, v, options[layer]), plain, atol=1e-3)
    without_sinks = replace(options[1], sinks=None)
    assert not torch.allclose(
        verification.attention(q, k, v, options[1]), verification.attention(q, k, v, without_sinks), atol=1e-3
    )
