"""A small decoder with made weights: RMSNorm, rotary positions, grouped-query attention, a gated MLP, bytes in and bytes out.

It knows nothing of pages. Whoever runs it brings the attention: the engine brings `quire.step`, the proof a dense one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.contract.rules import CONTRACT
from quire.options import Options

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q, k, v) -> out, all of them [tokens, heads, head_dim]."""

VOCABULARY, WIDTH, HIDDEN = 256, 256, 512
Q_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 32


class Layer(NamedTuple):
    """What one layer asks of attention, and how its cache is kept."""

    summary: str
    format: str
    layout: str
    token_scales: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


LAYERS = (
    Layer("plain, bf16 cache", "bf16", "nhd"),
    Layer("window of 48 keys and a sink, bf16 cache", "bf16", "hnd", window=48, sinks=True),
    Layer("e4m3fn cache, one scale per token and head", "e4m3fn", "vllm_x", token_scales=True),
    Layer("softcap 20, fp16 cache", "fp16", "vllm_joint", softcap=20.0),
)


class Model:
    """The weights, in one type on one device, and the forward pass."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        self.weights = weights
        self.options = tuple(
            Options(window=layer.window, softcap=layer.softcap, sinks=weights[f"{i}.sinks"] if layer.sinks else None)
            for i, layer in enumerate(LAYERS)
        )

    @classmethod
    def make(cls, seed: int, device: torch.device | str = "cpu") -> Model:
        """Random weights, the same for a seed on every machine. Queries are loud, so that attention has something to choose."""
        chance = torch.Generator().manual_seed(seed)

        def normal(*shape: int, gain: float = 1.0) -> torch.Tensor:
            return gain * shape[-1] ** -0.5 * torch.randn(*shape, generator=chance, device="cpu")

        weights = {"embed": torch.randn(VOCABULARY, WIDTH, generator=chance, device="cpu"), "unembed": normal(VOCABULARY, WIDTH)}
        for i in range(len(LAYERS)):
            weights |= {
                f"{i}.q": normal(Q_HEADS * HEAD_DIM, WIDTH, gain=1.5),
                f"{i}.kv": normal(2 * KV_HEADS * HEAD_DIM, WIDTH),
                f"{i}.out": normal(WIDTH, Q_HEADS * HEAD_DIM, gain=1.5),
                f"{i}.sinks": torch.randn(Q_HEADS, generator=chance, device="cpu"),
                f"{i}.up": normal(2 * HIDDEN, WIDTH),
                f"{i}.down": normal(WIDTH, HIDDEN),
            }
        weights["follows"] = _which_byte_follows()
        return cls({name: weight.to(device) for name, weight in weights.items()})

    def to(self, where: torch.dtype | str) -> Model:
        """The same model in another type or on another device."""
        return Model({name: weight.to(where) for name, weight in self.weights.items()})

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The logits of the next byte after each of the tokens, `[tokens, VOCABULARY]`."""
        w = self.weights
        x = w["embed"][tokens]
        turn = _rotation(positions, x.dtype)
        for i in range(len(LAYERS)):
            seen = _norm(x)
            # One projection; q, k and v are strided views of it.
            qkv = (seen @ torch.cat((w[f"{i}.q"], w[f"{i}.kv"])).T).unflatten(1, (Q_HEADS + 2 * KV_HEADS, HEAD_DIM))
            q, k, v = qkv.split((Q_HEADS, KV_HEADS, KV_HEADS), dim=1)
            x = x + attend(i, _turned(q, turn), _turned(k, turn), v).flatten(1) @ w[f"{i}.out"].T
            gate, up = (_norm(x) @ w[f"{i}.up"].T).chunk(2, dim=1)
            x = x + (F.silu(gate) * up) @ w[f"{i}.down"].T
        return _norm(x) @ w["unembed"].T + w["follows"][tokens]


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _rotation(positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each position's angles, `[tokens, 1, HEAD_DIM / 2]`."""
    pace = 10_000.0 ** -(torch.arange(0, HEAD_DIM, 2, device=positions.device, dtype=torch.float64) / HEAD_DIM)
    angle = positions.double()[:, None, None] * pace
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = turn
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _which_byte_follows() -> torch.Tensor:
    """Log-likelihood of each byte after each other one, `[VOCABULARY, VOCABULARY]`, as the words of the contract have it: what the
    model babbles is then almost English."""
    words = "".join(letter for rule in CONTRACT for letter in f"{rule.says} ".lower() if letter in " ,.abcdefghijklmnopqrstuvwxyz")
    text = torch.tensor(list(words.encode()), device="cpu")
    alone = torch.bincount(text, minlength=VOCABULARY) / len(text) + 1e-6
    pairs = torch.zeros(VOCABULARY, VOCABULARY, device="cpu").index_put_(
        (text[:-1], text[1:]), torch.ones(len(text) - 1, device="cpu"), accumulate=True
    )
    follows = pairs + alone
    return (follows / follows.sum(1, keepdim=True)).log()
