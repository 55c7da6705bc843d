"""The error map of a case: an image with one pixel for each token and head. It is an image because thousands of HTML elements would
be slow to open; a script shows the values of the pixel under the pointer."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from quire.conformance.reporting.report import Finding, Picture

Color = tuple[int, int, int, int]
"""Red, green, blue, opacity."""

_STEPS = ((0.0, (250, 204, 21)), (3.0, (234, 88, 12)), (9.0, (159, 18, 57)))
"""Yellow at one budget, orange at a thousand, dark red at a billion."""
_LEGEND = {"correct": 0.5, "a few budgets": 3.0, "a thousand": 1e3, "a billion, or not finite": 1e9, "never written": -1.0}
LEAST_GAP = 4.0
"""Percent of the width between the names of two sequences."""


def error_map(picture: Picture, finding: Finding) -> dict[str, Any]:
    """Tokens from left to right, heads from top to bottom. Positions are percent of the image."""
    tokens, heads = len(picture.ratio), len(picture.ratio[0])
    pixels = [[color(picture.ratio[token][head]) for token in range(tokens)] for head in range(heads)]
    starts = [start for start in picture.q_starts if start <= tokens]
    begins = [(seq, 100 * start / tokens) for seq, start in enumerate(starts[:-1]) if picture.q_starts[seq + 1] > start]
    return {
        "tokens": tokens,
        "heads": heads,
        "height": max(64, min(240, heads * 14)),
        "image": base64.b64encode(png(pixels)).decode(),
        "lines": [f"{left:.3f}" for _, left in begins],
        "names": _names(begins),
        "worst": _worst(finding, tokens, heads),
        "data": {"tokens": tokens, "heads": heads, "starts": picture.q_starts, "lens": picture.kv_lens, "ratio": picture.ratio},
        "legend": [{"color": _css(color(off)), "text": text} for text, off in _LEGEND.items()],
    }


def _names(begins: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """The sequences whose names fit below the image without overlapping."""
    names: list[dict[str, Any]] = []
    last = -math.inf
    for seq, left in begins:
        if left - last > LEAST_GAP:
            names.append({"sequence": seq, "left": f"{left:.3f}"})
            last = left
    return names


def _worst(finding: Finding, tokens: int, heads: int) -> dict[str, str] | None:
    place = finding.where
    if place.row is None or place.head is None or place.row >= tokens:
        return None
    return {"x": f"{100 * (place.row + 0.5) / tokens:.3f}", "y": f"{100 * (place.head + 0.5) / heads:.3f}"}


def color(off: float) -> Color:
    """The color of an error in budgets: -1 is an element that was never written, up to 1 is correct."""
    if off < 0:
        return 126, 58, 242, 255
    if off <= 1:
        return 18, 128, 92, 60
    power = 9.0 if not math.isfinite(off) else min(math.log10(off), 9.0)
    (low, a), (high, b) = next(pair for pair in pairwise(_STEPS) if power <= pair[1][0])
    share = (power - low) / (high - low)
    red, green, blue = (round(x + (y - x) * share) for x, y in zip(a, b))
    return red, green, blue, 255


def _css(rgba: Color) -> str:
    red, green, blue, opacity = rgba
    return f"rgba({red},{green},{blue},{opacity / 255:.2f})"


def png(rows: Sequence[Sequence[Color]]) -> bytes:
    """A PNG file of these pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 6, 0, 0, 0)
    pixels = b"".join(b"\0" + bytes(value for pixel in row for value in pixel) for row in rows)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels, 9)) + chunk(b"IEND", b"")
