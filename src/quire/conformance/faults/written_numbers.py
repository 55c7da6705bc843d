"""Faults of writes: what is stored. Scales, rounding, saturation, formats, and the Hadamard transform of keys."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.conformance.cases.formats import FP8, GROUP, LARGEST, TYPES, WITH_INFINITY, in_sequency_order
from quire.conformance.cases.write_call import WriteCall
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.written_places import ORDERS, PARTS, prepared
from quire.conformance.oracle import write as oracle
from quire.conformance.oracle.write import RIGHT, Divisor, Rows, WriteStages, WriteWork
from quire.conformance.oracle.write_budget import half_step

Change = Callable[[WriteWork, str, Rows], Divisor]


def _divisors(change: Change, parts: str = "kv") -> WriteStages:
    """Heads are divided by `change(w, part, rows)`, and where tokens have scales these are stored."""

    def divisor(w: WriteWork, part: str, rows: Rows) -> Divisor:
        return change(w, part, rows) if part in parts and w.call.scales[part] is not None else oracle.divisor(w, part, rows)

    return RIGHT.replace(divisor=divisor)


def _head_scales(order: str) -> WriteStages:
    def change(w: WriteWork, part: str, rows: Rows) -> Divisor:
        value = oracle.divisor(w, part, rows).value
        return Divisor(value[:, ORDERS[order](value.shape[1])])

    return _divisors(change)


def _scales_swapped() -> WriteStages:
    return _divisors(lambda w, part, rows: oracle.divisor(w, "v" if part == "k" else "k", rows))


def _one_scale(part: str) -> WriteStages:
    return _divisors(lambda w, other, rows: oracle.divisor(w, part, rows))


def _inverted(parts: str) -> WriteStages:
    return _divisors(lambda w, part, rows: Divisor(1.0 / oracle.divisor(w, part, rows).value), parts)


def _scales_not_stored(parts: str) -> WriteStages:
    return RIGHT.replace(scales=lambda w, part, divisor: None if part in parts else oracle.scales(w, part, divisor))


def _reciprocals_stored(parts: str) -> WriteStages:
    def scales(w: WriteWork, part: str, divisor: Divisor) -> Divisor | None:
        right = oracle.scales(w, part, divisor)
        return right if right is None or part not in parts else Divisor(1.0 / right.value, right.loss)

    return RIGHT.replace(scales=scales)


def _scale_of_all_heads() -> WriteStages:
    def change(w: WriteWork, part: str, rows: Rows) -> Divisor:
        right = oracle.divisor(w, part, rows)
        most = right.value.amax(1, keepdim=True)
        return Divisor(most.expand_as(right.value), torch.as_tensor(right.loss).amax())

    return _divisors(change)


def _scale_before_turn() -> WriteStages:
    return _divisors(lambda w, part, rows: oracle.divisor(w, part, w.given(part)), "k")


def _other_range(largest: float) -> WriteStages:
    def change(w: WriteWork, part: str, rows: Rows) -> Divisor:
        right = oracle.divisor(w, part, rows)
        return Divisor(right.value * LARGEST[w.case.formats[part]] / largest, right.loss)

    return _divisors(change)


def _quotients(change: Callable[[str, torch.Tensor], torch.Tensor], parts: str = "kv") -> WriteStages:
    """Quotients are stored as `change(format, quotients)`."""

    def quantise(w: WriteWork, part: str, quotient: torch.Tensor) -> torch.Tensor:
        return change(w.case.formats[part], quotient) if part in parts else oracle.quantise(w, part, quotient)

    return RIGHT.replace(quantise=quantise)


def _unsaturated(format: str, quotient: torch.Tensor) -> torch.Tensor:
    """Integers wrap, and fp8 numbers overflow to NaN or infinity."""
    largest = LARGEST.get(format)
    if largest is None or format in GROUP:
        return quotient
    if format in FP8:
        beyond = quotient.abs() > largest + float(half_step(format, torch.tensor(largest, dtype=torch.float64)))
        kept = quotient.clamp(-largest, largest)
        return torch.where(beyond, quotient.sign() * torch.inf if format in WITH_INFINITY else torch.nan, kept)
    wrap = 2 * (largest + 1)
    rounded = quotient.round()
    return torch.where(rounded.abs() > largest, (rounded + largest + 1) % wrap - largest - 1, quotient)


def _truncated(format: str, quotient: torch.Tensor) -> torch.Tensor:
    largest = LARGEST.get(format)
    kept = quotient if largest is None else quotient.clamp(-largest, largest)
    return kept - kept.sign() * half_step(format, kept.abs())


def _as_fp8(other: str) -> WriteStages:
    def change(format: str, quotient: torch.Tensor) -> torch.Tensor:
        if format not in FP8:
            return quotient if format not in LARGEST else quotient.clamp(-LARGEST[format], LARGEST[format])
        stored = quotient.clamp(-LARGEST[other], LARGEST[other]).to(TYPES[other])
        return stored.view(TYPES[format]).double()

    return _quotients(change)


def _transformed(change: Callable[[torch.Tensor], torch.Tensor]) -> WriteStages:
    """Keys are transformed by `change`."""
    return RIGHT.replace(transform=lambda w, rows: oracle.transform(w, rows)._replace(x=change(rows.x)))


def _factor(power: float) -> WriteStages:
    def transform(w: WriteWork, rows: Rows) -> Rows:
        right = oracle.transform(w, rows)
        by = rows.x.shape[-1] ** power
        return right._replace(x=right.x * by, size=right.size * by)

    return RIGHT.replace(transform=transform)


def _values_transformed() -> WriteStages:
    return prepared(lambda w, s, part, rows: oracle.transform(w, rows), "v")


def _has_scales(call: WriteCall) -> bool:
    """Whether scales are given, and not computed."""
    return any(scale is not None and scale.dim() < 3 for scale in call.scales.values())


def _has_both_scales(call: WriteCall) -> bool:
    return _has_scales(call) and call.k_scale is not None and call.v_scale is not None and "v" in call.places


def _has_token_scales(call: WriteCall) -> bool:
    return any(scale is not None and scale.dim() == 3 for scale in call.scales.values())


def _has_format(*names: str) -> Callable[[WriteCall], bool]:
    return lambda call: any(format in names for part, format in call.case.formats.items() if part in call.places)


def _is_rounded(call: WriteCall) -> bool:
    return any(format != call.case.q_dtype and format not in GROUP for format in call.case.formats.values())


def _transforms(call: WriteCall) -> bool:
    return call.hadamard


WRITTEN_NUMBERS = (
    Fault(
        "write-scale-ignored",
        "writes: scales",
        "numbers are stored without being divided by their scale",
        "the scale is not passed, or is used by readers alone",
        lambda parts: _divisors(lambda w, part, rows: Divisor(torch.ones(1, 1, 1, dtype=torch.float64)), parts),
        _has_scales,
        PARTS,
    ),
    Fault(
        "write-scale-inverted",
        "writes: scales",
        "numbers are multiplied by their scale instead of divided by it",
        "a scale is taken for its reciprocal",
        _inverted,
        _has_scales,
        PARTS,
    ),
    Fault(
        "write-scales-of-k-and-v-swapped",
        "writes: scales",
        "keys are divided by the scale of values, and values by that of keys",
        "two arguments of the same type are exchanged",
        _scales_swapped,
        _has_both_scales,
    ),
    Fault(
        "write-one-scale-for-both",
        "writes: scales",
        "keys and values are divided by the same scale",
        "a kernel takes one scale for the whole cache",
        _one_scale,
        _has_both_scales,
        ({"part": "k"}, {"part": "v"}),
    ),
    Fault(
        "write-head-scales-in-wrong-order",
        "writes: scales",
        "heads are divided by the scales of other heads",
        "the index of a head is not used, or one scale is loaded for all of them",
        _head_scales,
        lambda call: call.case.kv_heads > 1 and any(scale is not None and scale.dim() == 1 for scale in call.scales.values()),
        tuple({"order": order} for order in ORDERS),
    ),
    Fault(
        "write-token-scales-not-stored",
        "writes: scales",
        "numbers are divided by the scale of their token, and the scale is not stored",
        "the kernel that computes scales returns them, and no kernel stores them",
        _scales_not_stored,
        _has_token_scales,
        PARTS,
    ),
    Fault(
        "write-token-scales-inverted",
        "writes: scales",
        "the reciprocal of each token's scale is stored",
        "the factor that numbers are multiplied by is stored, and not the one that readers multiply by",
        _reciprocals_stored,
        _has_token_scales,
        PARTS,
    ),
    Fault(
        "write-token-scale-of-all-heads",
        "writes: scales",
        "all heads of a token have the scale of its largest element",
        "the largest magnitude is taken over the whole token",
        _scale_of_all_heads,
        lambda call: _has_token_scales(call) and call.case.kv_heads > 1,
    ),
    Fault(
        "write-token-scale-before-turn",
        "writes: scales",
        "scales of tokens are those of keys before they were rotated or transformed",
        "the largest magnitude is computed while keys are loaded",
        _scale_before_turn,
        lambda call: _has_token_scales(call) and (call.case.rotated > 0 or call.hadamard),
    ),
    Fault(
        "write-scale-of-other-range",
        "writes: scales",
        "scales of tokens map their largest element to another number than the largest of the format",
        "the range of a format has more than one convention: 127 or 128, 7 or 8, 448 or 240",
        _other_range,
        _has_token_scales,
        tuple({"largest": n} for n in (128.0, 8.0, 240.0, 448.0, 127.0, 57344.0, 6.0)),
        inject=lambda call: {"largest": 240.0 if call.case.formats["k"] in (FP8[0], FP8[2]) else 128.0},
    ),
    Fault(
        "write-not-saturated",
        "writes: formats",
        "numbers beyond the range of the format wrap around, or become NaN or infinite",
        "a cast that does not saturate",
        lambda: _quotients(_unsaturated),
        lambda call: _has_scales(call) and any(format in LARGEST and format not in GROUP for format in call.case.formats.values()),
    ),
    Fault(
        "write-truncated",
        "writes: formats",
        "numbers are rounded toward zero",
        "a cast that drops bits, or one to an integer without rounding",
        lambda parts: _quotients(_truncated, parts),
        _is_rounded,
        PARTS,
    ),
    Fault(
        "write-as-other-fp8",
        "writes: formats",
        "numbers are encoded in another fp8 format than that of the cache",
        "a byte does not state its format: those of NVIDIA and AMD with three bits of fraction differ by a factor of 2",
        _as_fp8,
        _has_format(*FP8),
        tuple({"other": other} for other in FP8),
        inject=lambda call: {"other": FP8[1] if call.case.formats["k"] == FP8[0] else FP8[0]},
    ),
    Fault(
        "write-keys-not-transformed",
        "writes: hadamard",
        "keys are stored without the Hadamard transform",
        "only queries are transformed",
        lambda: _transformed(lambda x: x),
        _transforms,
    ),
    Fault(
        "write-hadamard-factor-missing",
        "writes: hadamard",
        "keys are too large by the square root of head_dim",
        "keys are transformed by a matrix of 1 and -1, which is not normalised",
        lambda: _factor(0.5),
        _transforms,
    ),
    Fault(
        "write-hadamard-factor-twice",
        "writes: hadamard",
        "keys are too small by the square root of head_dim",
        "keys are divided by head_dim and not by its square root",
        lambda: _factor(-0.5),
        _transforms,
    ),
    Fault(
        "write-hadamard-other-order",
        "writes: hadamard",
        "keys are transformed by a matrix whose rows are in another order",
        "rows in the order of their sign changes (Walsh), and not in the natural order",
        lambda: _transformed(in_sequency_order),
        _transforms,
    ),
    Fault(
        "write-values-transformed",
        "writes: hadamard",
        "values are transformed as keys are",
        "one function stores both",
        _values_transformed,
        lambda call: call.hadamard and call.case.dims["v"] & (call.case.dims["v"] - 1) == 0,
    ),
)
