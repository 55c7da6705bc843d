"""RoPE in float64, by complex multiplication, with the error that fp32 may have; and a small cache to write to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quire import Batch, KVCache, Rope
from quire.cache.format import FORMATS
from support.scenario import LARGEST, TYPES

Q_LENS, KV_LENS = [5, 0, 1, 11], [9, 4, 30, 11]
LIVE, TOKENS = 17, 19
"""Two rows are padding."""
PAGES, PAGE_SIZE, KV_HEADS, GROUP, V_DIM = 12, 8, 2, 3, 8
UNIT = 2.0**-24
"""The rounding of fp32."""
GUARD = 77.0


@dataclass
class Turn:
    """One way to rotate: what a `Rope` is made of, and the exact result."""

    head_dim: int = 16
    rotary_dim: int = 16
    base: float = 100.0
    max_positions: int = 32
    interleaved: bool = False
    axes: list[int] | None = None
    """The axis of each frequency."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of the Rope."""
    norm: torch.dtype | None = None
    """The type of the norms' weights."""
    eps: float = 0.25
    """So large that a norm without it is wrong."""
    v_in_k: int | None = None
    """Of a latent cache: so many elements are normalised, in keys alone, and those behind them are rotated."""

    def rope(self, device: str = "cpu") -> Rope:
        weights: list[Any] = [None, None]
        if self.norm is not None:
            g = torch.Generator().manual_seed(3)
            dims = (self.head_dim,) * 2 if self.v_in_k is None else (self.v_in_k,)
            weights = [(1 + torch.randn(dim, generator=g)).to(device, self.norm) for dim in dims]
            weights = weights if self.v_in_k is None else [None, *weights]
        how = {"interleaved": self.interleaved, "eps": self.eps, "q_norm": weights[0], "k_norm": weights[1], **self.fields}
        made = Rope.make(self.head_dim, self.base, self.max_positions, rotary_dim=self.rotary_dim, device=device)
        # In the middle of numbers that are not NaN, so that a read outside of a table is seen; rows have a stride of their own.
        half = self.rotary_dim // 2
        around = [torch.full((self.max_positions + 4, half + 3), GUARD, device=device) for _ in range(2)]
        for table, own in zip(around, (made.cos, made.sin)):
            table[2:-2, 1 : half + 1] = own
        return Rope(*(table[2:-2, 1 : half + 1] for table in around), **how)

    def exact(self, x: torch.Tensor, at: torch.Tensor, norm: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x `[tokens, heads, head_dim]` at positions `[tokens]` or `[3, tokens]`, and the error that fp32 may have."""
        if self.v_in_k is not None:
            return self._exact_parts(x, at, norm)
        x, loss = x.double().cpu(), 0.0
        if norm is not None:
            weight = norm.double().cpu() + (1 if self.fields.get("unit_offset") else 0)
            x = x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * weight
            loss = self.head_dim / 2 + 6  # a sum of squares, under a root; a quotient, a root, two products, the weight's sum
        half = self.rotary_dim // 2
        axes = torch.tensor(self.axes or [0] * half, dtype=torch.int64)
        place = at.cpu().reshape(-1, at.shape[-1])[axes].T.double()
        angle = place * self.base ** (-torch.arange(half).double() / half)
        first = torch.arange(half) * 2 if self.interleaved else torch.arange(half)
        second = first + 1 if self.interleaved else first + half
        pair = torch.complex(x[..., first], x[..., second])
        turned = pair * torch.polar(torch.ones_like(angle), angle)[:, None]
        out, sizes = x.clone(), x.abs()
        out[..., first], out[..., second] = turned.real, turned.imag
        both = x[..., first].abs() + x[..., second].abs()
        sizes[..., first], sizes[..., second] = both, both
        # Two products and a sum of numbers and table entries that were each rounded once.
        return out, (loss + 4) * UNIT * sizes

    def _exact_parts(self, x: torch.Tensor, at: torch.Tensor, norm: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of a latent, which is not rotated, and of what is behind it, which is not normalised."""
        still = Turn(self.v_in_k, 0, eps=self.eps, fields=self.fields)  # type: ignore[arg-type]
        turned = replace(self, head_dim=self.head_dim - still.head_dim, v_in_k=None)
        parts = still.exact(x[..., : self.v_in_k], at, norm), turned.exact(x[..., self.v_in_k :], at, None)
        return tuple(torch.cat(both, -1) for both in zip(*parts))  # type: ignore[return-value]


def rounded(exact: torch.Tensor, error: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The error that a value may have after one rounding to a type."""
    info = torch.finfo(dtype)
    return error + (exact.abs() + error) * info.eps / 2 + info.smallest_normal * info.eps / 2


def batch_of(device: str = "cpu", index: torch.dtype = torch.int32, **how: Any) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """Sequences with shuffled pages; the positions and slots of the live tokens."""
    ids = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3)).tolist()
    table, positions, slots = torch.full((len(Q_LENS), 5), -1), [], []
    for row, (q_len, kv_len) in enumerate(zip(Q_LENS, KV_LENS)):
        for column in range(-(-kv_len // PAGE_SIZE)):
            table[row, column] = ids.pop()
        positions += list(range(kv_len - q_len, kv_len))
        slots += [int(table[row, at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE for at in range(kv_len - q_len, kv_len)]
    starts = torch.tensor([0, *Q_LENS]).cumsum(0)
    tensors = (t.to(device, index) for t in (table, torch.tensor(KV_LENS), starts))
    return Batch(*tensors, **how), torch.tensor(positions), torch.tensor(slots)


def rows_of(turn: Turn, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys as views of a fused projection, and values; padding rows are NaN."""
    g = torch.Generator().manual_seed(7)
    q_heads = KV_HEADS * GROUP
    both = torch.randn(TOKENS, q_heads + KV_HEADS, turn.head_dim, generator=g) * 2
    v = torch.randn(TOKENS, KV_HEADS, V_DIM, generator=g)
    both[LIVE:], v[LIVE:] = torch.nan, torch.nan
    q, k = both.to(device, dtype).split((q_heads, KV_HEADS), 1)
    return q, k, v.to(device, dtype)


def cache_of(head_dim: int, format: str = "fp32", scales: str = "head", device: str = "cpu", v_in_k: int | None = None) -> KVCache:
    how: dict[str, Any] = {}
    scaled = ("k_scale", "v_scale") if v_in_k is None else ("k_scale",)
    if format in LARGEST:
        shape = {"tensor": (), "head": (KV_HEADS,), "token": (PAGES, PAGE_SIZE, KV_HEADS)}[scales]
        g = torch.Generator().manual_seed(5)
        how = {name: (16 / LARGEST[format] * (1 + torch.rand(shape, generator=g))).to(device) for name in scaled}
    dims = (dim // FORMATS[format].pack for dim in ((head_dim, V_DIM) if v_in_k is None else (head_dim,)))
    pages = (torch.zeros(PAGES, PAGE_SIZE, KV_HEADS, dim, device=device).to(TYPES[format]) for dim in dims)
    return KVCache.wrap(*pages, layout="nhd", format=format, v_in_k=v_in_k, **how)


def check_keys(
    cache: KVCache,
    turn: Turn,
    k: torch.Tensor,
    at: torch.Tensor,
    norm: torch.Tensor | None,
    rows: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Fails unless the slots hold the rotated keys of these rows, and no other slot holds anything."""
    exact, error = turn.exact(k[rows], at[..., rows], norm)
    held = cache.k.cpu().flatten(0, 1)[slots]
    if cache.k_format.pack > 1:
        held = cache.k_format.unpack(held)
    if cache.k_scale is None:
        got, allowed = held.double(), rounded(exact, error, held.dtype)
    else:
        scale = cache.k_scale.double().cpu()
        if scale.dim() == 3:
            scale = scale.flatten(0, 1)[slots]
            want = exact.abs().amax(-1) / LARGEST[cache.format.name]
            assert ((scale - want).abs() <= error.amax(-1) / LARGEST[cache.format.name] + 2 * UNIT * want).all(), "a scale is wrong"
        scale = scale[..., None]
        got = held.double() * scale
        if cache.format.integer:
            allowed = error + scale * (0.5 + 128 * 2 * UNIT)
        else:
            allowed = scale * rounded(exact / scale, error / scale + 2 * UNIT * (exact / scale).abs(), held.dtype)
    wrong = ~((got - exact).abs() <= allowed)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements of K are wrong, first {wrong.nonzero()[0].tolist()}"
    others = torch.ones(PAGES * PAGE_SIZE, dtype=torch.bool)
    others[slots] = False
    assert not cache.k_bytes.cpu().flatten(0, 1)[others].view(torch.uint8).any(), "a slot was written that no token has"


def check_queries(turn: Turn, out: torch.Tensor, q: torch.Tensor, at: torch.Tensor, norm: torch.Tensor | None) -> None:
    """Fails unless the live rows are the rotated queries, rounded once."""
    exact, error = turn.exact(q[:LIVE], at[..., :LIVE], norm)
    wrong = ~((out[:LIVE].double().cpu() - exact).abs() <= rounded(exact, error, out.dtype))
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements of q are wrong, first {wrong.nonzero()[0].tolist()}"


TURNS = {
    "half-split": Turn(),
    "interleaved": Turn(interleaved=True),
    "partial": Turn(head_dim=20, rotary_dim=6),
    "partial-interleaved": Turn(head_dim=20, rotary_dim=6, interleaved=True),
    "odd-half": Turn(head_dim=40, rotary_dim=34),
    "norm": Turn(norm=torch.bfloat16),
    "norm-partial-interleaved": Turn(head_dim=20, rotary_dim=6, interleaved=True, norm=torch.float16),
    "unit-offset": Turn(norm=torch.float32, fields={"unit_offset": True}),
    "sections": Turn(axes=[0, 0, 0, 0, 1, 2, 2, 2], fields={"sections": (4, 1, 3)}),
    "sections-take-turns": Turn(
        axes=[0, 1, 2, 0, 1, 0, 0, 0], interleaved=True, fields={"sections": (5, 2, 1), "sections_interleaved": True}
    ),
}

LATENT_TURNS = {
    "interleaved": Turn(24, 8, interleaved=True, v_in_k=16),
    "half-split-odd": Turn(33, 12, v_in_k=20),
    "norm": Turn(24, 8, interleaved=True, v_in_k=16, norm=torch.bfloat16),
    "unit-offset-odd": Turn(57, 6, v_in_k=39, norm=torch.float32, fields={"unit_offset": True}),
    "sections": Turn(40, 16, axes=[0, 0, 0, 0, 1, 2, 2, 2], v_in_k=24, fields={"sections": (4, 1, 3)}),
    "deepseek": Turn(576, 64, interleaved=True, v_in_k=512, norm=torch.bfloat16),
}
"""Ways to rotate for latent caches."""


def positions_of(turn: Turn, own: torch.Tensor, index: torch.dtype = torch.int64) -> torch.Tensor:
    """Positions that no batch would compute; those of padding rows are outside of every table."""
    g = torch.Generator().manual_seed(11)
    shape = (3, TOKENS) if turn.axes is not None else (TOKENS,)
    at = torch.randint(0, turn.max_positions, shape, generator=g)
    at[..., LIVE:] = 2**30
    return at.to(own.device, index)
