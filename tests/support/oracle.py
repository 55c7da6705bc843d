"""Attention and quantisation in numpy float64, from their definitions: no code of Quire, no torch operator."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

FP8 = {"e4m3fn": (4, 3, 7), "e4m3fnuz": (4, 3, 8), "e5m2": (5, 2, 15)}
"""Bits of exponent, bits of mantissa, bias."""
LARGEST = {"e4m3fn": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0, "int8": 127.0, "int4": 7.0}


@cache
def codes(format: str) -> Array:
    """The value of each of the 256 codes of a format."""
    if format == "int8":
        return np.arange(256).astype(np.uint8).view(np.int8).astype(np.float64)
    exponent_bits, mantissa_bits, bias = FP8[format]
    values = np.empty(256)
    for code in range(256):
        exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
        power = max(exponent, 1) - bias - mantissa_bits
        values[code] = (mantissa + (exponent > 0) * (1 << mantissa_bits)) * 2.0**power * (-1.0 if code & 0x80 else 1.0)
    if format == "e4m3fn":
        values[[0x7F, 0xFF]] = math.nan
    elif format == "e4m3fnuz":
        values[0x80] = math.nan
    else:
        values[[0x7C, 0xFC]] = math.inf, -math.inf
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = math.nan
    return values


def decode(stored: Array, format: str) -> Array:
    """The numbers that bytes stand for; two for each byte of int4, the low bits first."""
    if format == "int4":
        both = np.stack([stored & 15, stored >> 4], -1).reshape(*stored.shape[:-1], -1).astype(np.float64)
        return np.where(both > 7, both - 16, both)
    return codes(format)[stored]


def encode(numbers: Array, format: str) -> Array:
    """The bytes of finite numbers: saturating, to the nearest, and of two to the one whose last bit is 0. A zero keeps its sign
    where the format has one for it."""
    if format == "int8":
        return np.clip(np.rint(numbers), -127, 127).astype(np.int8).view(np.uint8)
    if format == "int4":
        four = np.clip(np.rint(numbers), -7, 7).astype(np.int8).view(np.uint8) & 15
        return four[..., 0::2] + 16 * four[..., 1::2]
    table = codes(format)
    positive = np.array([code for code in range(128) if np.isfinite(table[code])], np.uint8)
    values = table[positive]
    size = np.minimum(np.abs(numbers), LARGEST[format])
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    nearer_high = (size - low > high - size) | ((size - low == high - size) & (positive[above] % 2 == 0))
    code = np.where(nearer_high, positive[above], positive[above - 1])
    negative = np.signbit(numbers) & ~((format == "e4m3fnuz") & (code == 0))
    return (code | negative.astype(np.uint8) << 7).astype(np.uint8)


class Sight(NamedTuple):
    """What one sequence's queries see `[q_len, kv_len]`, and how far each key is away from each query."""

    visible: Array
    distance: Array


def sight(
    q_len: int, kv_len: int, causal: bool, window: tuple[int | None, int | None], mask: Array | None, positions: Array | None
) -> Sight:
    """`mask [q_len, >= q_len]` and `positions [q_len]` are a tree's, for its new tokens alone."""
    context = kv_len - q_len
    q_at, k_at = context + np.arange(q_len), np.arange(kv_len)
    visible = np.ones((q_len, kv_len), bool)
    if mask is not None:
        visible[:, context:] = mask[:, :q_len]
        if positions is not None:
            q_at, k_at = positions, np.concatenate([k_at[:context], positions])
    distance = q_at[:, None] - k_at[None, :]
    if mask is None and causal:
        visible &= distance >= 0
    if window[0] is not None:
        visible &= distance <= window[0]
    if window[1] is not None:
        visible &= -distance <= window[1]
    return Sight(visible, distance)


def sight_of_spans(q_len: int, kv_len: int, spans: Array) -> Sight:
    """The same where each query sees an interval `spans [q_len, 2]` of keys."""
    q_at, k_at = kv_len - q_len + np.arange(q_len), np.arange(kv_len)
    return Sight((spans[:, :1] <= k_at) & (k_at < spans[:, 1:]), q_at[:, None] - k_at)


class Answer(NamedTuple):
    """The output, the LSE, and what rounding errors are relative to: the weighted magnitudes of the values, and the terms of the
    logits that matter."""

    out: Array
    lse: Array
    weighted: Array
    terms: Array


def attention(
    q: Array, k: Array, v: Array, seen: Sight, *, scale: float, softcap: float | None, alibi: Array | None, sinks: Array | None
) -> Answer:
    """One sequence: `q [n, q_heads, d]`, `k [m, kv_heads, d]`, `v [m, kv_heads, e]`."""
    n, heads = q.shape[:2]
    out, weighted = np.zeros((n, heads, v.shape[2])), np.zeros((n, heads, v.shape[2]))
    lse, terms = np.full((n, heads), -np.inf), np.zeros((n, heads))
    somebody = seen.visible.any(0)
    # What nobody sees may hold anything.
    k, v = np.where(somebody[:, None, None], k, 0.0), np.where(somebody[:, None, None], v, 0.0)
    for head in range(heads):
        mine = head // (heads // k.shape[1])
        logits, sizes = scale * (q[:, head] @ k[:, mine].T), abs(scale) * (np.abs(q[:, head]) @ np.abs(k[:, mine]).T)
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        if alibi is not None:
            logits = logits - alibi[head] * np.abs(seen.distance)
            sizes = sizes + abs(alibi[head]) * np.abs(seen.distance)
        logits = np.where(seen.visible, logits, -np.inf)
        sink = -np.inf if sinks is None else sinks[head]
        top = np.maximum(logits.max(1, initial=-np.inf), sink)
        base = np.where(np.isfinite(top), top, 0.0)
        weights = np.exp(logits - base[:, None])
        total = weights.sum(1) + np.exp(sink - base)
        with np.errstate(divide="ignore"):
            lse[:, head] = np.log(total) + base
        weights /= np.where(total > 0, total, 1.0)[:, None]
        out[:, head], weighted[:, head] = weights @ v[:, mine], weights @ np.abs(v[:, mine])
        matters = weights > 1e-12 * weights.max(1, initial=0.0, keepdims=True)
        terms[:, head] = np.where(matters, sizes, 0.0).max(1, initial=0.0) + np.abs(base)
    return Answer(out, lse, weighted, terms)
