"""What the requests of a stream look like: published lengths of prompts and outputs, shared prefixes, drafts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol


class Lengths(Protocol):
    """A distribution of numbers of tokens."""

    @property
    def mean(self) -> float: ...

    def draw(self, random: random.Random) -> float: ...


@dataclass(frozen=True)
class Quantiles:
    """A distribution given by published quantiles. Between two of them the logarithm of the length is linear."""

    points: tuple[tuple[float, float], ...]
    """(share of the requests, their greatest length), from 0 to 1."""

    def at(self, share: float) -> float:
        """The length that this share of the requests does not exceed."""
        for (low, short), (high, long) in zip(self.points, self.points[1:]):
            if share <= high:
                return float(short * (long / short) ** ((share - low) / (high - low)))
        return self.points[-1][1]

    def draw(self, random: random.Random) -> float:
        return self.at(random.random())

    @cached_property
    def mean(self) -> float:
        """The integral of each piece: (long - short) / log(long / short), weighted by its share."""
        total = 0.0
        for (low, short), (high, long) in zip(self.points, self.points[1:]):
            total += (high - low) * (short if long == short else (long - short) / math.log(long / short))
        return total


@dataclass(frozen=True)
class LogNormal:
    """A log-normal distribution with a published mean."""

    mean: float
    sigma: float

    def draw(self, random: random.Random) -> float:
        return random.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)


@dataclass(frozen=True)
class Traffic:
    """The requests of one stream."""

    name: str
    prompt: Lengths
    """New tokens of a prompt, a shared prefix not included."""
    output: Lengths
    prefixes: tuple[int, ...] = ()
    """Lengths of the prefixes of which each request shares one."""
    drafts: int = 0
    """Draft tokens that each decoding sequence brings for verification."""
    acceptance: float = 0.0
    """The probability that a draft is accepted if all before it were."""

    @property
    def tokens_per_decode(self) -> float:
        """Tokens that a decoding sequence keeps on average: its own and the accepted drafts."""
        return 1.0 + sum(self.acceptance**i for i in range(1, self.drafts + 1))


def _quantiles(*lengths: float) -> Quantiles:
    return Quantiles(tuple(zip((0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0), lengths)))


# Computed from the published files. Chat: AzureLLMInferenceTrace_conv.csv (19366 requests), of Splitwise (ISCA 2024). Documents:
# conversation_trace.jsonl (12031 requests), of Mooncake (FAST 2025).
CHAT = Traffic(
    "chat",
    _quantiles(2, 207, 396, 1020, 1189, 2734, 4142, 14050),
    _quantiles(7, 54, 85, 129, 395, 424, 601, 1000),
)
DOCUMENTS = Traffic(
    "documents",
    _quantiles(891, 964, 2306, 6909, 15366, 27367, 85399, 126195),
    _quantiles(1, 24, 156, 350, 472, 597, 1115, 2000),
)
# The means are those of Mooncake's toolagent_trace.jsonl (8596 and 182 tokens). Prefix, spread, drafts and acceptance are assumed.
AGENTS = Traffic(
    "agents",
    LogNormal(8596 - 5000, 1.0),
    LogNormal(182, 1.0),
    prefixes=(5000, 5000, 5000, 5000),
    drafts=3,
    acceptance=0.7,
)
TRAFFIC: dict[str, Traffic] = {t.name: t for t in (CHAT, DOCUMENTS, AGENTS)}
