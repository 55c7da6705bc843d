"""A small decoder with random weights, the same in every process, and greedy generation with chunked prefill."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import quire

Q_HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS = 8, 2, 16, 64, 2
PROMPTS = ([11, 7, 5] * 15, [3, 1, 4, 1, 5, 9])
Attention = Callable[[int, torch.Tensor, quire.Batch], torch.Tensor]
"""(layer, x, batch) -> what attention adds to x, `[tokens, WIDTH]`."""


class Decoder:
    """The weights, each `[LAYERS, out, in]`, and the options of the whole model: ALiBi slopes and sinks of 8 heads."""

    def __init__(self, device: torch.device | str = "cpu"):
        generator = torch.Generator().manual_seed(7)

        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(device)

        self.embed, self.unembed = weight(256, WIDTH) * WIDTH**0.5, weight(256, WIDTH)
        self.q, self.k, self.v = (weight(LAYERS, n * HEAD_DIM, WIDTH) for n in (Q_HEADS, KV_HEADS, KV_HEADS))
        self.q, self.out = 2 * self.q, 2 * weight(LAYERS, WIDTH, Q_HEADS * HEAD_DIM)  # attention decides which token is next
        self.up, self.down = weight(LAYERS, 128, WIDTH), weight(LAYERS, WIDTH, 128)
        slopes = 2.0 ** -torch.arange(1.0, Q_HEADS + 1)
        self.options = quire.Options(alibi=slopes.to(device), sinks=torch.linspace(-1, 1, Q_HEADS).to(device))

    def __call__(self, tokens: torch.Tensor, batch: quire.Batch, attention: Attention) -> torch.Tensor:
        x = self.embed[tokens]
        for layer in range(LAYERS):
            x = x + attention(layer, F.rms_norm(x, (WIDTH,)), batch)
            x = x + F.silu(F.rms_norm(x, (WIDTH,)) @ self.up[layer].T) @ self.down[layer].T
        return F.rms_norm(x, (WIDTH,)) @ self.unembed.T


@torch.no_grad()
def generate(decoder: Decoder, pool: quire.PagePool, attention: Attention, steps: int = 24) -> list[list[int]]:
    """The tokens after each prompt. Prompts are computed in chunks of 16, while others decode."""
    sequences = {pool.sequence(): list(prompt) for prompt in PROMPTS}
    for _ in range(steps):
        chunks = {sequence: tokens[sequence.length :][:16] for sequence, tokens in sequences.items()}
        batch = pool.step({sequence: len(chunk) for sequence, chunk in chunks.items()})
        new = torch.tensor([token for chunk in chunks.values() for token in chunk], device=pool.device)
        best = decoder(new, batch, attention)[batch.q_starts[1:].long() - 1].argmax(-1).tolist()
        for (sequence, tokens), token in zip(sequences.items(), best):
            if sequence.length == len(tokens):
                tokens.append(token)
    return [tokens[len(prompt) :] for tokens, prompt in zip(sequences.values(), PROMPTS)]


def heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A projection to heads, `[tokens, heads, HEAD_DIM]`."""
    return (x @ weight.T).unflatten(1, (-1, HEAD_DIM))


def generate_alone(decoder: Decoder) -> list[list[int]]:
    """The same in a single process."""
    pool = quire.PagePool(pages=32, page_size=16, device=decoder.embed.device)
    caches = [quire.KVCache.allocate(pool, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32) for _ in range(LAYERS)]

    def attention(layer: int, x: torch.Tensor, batch: quire.Batch) -> torch.Tensor:
        q, k, v = (heads(x, weight[layer]) for weight in (decoder.q, decoder.k, decoder.v))
        return quire.step(q, k, v, caches[layer], batch, decoder.options).flatten(1) @ decoder.out[layer].T

    return generate(decoder, pool, attention)
