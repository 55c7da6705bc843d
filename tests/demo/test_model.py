"""The demo's model: the same for a seed, causal, and rotary."""

from __future__ import annotations

import torch

from quire.demo.model import HEAD_DIM, LAYERS, VOCABULARY, DemoModel, _rotate, _rotation
from quire.demo.verification import attention


def forward(model: DemoModel, tokens: list[int]) -> torch.Tensor:
    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, model.options[layer])

    return model.to(torch.float64).forward(torch.tensor(tokens), torch.arange(len(tokens)), attend)


def test_the_same_seed_makes_the_same_weights() -> None:
    a, b, c = DemoModel.make(1), DemoModel.make(1), DemoModel.make(2)
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    assert not torch.equal(a.weights["embed"], c.weights["embed"])


def test_earlier_logits_do_not_see_later_tokens() -> None:
    model = DemoModel.make(0)
    one, other = forward(model, [1, 2, 3, 4]), forward(model, [1, 2, 3, 200])
    assert torch.equal(one[:3], other[:3]) and not torch.equal(one[3], other[3])


def test_logits_depend_on_the_whole_context() -> None:
    model = DemoModel.make(0)
    one, other = forward(model, [7, *range(60)]), forward(model, [8, *range(60)])
    assert (one[-1] - other[-1]).abs().max() > 1e-3


def test_every_layer_affects_the_logits() -> None:
    model = DemoModel.make(0)
    whole = forward(model, [1, 2, 3])
    for layer in range(len(LAYERS)):
        weights = {**model.weights, f"{layer}.out": torch.zeros_like(model.weights[f"{layer}.out"])}
        assert (forward(DemoModel(weights), [1, 2, 3]) - whole).abs().max() > 1e-2


def test_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, HEAD_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(q_at: int, k_at: int) -> torch.Tensor:
        return (_rotate(q, _rotation(torch.tensor([q_at]), q.dtype)) * _rotate(k, _rotation(torch.tensor([k_at]), k.dtype))).sum()

    assert torch.allclose(score(9, 4), score(109, 104)) and not torch.allclose(score(9, 4), score(9, 5))


def test_bigram_logits_are_log_probabilities() -> None:
    follows = DemoModel.make(0).weights["follows"].double().exp()
    assert follows.shape == (VOCABULARY, VOCABULARY)
    assert torch.allclose(follows.sum(1), torch.ones(VOCABULARY, dtype=torch.float64))
    assert follows[ord("q")].argmax() == ord("u")
