"""A case: everything that determines one call of attention, or one write, and its tensors. A case is written and parsed as one line
of text."""

from __future__ import annotations

import math
import zlib
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from quire.cache.format import FORMATS, QUERY_NAMES
from quire.errors import ArgumentError
from quire.options import FEATURES, NUMBERS
from quire.problem import Problem

Side = int | None


@dataclass(frozen=True)
class Case:
    """The properties of one call, and the seed of its random numbers. Only fields that differ from their default are printed.

    >>> case = Case("window", q_lens=(1, 9), kv_lens=(40, 50), window=(7, 0), seed=3)
    >>> print(case)
    window q_lens=1,9 kv_lens=40,50 window=7,0 seed=3
    >>> Case.parse(str(case)) == case
    True
    """

    name: str
    operation: str = field(default="attend", kw_only=True)
    """attend; or write: the new tokens of every sequence are stored in the cache."""
    q_lens: tuple[int, ...] = (1, 5, 20, 1)
    kv_lens: tuple[int, ...] = (37, 40, 20, 64)
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    v_head_dim: int = 0
    """0 means equal to head_dim."""
    v_in_k: int = 0
    """V is the first `v_in_k` elements of K; 0 means that V is stored by itself."""
    page_size: int = 16
    layout: str = "nhd"
    x: int = 0
    """The number of elements of the split axis in layouts that split one; 0 means 16 bytes."""
    format: str = "fp16"
    """Of K, and of V unless `v_format` is given."""
    v_format: str = ""
    scales: str = "none"
    """none, tensor, head or token."""
    hadamard: bool = False
    """K is stored times the Hadamard matrix of ±1 / sqrt(head_dim), in its natural order; queries and new keys are not."""
    storage: str = "native"
    """native; bytes: fp8 pages as uint8; padded: a gap after every page."""
    q_dtype: str = "fp16"
    """Of queries; in a write also of the new keys and values."""
    index: tuple[str, ...] = ("int32", "int32", "int32")
    """The dtypes of page_table, kv_lens and q_starts."""
    form: str = "full"
    """full: all tokens are in the cache; context: the new tokens are passed as arguments."""
    causal: str = "yes"
    """yes, no, or mixed: every other sequence is causal."""
    window: tuple[Side, Side] = (None, None)
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    mask: bool = False
    """A tree mask, with positions if window or ALiBi need them."""
    scale: float | None = None
    shard: tuple[int, ...] = (0, 1, 1)
    """rank, ranks, interleave: the cache holds the keys whose position p has p // interleave % ranks == rank."""
    spans: str = "none"
    """The interval of keys that each new token sees: none; causal; prefix, of which all tokens see the first third of the keys;
    chunks of 24 keys; images, some runs of tokens that see all of their run and 8 keys before each token; or any, some empty."""
    select: str = "none"
    """positions: each query sees some keys of its own; columns: the queries of a sequence see some of its pages; none: all."""
    select_heads: str = "shared"
    """shared: all heads see the same of them; own: each kv head has its own."""
    padding: int = 0
    """Rows of q after the last sequence."""
    data: str = "random"
    """random; needle: each query points at one key; weak: numbers of ±0.001; even: queries are zero, so that all keys have the same
    weight, and values are integers; wide: values of many magnitudes; extreme: logits of about 200 or -200 in a whole sequence, or
    changing from one to the other along it."""
    table: str = "shuffled"
    """shuffled; shared: sequences start with the same pages; partly: some of them do; identity: ids in order; high: page ids above
    2^16; far: addresses above 2^31 elements; very-far: above 2^32."""
    prefixes: bool = False
    """Whether the call says which pages sequences share (with a table that is shared or partly)."""
    poison: str = "nan"
    """Value of slots that must not be read: nan, inf, zero, or numbers: like those of other slots (decoy, decoy2), or large."""
    fill_byte: int = 0xCB
    """The byte that fills the outputs and their guards before the call."""
    tail: str = "page"
    """Value of table entries that must not be read: page, the id of a page of no sequence; -1; or none: as page, but the table ends
    with the last column that is read, and may have no columns at all."""
    strides: str = "dense"
    """dense; views: queries, table and new tokens are views of wider tensors, such as slices of a fused qkv projection."""
    hints: str = "exact"
    """max_q_len and max_kv_len: exact; none; or low, which must not change the result."""
    lse: bool = False
    batch_invariant: bool = False
    """Each sequence must give the same bits alone as in the batch."""
    slots: str = "batch"
    """Where a write stores tokens. batch: the slots that follow from page table and lengths; skipped: the same, but some tokens
    have slot -1; scattered: any slots, without a page table."""
    rope: str = "none"
    """How a write rotates keys, and queries beside them: none, half-split or interleaved."""
    rotary_dim: int = 0
    """Elements of a head that are rotated; 0 means head_dim."""
    norm: str = "none"
    """The norm before the rotation. weight: RMSNorm times the weight; unit-offset: times 1 + weight; none."""
    queries: bool = True
    """Whether a write with rope rotates queries too."""
    positions: str = "own"
    """own: tokens are rotated by their positions in their sequences; given: by any others."""
    only: int = -1
    """The only sequence of the batch that is in the call, with the same numbers as in the batch; -1 means all sequences."""
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.q_lens) != len(self.kv_lens):
            raise ArgumentError("q_lens", f"{len(self.q_lens)} of them", f"{len(self.kv_lens)}, as many as kv_lens")
        if not -1 <= self.only < len(self.q_lens):
            raise ArgumentError("only", self.only, f"-1, or a sequence: 0 to {len(self.q_lens) - 1}")
        self._check_latent()
        self._check_hadamard()
        self._check_write()
        if len(self.shard) != 3 or not 0 <= self.shard[0] < self.shard[1] or self.shard[2] < 1:
            raise ArgumentError("shard", self.shard, "rank, ranks, interleave with 0 <= rank < ranks and interleave >= 1")
        alone = [name for name in NOT_WITH_PREFIXES if getattr(self, name) != DEFAULTS[name]]
        if self.prefixes and alone:
            raise ArgumentError("prefixes", f"yes with {', '.join(alone)}", "no: not every query would see the keys of a prefix")
        for spec in fields(self):
            allowed = ALLOWED.get(spec.name)
            value = getattr(self, spec.name)
            if allowed and any(one not in allowed for one in (value if isinstance(value, tuple) else (value,))):
                raise ArgumentError(spec.name, value, ", ".join(filter(None, allowed)))

    def _check_latent(self) -> None:
        if self.v_in_k and (self.v_head_dim or self.v_format or self.layout not in ("nhd", "hnd")):
            raise ArgumentError("v_in_k", self.v_in_k, "0 with v_head_dim, v_format or a layout other than nhd and hnd")
        if not 0 <= self.v_in_k <= self.head_dim:
            raise ArgumentError("v_in_k", self.v_in_k, f"at most head_dim = {self.head_dim}")
        with_zero = [name for name in self.formats.values() if name in FORMATS and FORMATS[name].zero_point]
        if with_zero and (self.scales != "token" or self.v_in_k):
            given = f"{with_zero[0]} with scales {self.scales} and v_in_k {self.v_in_k}"
            raise ArgumentError("format", given, "it with scales token and v_in_k 0")
        sizes = (self.head_dim, self.v_in_k, self.scales)
        if self.format == "fp8_ds_mla" and sizes != (576, 512, "none"):
            raise ArgumentError("format", f"fp8_ds_mla with head_dim, v_in_k and scales {sizes}", "it with 576, 512 and none")

    def _check_hadamard(self) -> None:
        if not self.hadamard:
            return
        if self.head_dim & (self.head_dim - 1) or self.v_in_k or FORMATS[self.q_dtype].quantised:
            given = f"yes with head_dim={self.head_dim} v_in_k={self.v_in_k} q_dtype={self.q_dtype}"
            allowed = "yes with a head_dim that is a power of two, values of their own, and queries of 16 or 32 bits; or no"
            raise ArgumentError("hadamard", given, allowed)

    def _check_write(self) -> None:
        unused = OF_WRITES if self.operation == "attend" else OF_ATTENTION
        given = [f"{name}={_word(getattr(self, name))}" for name in unused if getattr(self, name) != DEFAULTS[name]]
        if given:
            raise ArgumentError("operation", f"{self.operation} with {', '.join(given)}", "only fields of that operation")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ArgumentError("rotary_dim", self.rotary_dim, f"an even number up to head_dim = {self.head_dim}")
        if self.operation == "write" and (self.format == "fp8_ds_mla" or FORMATS[self.q_dtype].quantised):
            given_types = f"a write of {self.q_dtype} to {self.format}"
            raise ArgumentError("format", given_types, "a write of fp32, fp16 or bf16 to a format other than fp8_ds_mla")
        turned = [name for name in ("rotary_dim", "norm", "positions", "queries") if getattr(self, name) != DEFAULTS[name]]
        if turned if self.rope == "none" else self.hadamard or self.v_in_k:
            given_rope = f"{self.rope} with {', '.join((*turned, f'hadamard={_word(self.hadamard)}', f'v_in_k={self.v_in_k}'))}"
            raise ArgumentError("rope", given_rope, "half-split or interleaved, without hadamard and v_in_k")

    @property
    def rotated(self) -> int:
        """Elements of a head that a write rotates."""
        return 0 if self.rope == "none" else self.rotary_dim or self.head_dim

    @property
    def seqs(self) -> int:
        return len(self.q_lens)

    @property
    def live(self) -> int:
        """Rows of q that belong to a sequence."""
        return sum(self.q_lens)

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def dims(self) -> dict[str, int]:
        return {"k": self.head_dim, "v": self.v_in_k or self.v_head_dim or self.head_dim}

    @property
    def formats(self) -> dict[str, str]:
        return {"k": self.format, "v": self.v_format or self.format}

    @property
    def code(self) -> int:
        """The seed of all random numbers: a hash of the name and the seed. It does not depend on poison or fill byte, so that
        variants of a case have the same data."""
        return zlib.crc32(f"{self.name} {self.seed}".encode())

    @property
    def largest_logit(self) -> float:
        """The largest logit of needle data: below the softcap, where tanh saturates."""
        return math.inf if self.softcap is None else 0.8 * self.softcap

    @cached_property
    def problem(self) -> Problem:
        """The properties of the case that a kernel is chosen by."""
        features: dict[str, Any] = {name: getattr(self, name) not in (None, False) for name in FEATURES}
        return Problem(
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            v_head_dim=self.dims["v"],
            v_in_k=self.v_in_k > 0,
            q_dtype=self.q_dtype,
            out_dtype="bf16" if FORMATS[self.q_dtype].quantised else self.q_dtype,
            format=self.format,
            v_format=self.v_format,
            layout=self.layout,
            scales=self.scales,
            index=self.index[0] if len(set(self.index)) == 1 else "+".join(self.index),
            form=self.form,
            causal={"yes": "yes", "no": "no", "mixed": "per-sequence"}[self.causal],
            window=self.window,
            lse=self.lse,
            shard=self.shard[1] > 1,
            spans="none" if self.spans == "none" else self.index[1],
            select=self.select,
            select_index="" if self.select == "none" else self.index[0],
            prefixes=self.prefixes,
            **features,
        )

    def replace(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def __str__(self) -> str:
        words = [self.name]
        for spec in fields(self)[1:]:
            value = getattr(self, spec.name)
            if value != spec.default:
                words.append(f"{spec.name}={_word(value)}")
        return " ".join(words)

    @classmethod
    def parse(cls, line: str) -> Case:
        """The inverse of `str`."""
        name, *words = line.split()
        known = {spec.name: spec.default for spec in fields(cls) if spec.default is not MISSING}
        given: dict[str, Any] = {}
        for word in words:
            key, equals, text = word.partition("=")
            if not equals or key not in known:
                raise ArgumentError("case", word, "NAME and then FIELD=VALUE, FIELD one of " + ", ".join(known))
            try:
                given[key] = _value(key, text, known[key])
            except ValueError:
                raise ArgumentError(key, text, _allowed(key, known[key])) from None
        return cls(name, **given)


DEFAULTS = {spec.name: spec.default for spec in fields(Case)}
NOT_WITH_PREFIXES = ("window", "mask", "spans", "select", "shard", "batch_invariant")
OF_WRITES = ("slots", "rope", "rotary_dim", "norm", "queries", "positions")
OF_ATTENTION = (
    *("form", "causal", "window", "mask", "scale", "shard", "spans", "select", "select_heads", "data", "prefixes", "tail", "hints"),
    *("lse", "only", *FEATURES),
)
"""Fields that only one of the operations has."""
ALLOWED: dict[str, tuple[str, ...]] = {
    "operation": ("attend", "write"),
    "slots": ("batch", "skipped", "scattered"),
    "rope": ("none", "half-split", "interleaved"),
    "norm": ("none", "weight", "unit-offset"),
    "positions": ("own", "given"),
    "layout": ("nhd", "hnd", "vllm_x", "vllm_joint", "aiter"),
    "format": tuple(FORMATS),
    "v_format": ("", *FORMATS),
    "scales": ("none", "tensor", "head", "token"),
    "storage": ("native", "bytes", "padded"),
    "q_dtype": QUERY_NAMES,
    "index": ("int32", "int64"),
    "form": ("full", "context"),
    "causal": ("yes", "no", "mixed"),
    "spans": ("none", "causal", "prefix", "chunks", "images", "any"),
    "select": ("none", "positions", "columns"),
    "select_heads": ("shared", "own"),
    "data": ("random", "needle", "weak", "even", "wide", "extreme"),
    "table": ("shuffled", "shared", "partly", "identity", "high", "far", "very-far"),
    "poison": ("nan", "inf", "zero", "decoy", "decoy2", "large"),
    "tail": ("page", "-1", "none"),
    "strides": ("dense", "views"),
    "hints": ("exact", "none", "low"),
}

_OPTIONAL = (*NUMBERS, "scale")


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(_word(one) for one in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _allowed(key: str, default: Any) -> str:
    """The allowed values of a field, for an error message."""
    if isinstance(default, bool):
        return "yes or no"
    if key in _OPTIONAL:
        return "a number or none"
    if isinstance(default, tuple):
        return "integers or none, separated by commas" if None in default else "integers, separated by commas"
    return "an integer"


def _value(key: str, text: str, default: Any) -> Any:
    if isinstance(default, tuple):
        parts = text.split(",") if text else []
        if key == "index":
            return tuple(parts)
        return tuple(None if part == "none" else int(part) for part in parts)
    if isinstance(default, bool):
        if text not in ("yes", "no"):
            raise ValueError(text)
        return text == "yes"
    if key in _OPTIONAL:
        return None if text == "none" else float(text)
    return type(default)(text)
