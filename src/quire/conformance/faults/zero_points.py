"""Faults of zero points, of formats that have them."""

from __future__ import annotations

from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.formats import ZERO_POINTS
from quire.conformance.faults.fault import Fault
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, Stages, Work

PARTS = ({"parts": "kv"}, {"parts": "k"}, {"parts": "v"})


def _of_codes(change: Any, parts: str) -> Stages:
    """Replaces numbers before their scale by `change(codes, zero)`."""

    def decode(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        if part not in parts or w.call.formats[part] != ZERO_POINTS:
            return oracle.decode(w, part, raw, page, offset)
        codes, zero = oracle.nibbles(raw), oracle.zero_at(w, part, page, offset)
        return change(codes, zero).to(w.number) * oracle.scale_at(w, part, page, offset)

    return PLAIN.replace(decode=decode)


def _has_zero_points(call: KernelCall) -> bool:
    return ZERO_POINTS in call.formats.values()


ZEROS = (
    Fault(
        "zero-points-ignored",
        "formats",
        "all numbers of keys or values are too large, by their zero point times their scale",
        "codes from 0 on are read as numbers",
        lambda parts: _of_codes(lambda codes, zero: codes, parts),
        _has_zero_points,
        PARTS,
    ),
    Fault(
        "zero-points-of-another-head",
        "formats",
        "each key head has the zero points of another one",
        "zero points are loaded with the index or the stride of other heads",
        lambda parts: _of_codes(lambda codes, zero: codes - zero.flip(1), parts),
        lambda call: _has_zero_points(call) and call.kv_heads > 1,
        PARTS,
    ),
    Fault(
        "zero-point-8-for-all",
        "formats",
        "numbers of keys or values are off by a multiple of their scale, which differs from token to token",
        "a kernel knows symmetric codes with an offset of 8",
        lambda parts: _of_codes(lambda codes, zero: codes - 8, parts),
        _has_zero_points,
        PARTS,
    ),
    Fault(
        "codes-with-zero-points-read-as-signed",
        "formats",
        "numbers of the upper half of the codes are 16 times their scale too small",
        "codes are widened from two's complement, as those of int4 without zero points",
        lambda parts: _of_codes(lambda codes, zero: oracle.signed(codes) - zero, parts),
        _has_zero_points,
        PARTS,
    ),
)
