"""The requests of the demo. They share a system prompt, have different questions, and arrive over time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from quire.cache.pool import Sequence
from quire.demo.model import LAYERS
from quire.demo.sampling import SamplingParams

SYSTEM = "A quire is a gathering of pages; attention reads them in any order. "
QUESTIONS = (
    "What is a page?",
    "Who may write a slot, and how often?",
    "Say what happens when the pool has no page left and one more sequence arrives in the middle of a step.",
    "Where does a token live?",
    "Why must decode and prefill sequences of one call obey the same contract, and what goes wrong if they do not?",
    "Which rule is broken?",
    "How long is a window?",
    "Tell a fork from a copy, and say which of the two is made first and by whom.",
)


class DenseCache:
    """All keys and values of one sequence, dense, by layer. The verification compares the cache with them."""

    def __init__(self, other: DenseCache | None = None):
        """Empty, or a copy of another."""
        self._parts: list[list[tuple[torch.Tensor, torch.Tensor]]]
        self._parts = [parts[:] for parts in other._parts] if other else [[] for _ in LAYERS]

    def add(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._parts[layer].append((k, v))

    @property
    def length(self) -> int:
        """Number of tokens that passed all layers."""
        return sum(k.shape[0] for k, _ in self._parts[-1])

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, `[tokens, kv_heads, head_dim]` each."""
        k, v = zip(*self._parts[layer])
        return torch.cat(k), torch.cat(v)


class SampledFrom(NamedTuple):
    """The logits that a token was sampled from, and the keys and values they depend on."""

    logits: torch.Tensor
    dense: DenseCache


@dataclass(eq=False)
class DemoRequest:
    """One request and its state. Its tokens are those of the prompt, then the generated ones."""

    name: str
    prompt: list[int]
    wanted: int
    arrives: int
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    choices: list[SampledFrom] = field(default_factory=list)
    """What each generated token was sampled from."""
    state: str = "to come"
    sequence: Sequence | None = None
    dense: DenseCache = field(default_factory=DenseCache)

    def __post_init__(self) -> None:
        self.tokens = self.prompt[:]

    @property
    def made(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.sequence.length if self.sequence else 0

    @property
    def text(self) -> str:
        """The generated text, in printable characters."""
        return "".join(chr(byte) if 32 <= byte < 127 else "·" for byte in self.made)


def make(count: int, seed: int) -> tuple[DemoRequest, list[DemoRequest]]:
    """The system prompt, which generates nothing, and `count` requests that start with it."""
    generator = random.Random(seed)
    system = list(SYSTEM.encode())
    prefix = DemoRequest("prefix", system, 0, 0, SamplingParams(1.0, 1, 0))
    requests = []
    arrives = 0
    for i in range(count):
        sampling = SamplingParams(round(generator.uniform(0.6, 1.0), 2), generator.choice((4, 12, 40)), seed * 4096 + i)
        question = QUESTIONS[i % len(QUESTIONS)]
        prompt = system + list(f"Q: {question} A:".encode())
        requests.append(DemoRequest(f"{i}", prompt, generator.randint(32, 72), arrives, sampling))
        arrives += generator.randint(2, 9)
    return prefix, requests
