"""What the demo decodes: requests that share a system prompt, ask something of their own, and arrive over time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from quire.cache.pool import Sequence
from quire.demo.model import LAYERS
from quire.demo.sampling import Taste

SYSTEM = "A quire is a gathering of pages; attention reads them in any order. "
QUESTIONS = (
    "What is a page?",
    "Who may write a slot, and how often?",
    "Say what happens when the pool has no page left and one more sequence arrives in the middle of a step.",
    "Where does a token live?",
    "Why must a decode row and a prefill row of one call obey the same contract, and what goes wrong if they do not?",
    "Which rule is broken?",
    "How long is a window?",
    "Tell a fork from a copy, and say which of the two is made first and by whom.",
)


class Book:
    """The keys and values of one sequence as they were made, densely, layer by layer: what the proof knows of the cache."""

    def __init__(self, other: Book | None = None):
        """Empty, or a copy that goes on by itself."""
        self._parts: list[list[tuple[torch.Tensor, torch.Tensor]]]
        self._parts = [parts[:] for parts in other._parts] if other else [[] for _ in LAYERS]

    def add(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._parts[layer].append((k, v))

    @property
    def length(self) -> int:
        """Tokens that have come through every layer."""
        return sum(k.shape[0] for k, _ in self._parts[-1])

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, `[tokens, kv_heads, head_dim]` each."""
        k, v = zip(*self._parts[layer])
        return torch.cat(k), torch.cat(v)


class Choice(NamedTuple):
    """What a token was picked from, and the keys and values behind it."""

    logits: torch.Tensor
    book: Book


@dataclass(eq=False)
class Request:
    """One request and how far it is. Its tokens are those it came with, then those it made."""

    name: str
    prompt: list[int]
    wanted: int
    arrives: int
    taste: Taste
    tokens: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    """How each token it made was picked."""
    state: str = "to come"
    sequence: Sequence | None = None
    book: Book = field(default_factory=Book)

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
        """What it made so far, in printable characters."""
        return "".join(chr(byte) if 32 <= byte < 127 else "·" for byte in self.made)


def make(count: int, seed: int) -> tuple[Request, list[Request]]:
    """The system prompt, which makes nothing itself, and `count` requests that start with it."""
    chance = random.Random(seed)
    system = list(SYSTEM.encode())
    prefix = Request("prefix", system, 0, 0, Taste(1.0, 1, 0))
    requests = []
    arrives = 0
    for i in range(count):
        taste = Taste(round(chance.uniform(0.6, 1.0), 2), chance.choice((4, 12, 40)), seed * 4096 + i)
        question = QUESTIONS[i % len(QUESTIONS)]
        prompt = system + list(f"Q: {question} A:".encode())
        requests.append(Request(f"{i}", prompt, chance.randint(32, 72), arrives, taste))
        arrives += chance.randint(2, 9)
    return prefix, requests
