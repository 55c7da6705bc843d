"""The demo's sampling: repeatable, from the top k, with the probabilities of the softmax."""

from __future__ import annotations

import pytest
import torch

from quire.demo.sampling import SamplingParams, distance, pick

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, 1.9])


def test_top_1_is_the_maximum() -> None:
    assert {pick(LOGITS, SamplingParams(1.0, 1, seed), 3) for seed in range(50)} == {0}


def test_only_the_top_k_are_sampled() -> None:
    assert {pick(LOGITS, SamplingParams(1.0, 3, seed), 3) for seed in range(300)} == {0, 1, 4}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_proportions(temperature: float) -> None:
    count = 4000
    drawn = (
        torch.bincount(torch.tensor([pick(LOGITS, SamplingParams(temperature, 5, 1), at) for at in range(count)]), minlength=5)
        / count
    )
    want = (LOGITS / temperature).softmax(0)
    assert (drawn - want).abs().max() < 4 * (0.25 / count) ** 0.5


def test_noise_depends_on_request_and_position() -> None:
    picks = [pick(LOGITS, SamplingParams(1.0, 5, 9), at) for at in range(40)]
    assert picks == [pick(LOGITS, SamplingParams(1.0, 5, 9), at) for at in range(40)]
    assert picks != [pick(LOGITS, SamplingParams(1.0, 5, 10), at) for at in range(40)]


@pytest.mark.parametrize("token", range(5))
@pytest.mark.parametrize("position", range(6))
def test_distance_is_the_smallest_change_of_logits(token: int, position: int) -> None:
    sampling = SamplingParams(0.7, 3, 0)
    far = distance(token, LOGITS, sampling, position)
    assert (far == 0) == (pick(LOGITS, sampling, position) == token)
    towards = torch.full((5,), -1.0)
    towards[token] = 1.0
    if far:
        assert pick(LOGITS + 1.001 * far * towards, sampling, position) == token
        assert pick(LOGITS + 0.999 * far * towards, sampling, position) != token
