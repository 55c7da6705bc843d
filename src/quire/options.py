"""The attention options of a layer: an immutable value that is validated once and used in every call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from quire.errors import ArgumentError, describe
from quire.keywords import with_pointers

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FAR = 2**62
"""The most a window can reach: positions are 64-bit."""

SMALLEST, LARGEST = 2.0**-100, 2.0**100
"""The range of softcap, scale, q_scale and out_scale. Kernels compute in fp32, whose range is 2^-126 to 2^128. Within these limits
`softcap * log2(e)` and `scale * log2(e)` are finite; a logit over the largest softcap that falls below 2^-126 and is flushed to
zero costs 2^-26, less than fp32 rounds away; and a q·k of up to 2^26 times the largest scale is finite."""
LARGEST_RATIO = 2.0**126
"""The most that `scale * q_scale / softcap` may be: a kernel may have it as one fp32 factor."""
STEEPEST = 2.0**64
"""The largest ALiBi slope: times a distance of up to 2^62 and log2(e), it is finite in fp32."""
RANGE = "from 2^-100 to 2^100 (7.9e-31 to 1.3e+30)"


NUMBERS = ("softcap",)
"""The optional numbers that kernels take as arguments."""
TENSOR_AXES = {"alibi": ("q_heads",), "sinks": ("q_heads",), "mask": ("tokens", "M"), "positions": ("tokens",)}
"""The optional tensors that kernels take as arguments, and their axes."""
TENSORS = {name: len(axes) for name, axes in TENSOR_AXES.items()}
"""The same, with the number of axes."""
PER_HEAD = {"alibi": (STEEPEST, False), "sinks": (LARGEST, True)}
"""The tensors `[q_heads]` of numbers: the largest magnitude, and whether infinities are allowed."""
TYPE_TRAITS = {"alibi": "alibi_dtype", "sinks": "sinks_dtype", "positions": "positions"}
"""Tensors whose type kernels are compiled for, and the trait with its name. A type may change: `module.to(torch.bfloat16)` changes
parameters in place."""
FEATURES = (*NUMBERS, "alibi", "sinks", "mask", "batch_invariant")
"""The features that a kernel may lack."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Traits:
    """What kernels are compiled for, of the options of a layer. `Problem` has all of these fields. `Options.traits` gives equal
    options one object, so that it can be hashed by identity."""

    causal: str = "yes"
    """yes, no or per-sequence."""
    window: tuple[int | None, int | None] = (None, None)
    """(left, right) keys visible besides the query's own; None is unbounded."""
    softcap: bool = False
    """Whether there is a softcap."""
    alibi: bool = False
    """Whether there are ALiBi slopes."""
    sinks: bool = False
    """Whether there are sinks."""
    mask: bool = False
    """Whether there is a tree mask."""
    batch_invariant: bool = False
    """Whether results are batch-invariant."""
    alibi_dtype: str = "fp32"
    """The type of the slopes."""
    sinks_dtype: str = "fp32"
    """The type of the sinks."""
    positions: str = "none"
    """The type of a tree's positions: none, int32 or int64."""
    negative_scale: bool = False
    """Whether the scale is negative."""


Window = int | tuple[int | None, int | None] | None
Scalar = float | torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Options:
    """The features of one attention layer: a frozen value, validated once and reused in every call. Logits are made in this order:
    scale, softcap, mask, ALiBi; then the sink.

    Example:
        >>> import quire
        >>> quire.Options(window=4096, softcap=50.0)
        Options(window=4096, softcap=50.0)
    """

    window: Window = None
    """Visible keys around a query: an int W counts them with the query's own, `(W-1, W-1)`; `(left, right)` counts to each
    side, None is unbounded. A causal query sees no key to its right, regardless of `right`."""
    softcap: float | None = None
    """Logits become `softcap * tanh(logit / softcap)`; from 2^-100 to 2^100, what kernels can compute with in fp32."""
    alibi: torch.Tensor | None = None
    """Slopes `[q_heads]`: `-slope * |q_pos - k_pos|` is added to the logits. An input, never derived from a head count."""
    sinks: torch.Tensor | None = None
    """One more logit per head `[q_heads]`, not scaled, without a value: it only takes weight away."""
    scale: float | None = None
    """Multiplies q·k; by default `head_dim ** -0.5`. 0, or of magnitude 2^-100 to 2^100."""
    causal: bool | torch.Tensor = True
    """Whether a query sees only keys up to its own position; a bool tensor `[seqs]` decides per sequence."""
    mask: torch.Tensor | None = None
    """Tree mask, bool `[tokens, M]`: True where a token sees the j-th new token of its own sequence. It replaces causality
    among new tokens; all of the context stays visible."""
    positions: torch.Tensor | None = None
    """Absolute position of each new token, integers `[tokens]`: needed by `mask` together with `window` or `alibi`, since the
    branches of a tree share positions."""
    q_scale: Scalar = None
    """Multiplies fp8 queries; from 2^-100 to 2^100."""
    out_scale: Scalar = None
    """Divides the output, which is then stored as fp8, saturating; from 2^-100 to 2^100. The type is that of `out`; without `out`,
    fp8 queries keep their own type and all others give `OCP_FP8`."""
    batch_invariant: bool = False
    """The bits of a result then do not depend on other sequences, the batch size, the hints or how the prompt was chunked."""

    def __post_init__(self) -> None:
        self._check_window()
        for name in (*PER_HEAD, "q_scale", "out_scale"):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor) and value.is_neg():
                # torch applies the sign when it reads such a view; a kernel would not.
                raise ArgumentError(name, "a tensor with the negative bit set", "a tensor without it: call tensor.resolve_neg()")
        self._check_numbers()
        for name in PER_HEAD:
            value = getattr(self, name)
            if value is not None and not (
                isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype in FLOATS and value.layout is torch.strided
            ):
                raise ArgumentError(name, describe(value), "a tensor [q_heads] of float64, float32, float16 or bfloat16, or None")
        if isinstance(self.causal, torch.Tensor):
            if self.causal.dtype is not torch.bool or self.causal.dim() != 1 or self.causal.layout is not torch.strided:
                raise ArgumentError("causal", describe(self.causal), "True, False or a bool tensor [seqs]")
            if self.mask is not None:
                raise ArgumentError("causal", "a tensor, together with a mask", "a bool: the mask replaces causality")
        elif not isinstance(self.causal, bool):
            raise ArgumentError("causal", describe(self.causal), "True, False or a bool tensor [seqs]")
        self._check_mask()
        if not isinstance(self.batch_invariant, bool):
            raise ArgumentError("batch_invariant", describe(self.batch_invariant), "True or False")

    def _check_numbers(self) -> None:
        if self.softcap is not None and not is_in_range(self.softcap):
            raise ArgumentError("softcap", describe(self.softcap), f"a finite number above 0, {RANGE}, or None for no cap")
        if self.scale is not None and not (_is_finite(self.scale) and (self.scale == 0 or is_in_range(abs(self.scale)))):
            raise ArgumentError("scale", describe(self.scale), f"a finite number, 0 or of magnitude {RANGE}, or None")
        for name in ("q_scale", "out_scale"):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                if value.dtype is not torch.float32 or value.dim() != 0 or value.layout is not torch.strided:
                    raise ArgumentError(name, describe(value), "a number, or an fp32 tensor []")
            elif value is not None and not is_in_range(value):
                raise ArgumentError(name, describe(value), f"a finite number above 0, {RANGE}, or an fp32 tensor []")
        q_scale = 1.0 if self.q_scale is None or isinstance(self.q_scale, torch.Tensor) else self.q_scale
        broken = self.too_large(q_scale)
        if broken is not None:
            raise ArgumentError(*broken)

    def too_large(self, q_scale: float) -> tuple[str, str, str] | None:
        """What is wrong with the factors that kernels make of several options: argument, given, allowed; None if nothing is."""
        factor = abs(1.0 if self.scale is None else self.scale) * q_scale
        if factor > LARGEST:
            return "q_scale", f"{q_scale}, times the scale {self.scale}", "a product of at most 2^100 (1.3e+30)"
        if self.softcap is not None and factor / self.softcap > LARGEST_RATIO:
            given = f"{self.scale} times the q_scale {q_scale}, over the softcap {self.softcap}"
            return "scale", given, "a ratio of at most 2^126 (8.5e+37)"
        return None

    def _check_window(self) -> None:
        window = self.window
        if window is None:
            return
        if isinstance(window, int) and not isinstance(window, bool):
            if not 1 <= window <= FAR:
                raise ArgumentError("window", describe(window), "1 or more keys, the query's own included; None for no window")
            return
        if not (isinstance(window, tuple) and len(window) == 2):
            raise ArgumentError("window", describe(window), "an int, a pair (left, right), or None")
        for side in window:
            if side is not None and (not isinstance(side, int) or isinstance(side, bool) or not 0 <= side <= FAR):
                raise ArgumentError("window", describe(window), "(left, right), each 0 or more keys, or None where it is unbounded")

    def _check_mask(self) -> None:
        mask, positions = self.mask, self.positions
        is_mask = isinstance(mask, torch.Tensor) and mask.dtype is torch.bool and mask.dim() == 2 and mask.layout is torch.strided
        if mask is not None and not is_mask:
            raise ArgumentError("mask", describe(mask), "a bool tensor [tokens, M] or None")
        if positions is not None:
            if mask is None:
                raise ArgumentError("positions", "a tensor, without a mask", "None: only a tree mask needs positions")
            right_type = isinstance(positions, torch.Tensor) and positions.dtype in (torch.int32, torch.int64)
            if not right_type or positions.dim() != 1 or positions.layout is not torch.strided:
                raise ArgumentError("positions", describe(positions), "an int32 or int64 tensor [tokens]")
        if mask is not None and positions is None and (self.window is not None or self.alibi is not None):
            other = "window" if self.window is not None else "alibi"
            allowed = "integers [tokens]: the branches of a tree share positions"
            raise ArgumentError("positions", f"nothing, with mask and {other}", allowed)

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """The window as (left, right) keys visible besides the query's own, before causality."""
        if self.window is None:
            return None, None
        if isinstance(self.window, int):
            return self.window - 1, self.window - 1
        return self.window

    @cached_property
    def traits(self) -> Traits:
        """The properties that a kernel is compiled for, without tensors."""
        given = {name: getattr(self, name) is not None for name in (*NUMBERS, *TENSORS) if name != "positions"}
        causal = "per-sequence" if isinstance(self.causal, torch.Tensor) else "yes" if self.causal else "no"
        negative = self.scale is not None and self.scale < 0
        return _traits(causal=causal, window=self.sides, batch_invariant=self.batch_invariant, negative_scale=negative, **given)

    @cached_property
    def typed_tensors(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """The given tensors whose type is a trait, each with the trait's name."""
        values = ((field, getattr(self, name)) for name, field in TYPE_TRAITS.items())
        return tuple((field, value) for field, value in values if value is not None)

    @cached_property
    def numbers(self) -> tuple[float | None, ...]:
        """The values of `NUMBERS`."""
        values = (getattr(self, name) for name in NUMBERS)
        return tuple(None if value is None else float(value) for value in values)

    @cached_property
    def first_axes(self) -> tuple[tuple[torch.Tensor, str], ...]:
        """The given ones of `TENSOR_AXES`, each with the name of its first axis."""
        values = ((getattr(self, name), axes[0]) for name, axes in TENSOR_AXES.items())
        return tuple((value, axis) for value, axis in values if value is not None)

    @cached_property
    def tensors(self) -> tuple[tuple[torch.Tensor | None, int], ...]:
        """The values of `TENSORS`, each with its number of axes."""
        return tuple((getattr(self, name), axes) for name, axes in TENSORS.items())

    def __getstate__(self) -> dict[str, object]:
        # The fields alone: what else was kept with it belongs to this process.
        return {name: getattr(self, name) for name in type(self).__dataclass_fields__}

    def __repr__(self) -> str:
        given = []
        for name, field in type(self).__dataclass_fields__.items():
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                given.append(f"{name}={describe(value)}")
            elif value != field.default:
                given.append(f"{name}={value!r}")
        return f"Options({', '.join(given)})"


@lru_cache(maxsize=1024)
def _traits(**facts: Any) -> Traits:
    return Traits(**facts)


Options.__init__ = with_pointers(Options.__init__)  # type: ignore[method-assign]  # a dataclass has no source for a decorator
PLAIN = Options()


def is_in_range(value: object) -> bool:
    """Whether it is a positive number that kernels can compute with in fp32."""
    return _is_finite(value) and SMALLEST <= value <= LARGEST  # type: ignore[operator]


def _is_finite(value: object) -> bool:
    """Whether it is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
