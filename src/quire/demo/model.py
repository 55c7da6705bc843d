"""A small decoder with random weights: RMSNorm, RoPE, grouped-query attention and a gated MLP, over bytes.

It does not depend on the cache. The caller passes the attention function: the engine `quire.step`, the verification a dense one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.cache.format import OCP_FP8
from quire.contract.rules import CONTRACT
from quire.options import Options

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q, k, v) -> out, all of them [tokens, heads, head_dim]."""

VOCABULARY, WIDTH, HIDDEN = 256, 256, 512
Q_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 32


class Layer(NamedTuple):
    """The attention options and the cache of one layer."""

    summary: str
    format: str
    layout: str
    token_scales: bool = False
    window: int | None = None
    scale: float | None = None
    sinks: bool = False


LAYERS = (
    Layer("plain, bf16 cache", "bf16", "nhd"),
    Layer("window of 48 keys and a sink, bf16 cache", "bf16", "hnd", window=48, sinks=True),
    Layer(f"{OCP_FP8} cache, one scale per token and head", OCP_FP8.name, "vllm_x", token_scales=True),
    Layer("scale 1/8, fp16 cache", "fp16", "vllm_joint", scale=0.125),
)


class DemoModel:
    """The weights, of one type on one device, and the forward pass."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        self.weights = weights
        self.options = tuple(
            Options(window=layer.window, scale=layer.scale, sinks=weights[f"{i}.sinks"] if layer.sinks else None)
            for i, layer in enumerate(LAYERS)
        )

    @classmethod
    def make(cls, seed: int, device: torch.device | str = "cpu") -> DemoModel:
        """Random weights, the same on every machine for a seed. Queries are large, so that attention weights are not uniform."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, gain: float = 1.0) -> torch.Tensor:
            return gain * shape[-1] ** -0.5 * torch.randn(*shape, generator=generator, device="cpu")

        weights = {"embed": torch.randn(VOCABULARY, WIDTH, generator=generator, device="cpu"), "unembed": normal(VOCABULARY, WIDTH)}
        for i in range(len(LAYERS)):
            weights |= {
                f"{i}.q": normal(Q_HEADS * HEAD_DIM, WIDTH, gain=1.5),
                f"{i}.kv": normal(2 * KV_HEADS * HEAD_DIM, WIDTH),
                f"{i}.out": normal(WIDTH, Q_HEADS * HEAD_DIM, gain=1.5),
                f"{i}.sinks": torch.randn(Q_HEADS, generator=generator, device="cpu"),
                f"{i}.up": normal(2 * HIDDEN, WIDTH),
                f"{i}.down": normal(WIDTH, HIDDEN),
            }
        weights["follows"] = _bigram_logits()
        return cls({name: weight.to(device) for name, weight in weights.items()})

    def to(self, where: torch.dtype | str) -> DemoModel:
        """The same model in another type or on another device."""
        return DemoModel({name: weight.to(where) for name, weight in self.weights.items()})

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The logits of the next byte after each of the tokens, `[tokens, VOCABULARY]`."""
        w = self.weights
        x = w["embed"][tokens]
        rotation = _rotation(positions, x.dtype)
        for i in range(len(LAYERS)):
            seen = _norm(x)
            # One projection; q, k and v are strided views of it.
            qkv = (seen @ torch.cat((w[f"{i}.q"], w[f"{i}.kv"])).T).unflatten(1, (Q_HEADS + 2 * KV_HEADS, HEAD_DIM))
            q, k, v = qkv.split((Q_HEADS, KV_HEADS, KV_HEADS), dim=1)
            x = x + attend(i, _rotate(q, rotation), _rotate(k, rotation), v).flatten(1) @ w[f"{i}.out"].T
            gate, up = (_norm(x) @ w[f"{i}.up"].T).chunk(2, dim=1)
            x = x + (F.silu(gate) * up) @ w[f"{i}.down"].T
        return _norm(x) @ w["unembed"].T + w["follows"][tokens]


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _rotation(positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each position's angles, `[tokens, 1, HEAD_DIM / 2]`."""
    frequency = 10_000.0 ** -(torch.arange(0, HEAD_DIM, 2, device=positions.device, dtype=torch.float64) / HEAD_DIM)
    angle = positions.double()[:, None, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _bigram_logits() -> torch.Tensor:
    """Log-likelihood of each byte after each other one, `[VOCABULARY, VOCABULARY]`, from the text of the contract, so that the
    output resembles English."""
    words = "".join(letter for rule in CONTRACT for letter in f"{rule.says} ".lower() if letter in " ,.abcdefghijklmnopqrstuvwxyz")
    text = torch.tensor(list(words.encode()), device="cpu")
    alone = torch.bincount(text, minlength=VOCABULARY) / len(text) + 1e-6
    pairs = torch.zeros(VOCABULARY, VOCABULARY, device="cpu").index_put_(
        (text[:-1], text[1:]), torch.ones(len(text) - 1, device="cpu"), accumulate=True
    )
    follows = pairs + alone
    return (follows / follows.sum(1, keepdim=True)).log()
