"""Rotary position embedding (RoPE) of a layer: an immutable value that is validated once and used in every write."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from quire.cache.format import dtype_name
from quire.errors import ArgumentError, describe
from quire.keywords import suggestion, with_pointers

WEIGHTS = (torch.float32, torch.float16, torch.bfloat16)
"""The types that weights of a norm can have."""
AXES = 3
"""The axes of positions with sections: time, height and width."""


class RopeTraits(NamedTuple):
    """What kernels are compiled for, of the `Rope` of a layer and of the calls that use it."""

    rotary_dim: int
    """Elements of a head that are rotated."""
    interleaved: bool = False
    """Whether neighbours are a pair, and not elements of the two halves."""
    sections: tuple[int, ...] = ()
    """Frequencies per axis of positions; empty if positions have one axis."""
    spread: bool = False
    """Whether the axes take turns."""
    q_norm: str = "none"
    """The type of the weights of q's norm, or none."""
    k_norm: str = "none"
    """The same for k."""
    unit_offset: bool = False
    """Whether the norms multiply by 1 + weight."""
    q: bool = True
    """Whether queries are rotated too."""
    vectors: bool = True
    """Whether rows of the tables can be read 16 bytes at a time."""

    def __str__(self) -> str:
        style = "interleaved" if self.interleaved else "half-split"
        of = "" if self.q else " of k alone"
        norms = [name for name, dtype in (("q norm", self.q_norm), ("k norm", self.k_norm)) if dtype != "none"]
        return " with ".join((f"{style} rope {self.rotary_dim}{of}", *([" and ".join(norms)] if norms else [])))


@dataclass(frozen=True, eq=False)
class Rope:
    """How a layer rotates queries and keys: a frozen value, validated once and reused in every `quire.step` and `quire.write`.
    A head is normalised (if there is a norm), then its first `rotary_dim` elements are rotated, in fp32, and rounded once. With a
    latent cache (`KVCache.v_in_k`) the first `v_in_k` elements of a key are normalised, and those behind them are rotated, in keys
    and in queries.

    Example:
        >>> import quire
        >>> rope = quire.Rope.make(head_dim=128, base=500000.0, max_positions=8192)
        >>> rope
        Rope(half-split rope 128, 8192 positions)
    """

    cos: torch.Tensor
    """Cosines, fp32 `[max_positions, rotary_dim / 2]`; the last axis has stride 1. A scaled table (YaRN) has its factor in it."""
    sin: torch.Tensor
    """Sines, of the same shape and strides."""
    interleaved: bool = False
    """False: element i is paired with i + rotary_dim / 2 (NeoX, Llama, Qwen). True: 2i is paired with 2i + 1 (GPT-J)."""
    sections: tuple[int, int, int] | None = None
    """M-RoPE: how many frequencies take the position of each axis (time, height, width); positions are then `[3, tokens]`."""
    sections_interleaved: bool = False
    """Whether the axes of `sections` take turns, frequency by frequency (Qwen3-VL), and do not follow each other (Qwen2-VL)."""
    q_norm: torch.Tensor | None = None
    """Weights `[head_dim]` of an RMSNorm of each query head before it is rotated, fp32, fp16 or bf16; None with a latent cache."""
    k_norm: torch.Tensor | None = None
    """The same for each key head; with a latent cache, weights `[v_in_k]` of an RMSNorm of the latent."""
    eps: float = 1e-6
    """Added to the mean of squares in the norms."""
    unit_offset: bool = False
    """Whether the norms multiply by 1 + weight, as Gemma stores them, and not by weight (Qwen3)."""

    def __post_init__(self) -> None:
        self._check_tables()
        for name in ("interleaved", "sections_interleaved", "unit_offset"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(name, describe(getattr(self, name)), "True or False")
        for name in ("q_norm", "k_norm"):
            weight = getattr(self, name)
            if weight is not None and not (_is_plain(weight) and weight.dim() == 1 and weight.dtype in WEIGHTS):
                raise ArgumentError(name, describe(weight), "a tensor [head_dim] of float32, float16 or bfloat16, or None")
            if weight is not None and weight.stride(0) != 1:
                raise ArgumentError(name, f"a stride of {weight.stride(0)}", "a contiguous tensor [head_dim]")
            if weight is not None and (weight.device != self.cos.device or weight.shape[0] < self.rotary_dim):
                allowed = f"at least rotary_dim = {self.rotary_dim} elements, on {self.cos.device} as the tables"
                raise ArgumentError(name, describe(weight), allowed)
        if not _is_number(self.eps) or not 0 <= self.eps <= 1:
            raise ArgumentError("eps", describe(self.eps), "a number from 0 to 1")
        self._check_sections()

    def _check_tables(self) -> None:
        cos, sin = self.cos, self.sin
        for name, table in (("cos", cos), ("sin", sin)):
            if not (_is_plain(table) and table.dtype is torch.float32 and table.dim() == 2):
                raise ArgumentError(name, describe(table), "a float32 tensor [max_positions, rotary_dim / 2]")
            if not table.numel() or table.stride(1) != 1:
                raise ArgumentError(name, f"{describe(table)}, strides {table.stride()}", "1 position or more, rows of stride 1")
        if (sin.shape, sin.stride(), sin.device) != (cos.shape, cos.stride(), cos.device):
            given = f"{describe(sin)}, strides {sin.stride()}"
            raise ArgumentError("sin", given, f"as cos: {describe(cos)}, strides {cos.stride()}")

    def _check_sections(self) -> None:
        sections, half = self.sections, self.rotary_dim // 2
        if sections is None:
            if self.sections_interleaved:
                raise ArgumentError("sections_interleaved", "True without sections", "sections=(time, height, width), or False")
            return
        if isinstance(sections, list):
            sections = tuple(sections)
            object.__setattr__(self, "sections", sections)
        whole = isinstance(sections, tuple) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sections)
        if not whole or len(sections) != AXES or sum(sections) != half:
            allowed = f"three numbers of frequencies whose sum is rotary_dim / 2 = {half}, or None"
            raise ArgumentError("sections", describe(self.sections), allowed)
        if self.sections_interleaved and 3 * max(sections[1:]) > half:
            # Axis a takes the frequencies a, a + 3, a + 6 ...
            raise ArgumentError("sections", repr(sections), f"height and width of at most {half // 3} each, to take turns")

    @classmethod
    def make(
        cls,
        head_dim: int,
        base: float = 10000.0,
        max_positions: int = 8192,
        *,
        rotary_dim: int | None = None,
        scaling: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
        **fields: Any,
    ) -> Rope:
        """Makes the tables, in float64, and rounds them to fp32.

        Args:
            head_dim: The size of a head of q and K.
            base: The base of the frequencies: `rope_theta` of a model's configuration.
            max_positions: The number of positions. A token at a later position is a violation of the contract.
            rotary_dim: How many elements of a head are rotated. Default: what the scaling says, or all of them.
            scaling: `rope_scaling` or `rope_parameters` of a model's configuration: a `rope_type` ("default", "linear", "yarn",
                "llama3" or "mrope") with its numbers. `partial_rotary_factor` gives rotary_dim, `mrope_section` and
                `mrope_interleaved` the sections.
            device: Where the tables are.
            **fields: Other fields of `quire.Rope`: `interleaved`, `sections`, `q_norm`, `k_norm`, `eps` ...

        Raises:
            ArgumentError: A number is out of range; the scaling has an unknown type or key, or lacks one, or contradicts another
                argument.

        Example:
            >>> import quire
            >>> scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
            >>> quire.Rope.make(128, 1e6, 131072, scaling=scaling).cos.shape
            torch.Size([131072, 64])
        """
        given = head_dim if rotary_dim is None else rotary_dim
        for name, value in (("head_dim", head_dim), ("max_positions", max_positions), ("rotary_dim", given)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
                raise ArgumentError(name, describe(value), "an int of 1 or more")
        if not _is_number(base) or not base > 1:
            raise ArgumentError("base", describe(base), "a number above 1")
        scaling = {} if scaling is None else scaling
        kind, numbers = _scaling_of(scaling, base)
        dim = _rotary_dim(head_dim, rotary_dim, scaling)
        fields = _with_sections(fields, scaling)
        frequencies, factor = _frequencies(dim, float(base), kind, numbers)
        angles = torch.arange(max_positions, dtype=torch.float64, device="cpu")[:, None] * frequencies
        cos, sin = ((table * factor).float().to(device) for table in (angles.cos(), angles.sin()))
        return cls(cos, sin, **fields)

    @classmethod
    def from_cos_sin_cache(cls, cos_sin_cache: torch.Tensor, **fields: Any) -> Rope:
        """Takes the table of vLLM and SGLang: `[max_positions, rotary_dim]`, in each row the cosines, then the sines. An fp32 table
        is aliased; another type is copied as fp32, which is exact.

        Args:
            cos_sin_cache: The table, of fp32, fp16 or bf16.
            **fields: Other fields of `quire.Rope`. `interleaved=True` is vLLM's `is_neox_style=False`.

        Raises:
            ArgumentError: The tensor has another type or shape.

        Example:
            >>> import torch, quire
            >>> quire.Rope.from_cos_sin_cache(torch.ones(4096, 64), interleaved=True)
            Rope(interleaved rope 64, 4096 positions)
        """
        table = cos_sin_cache
        if not (_is_plain(table) and table.dim() == 2 and table.dtype in WEIGHTS) or table.shape[1] % 2:
            allowed = "a tensor [max_positions, rotary_dim] of float32, float16 or bfloat16 with an even rotary_dim"
            raise ArgumentError("cos_sin_cache", describe(table), allowed)
        cos, sin = table.float().chunk(2, dim=1)
        return cls(cos, sin, **fields)

    @property
    def rotary_dim(self) -> int:
        """How many elements of a head are rotated: the first ones, or the first ones behind the values of a latent cache."""
        return 2 * self.cos.shape[1]

    @property
    def max_positions(self) -> int:
        """The number of positions of the tables."""
        return self.cos.shape[0]

    @cached_property
    def axes(self) -> torch.Tensor:
        """The axis of positions that each frequency takes, int64 `[rotary_dim / 2]` in host memory; zeros without sections."""
        half = self.rotary_dim // 2
        if self.sections is None:
            return torch.zeros(half, dtype=torch.int64, device="cpu")
        if not self.sections_interleaved:
            return torch.arange(AXES, device="cpu").repeat_interleave(torch.tensor(self.sections, device="cpu"))
        found = torch.zeros(half, dtype=torch.int64, device="cpu")
        for axis in (1, 2):
            found[axis : AXES * self.sections[axis] : AXES] = axis
        return found

    def traits(self, with_q: bool) -> RopeTraits:
        """What a kernel is compiled for, for calls with or without queries. The types of the weights are those of now: a module's
        `to` changes them in place."""
        q_norm, k_norm = self.q_norm, self.k_norm
        types = (None if q_norm is None or not with_q else q_norm.dtype, None if k_norm is None else k_norm.dtype)
        return _traits(self._facts, types, with_q)

    @cached_property
    def _facts(self) -> RopeTraits:
        """The traits that depend on the rope alone."""
        sections, spread, half = self.sections or (), self.sections_interleaved, self.cos.shape[1]
        places = [table.data_ptr() or 4 * table.storage_offset() for table in (self.cos, self.sin)]
        vectors = all(place % 16 == 0 for place in places) and half % 4 == self.cos.stride(0) % 4 == 0
        return RopeTraits(2 * half, self.interleaved, sections, spread, unit_offset=self.unit_offset, vectors=vectors)

    def rotate(
        self, x: torch.Tensor, positions: torch.Tensor, norm: torch.Tensor | None = None, v_in_k: int | None = None
    ) -> torch.Tensor:
        """Normalises and rotates heads in torch operators, for code that attends in context form and for tests.

        Args:
            x: Queries or keys `[tokens, heads, head_dim]`.
            positions: Integers `[tokens]`, with sections `[3, tokens]`. Rows at positions that the tables lack become NaN.
            norm: `q_norm` or `k_norm`, or None.
            v_in_k: For absorbed queries and whole keys of a latent cache, that of the cache: the first `v_in_k` elements are
                normalised, if there is a norm, and those behind them are rotated.

        Returns:
            fp32 `[tokens, heads, head_dim]`, not rounded to the type of x.

        Example:
            >>> import torch, quire
            >>> rope = quire.Rope(cos=torch.zeros(4, 1), sin=torch.ones(4, 1))  # a quarter turn at every position
            >>> rope.rotate(torch.tensor([[[1.0, 2.0, 5.0]]]), torch.tensor([3])).tolist()
            [[[-2.0, 1.0, 5.0]]]
        """
        latent, x = x.float().split((v_in_k or 0, x.shape[-1] - (v_in_k or 0)), -1)
        if norm is not None and v_in_k:
            latent = self._normalised(latent, norm)
        elif norm is not None:
            x = self._normalised(x, norm)
        inside = (positions >= 0) & (positions < self.max_positions)
        at = torch.where(inside, positions, 0).long()
        half = self.rotary_dim // 2
        if self.sections is None:
            cos, sin = self.cos[at], self.sin[at]
        else:
            place, inside = at[self.axes.to(at.device)].T, inside.all(0)
            frequency = torch.arange(half, device=at.device)
            cos, sin = self.cos[place, frequency], self.sin[place, frequency]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        turned, rest = x[..., : 2 * half], x[..., 2 * half :]
        if self.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return torch.where(inside[:, None, None], torch.cat((latent, turned, rest), -1), torch.nan)

    def _normalised(self, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        weight = norm.float() + 1 if self.unit_offset else norm.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    def rotate_rows(
        self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, v_in_k: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a write stores, in torch operators: rotated keys and values or, in a latent cache, both parts of rotated keys."""
        if v_in_k is None:
            return self.rotate(k, positions, self.k_norm), v
        both = self.rotate(torch.cat((k, v), -1), positions, self.k_norm, v_in_k)
        return both[..., :v_in_k], both[..., v_in_k:]

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in type(self).__dataclass_fields__}

    def __repr__(self) -> str:
        return f"Rope({self.traits(True)}, {self.max_positions} positions)"


Rope.__init__ = with_pointers(Rope.__init__)  # type: ignore[method-assign]  # a dataclass has no source for a decorator


@lru_cache(maxsize=1024)
def _traits(facts: RopeTraits, types: tuple[torch.dtype | None, torch.dtype | None], q: bool) -> RopeTraits:
    q_norm, k_norm = ("none" if dtype is None else dtype_name(dtype) for dtype in types)
    return facts._replace(q_norm=q_norm, k_norm=k_norm, q=q)


def _is_plain(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_neg()


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class _Scaling(NamedTuple):
    """The keys of one type of scaling."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_ORIGINAL = "original_max_position_embeddings"
_SCALINGS = {
    "default": _Scaling(),
    "linear": _Scaling(("factor",)),
    "yarn": _Scaling(("factor", _ORIGINAL), ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")),
    "llama3": _Scaling(("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)),
}
"""Types of `rope_scaling` in model configurations."""
_KINDS = ("rope_type", "type")
"""The key of the type; older configurations have the second."""
_BASE = "rope_theta"
"""Newer configurations repeat the base among the numbers of the scaling."""
_PARTIAL = "partial_rotary_factor"
"""The part of a head that is rotated."""
_SECTIONS = {"mrope_section": "sections", "mrope_interleaved": "sections_interleaved"}
"""Keys of M-RoPE, with the fields of `Rope` that they give."""
_MROPE = "mrope"
"""A type of older configurations: plain frequencies, with sections."""


def _rotary_dim(head_dim: int, given: int | None, scaling: Mapping[str, Any]) -> int:
    """How many elements of a head are rotated: what is given, what the scaling says, or all."""
    part = scaling.get(_PARTIAL)
    if part is not None and (not _is_number(part) or not 0 < part <= 1):
        raise ArgumentError("scaling", f"{_PARTIAL} {part!r}", "a number above 0, at most 1")
    named = None if part is None else int(head_dim * part)
    dim = next((n for n in (given, named) if n is not None), head_dim)
    if named not in (None, dim):
        raise ArgumentError("rotary_dim", given, f"{named}, as {_PARTIAL} of the scaling says, or None")
    if dim % 2 or not 0 < dim <= head_dim:
        raise ArgumentError("rotary_dim", dim, f"an even number from 2 to head_dim = {head_dim}")
    return dim


def _with_sections(fields: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `Rope`, and those that a scaling has."""
    found = dict(fields)
    for key, field in _SECTIONS.items():
        value = scaling.get(key)
        value = tuple(value) if isinstance(value, list) else value
        given = found.get(field, value)
        if value is not None and (tuple(given) if isinstance(given, list) else given) != value:
            raise ArgumentError(field, describe(given), f"{value!r}, as {key} of the scaling says, or not given")
        found |= {} if value is None else {field: value}
    if _MROPE in map(scaling.get, _KINDS) and found.get("sections") is None:
        raise ArgumentError("scaling", f"{_MROPE} without mrope_section", "mrope_section, or sections=(time, height, width)")
    return found


def _frequencies(dim: int, base: float, kind: str, numbers: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair, float64 `[dim / 2]`, and the factor of the tables."""
    plain = base ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if kind == "default":
        return plain, 1.0
    factor = numbers["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        low, high, original = (numbers[name] for name in ("low_freq_factor", "high_freq_factor", _ORIGINAL))
        turns = original * plain / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return plain * (smooth + (1 - smooth) / factor), 1.0
    low, high = (
        dim * math.log(numbers[_ORIGINAL] / (numbers.get(name, turns) * 2 * math.pi)) / (2 * math.log(base))
        for name, turns in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if numbers.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, _yarn_factor(numbers)


def _yarn_factor(numbers: Mapping[str, Any]) -> float:
    """What YaRN multiplies cosines and sines by, so that logits grow by its square."""

    def grown(by: float) -> float:
        return 1.0 if numbers["factor"] <= 1 else 0.1 * by * math.log(numbers["factor"]) + 1.0

    if numbers.get("attention_factor") is not None:
        return float(numbers["attention_factor"])
    if numbers.get("mscale") and numbers.get("mscale_all_dim"):
        return grown(numbers["mscale"]) / grown(numbers["mscale_all_dim"])
    return grown(1.0)


def _scaling_of(scaling: Mapping[str, Any], base: float) -> tuple[str, dict[str, Any]]:
    """The type of a scaling and its numbers."""
    if not isinstance(scaling, Mapping):
        raise ArgumentError("scaling", describe(scaling), "a mapping such as {'rope_type': 'linear', 'factor': 2.0}, or None")
    kinds = {"default" if scaling[name] == _MROPE else scaling[name] for name in _KINDS if name in scaling}
    kind = kinds.pop() if len(kinds) == 1 else None if kinds or scaling else "default"
    if kind not in _SCALINGS:
        raise ArgumentError("scaling", repr(dict(scaling)), f"one rope_type of {', '.join((*_SCALINGS, _MROPE))}")
    if scaling.get(_BASE, base) != base:
        raise ArgumentError("scaling", f"{_BASE} {scaling[_BASE]!r}", f"the base, {base}")
    others = (*_KINDS, _BASE, _PARTIAL, *_SECTIONS)
    numbers = {name: value for name, value in scaling.items() if name not in others and value is not None}
    _check_numbers(kind, numbers)
    return kind, numbers


def _check_numbers(kind: str, numbers: Mapping[str, Any]) -> None:
    """Raises unless a scaling has all its numbers, no others, and each in its range."""
    required, optional = _SCALINGS[kind]
    known = (*required, *optional)
    missing = [name for name in required if name not in numbers]
    if missing:
        raise ArgumentError("scaling", f"{kind} without {', '.join(missing)}", f"all of {', '.join(required)}")
    for name, value in numbers.items():
        if name not in known:
            raise ArgumentError("scaling", f"{kind} with {name}", f"{', '.join(known) or 'no number'}{suggestion(name, known)}")
        if name == "truncate":
            right, allowed = isinstance(value, bool), "True or False"
        else:
            right, allowed = _is_number(value) and value > 0, "a number above 0"
        if not right:
            raise ArgumentError("scaling", f"{name} {value!r}", allowed)
    if kind == "llama3" and not numbers["high_freq_factor"] > numbers["low_freq_factor"]:
        raise ArgumentError("scaling", f"high_freq_factor {numbers['high_freq_factor']}", "more than low_freq_factor")
