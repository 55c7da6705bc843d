"""What is measured: batches of sequences, as data."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict, dataclass, replace

from quire.cache.format import FORMATS, Format
from quire.errors import ArgumentError

Lengths = tuple[tuple[int, int], ...]
"""(new tokens, context) of each sequence."""
Levels = tuple[tuple[int, int], ...]
"""From the first keys on, (how many neighbouring sequences have the same keys, how many keys)."""

FP8 = "e4m3fn"
"""The cache format of the workloads with an 8-bit cache on GPUs: the one that all peers support."""


@dataclass(frozen=True)
class Workload:
    """A batch by its lengths: (new tokens, context) of each sequence. Data and page tables are random, the same for every peer."""

    name: str
    sequences: Lengths
    dtype: str = "bf16"
    """Of queries and outputs, and of the cache where `format` names no other."""
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    format: str = ""
    """How the cache stores an element, if not as `dtype`."""
    v_format: str = ""
    """How it stores an element of V, if not as one of K."""
    hadamard: bool = False
    """Whether the keys of the cache are Hadamard-transformed."""
    scales: str = "tensor"
    """Of a quantised cache: one for each tensor, or for each token and head."""
    window: int | None = None
    """Keys that a query sees, its own included."""
    form: str = "full"
    """full: all keys come from the cache. context: the new tokens are arguments. The keys are the same."""
    operation: str = "attend"
    """attend, or write: the new tokens are stored."""
    v_dim: int = 0
    """Elements of a head of V, if not `head_dim`."""
    latent: bool = False
    """Whether V is the first `v_dim` elements of K (multi-head latent attention)."""
    scale: float | None = None
    """What multiplies q·k, if not `head_dim ** -0.5`."""
    options: tuple[str, ...] = ()
    """Names of numbers and of tensors `[q_heads]` of `quire.Options` that the layer has."""
    tree: bool = False
    """Whether the new tokens of a sequence are a binary tree in the order of its levels."""
    part_causal: bool = False
    """Whether every second sequence is causal, the first one among them, and the others are not."""
    image: int = 0
    """Tokens of an image. Every sequence is an image, as many tokens of text, an image, and so on; the tokens of an image see all
    of it. Causality and the window are then spans."""
    select: str = ""
    """positions or columns: what selects the keys that each sequence sees."""
    selected: int = 0
    """How many positions or columns are selected."""
    prefixes: Levels = ()
    """The first keys of the sequences that are the same: a tree."""
    rope: bool = False
    """Whether a write rotates the keys, and as many queries."""
    batch_invariant: bool = False

    @property
    def label(self) -> str:
        """The name, and parameters that are not the default."""
        unusual = {
            f"{self.q_heads}/{self.kv_heads} heads": (self.q_heads, self.kv_heads) != (32, 8),
            f"head_dim {self.head_dim}": self.head_dim != 128 and not self.v_dim,
            f"head_dim {self.head_dim}/{self.v_dim}": self.v_dim != 0,
            "MLA": self.latent,
            f"pages of {self.page_size}": self.page_size != 16,
            f"{'/'.join(filter(None, (self.format, self.v_format)))} cache": bool(self.format),
            "Hadamard-transformed keys": self.hadamard,
            f"scales per {self.scales}": self.scales != "tensor",
            f"window {self.window}": self.window is not None,
            "context form": self.form == "context",
            ", ".join(self.options): bool(self.options),
            "tree mask": self.tree,
            "every second sequence causal": self.part_causal,
            f"images of {self.image}": self.image > 0,
            f"{self.selected} {self.select} selected": bool(self.select),
            "RoPE": self.rope,
            "batch-invariant": self.batch_invariant,
        }
        return ", ".join([self.name, self.dtype, *(words for words, said in unusual.items() if said)])

    @property
    def cache_format(self) -> str:
        return self.format or self.dtype

    @property
    def formats(self) -> tuple[Format, Format]:
        """How the cache stores K and V."""
        return FORMATS[self.cache_format], FORMATS[self.v_format or self.cache_format]

    @property
    def tokens(self) -> int:
        return sum(new for new, _ in self.sequences)

    @property
    def value_dim(self) -> int:
        """Elements of a head of V."""
        return self.v_dim or self.head_dim

    @property
    def features(self) -> frozenset[str]:
        """The features in use that an implementation may lack, by the names of their fields and options."""
        return frozenset((*self.options, *(name for name in OPTIONAL if getattr(self, name))))

    @property
    def bytes(self) -> int:
        """What must be read and written once: keys and values that a query sees, queries, outputs; for a write, what it is
        given and what it stores. Keys that sequences share count once."""
        width = FORMATS[self.dtype].itemsize
        dims = (self.head_dim,) if self.latent else (self.head_dim, self.value_dim)
        of_key = sum(format.bytes_of(dim) + 4 * (self.scales == "token") for format, dim in zip(self.formats, dims))
        if self.operation == "write":
            of_key += sum(dims) * width
            return self.tokens * (self.kv_heads * of_key + self.rope * self.q_heads * 2 * self.head_dim * width)
        keys = sum(map(self._keys, self.sequences)) - self._shared
        return keys * self.kv_heads * of_key + self.tokens * self.q_heads * (self.head_dim + self.value_dim) * width

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two products over the visible (query, key) pairs."""
        if self.operation == "write":
            return 0
        pairs = sum(self._pairs(lengths, not (self.part_causal and i % 2)) for i, lengths in enumerate(self.sequences))
        return 2 * pairs * self.q_heads * (self.head_dim + self.value_dim)

    @property
    def _shared(self) -> int:
        """How many keys are the same as those of another sequence."""
        return sum((len(self.sequences) - -(-len(self.sequences) // size)) * keys for size, keys in self.prefixes)

    def _keys(self, lengths: tuple[int, int]) -> int:
        """The keys that the queries of a sequence see; with a selection for each query, at least so many."""
        new, context = lengths
        if self.select:
            return min(new + context, self._selected(new + context))
        return min(new + context, new + self.window - 1) if self.window else new + context

    def _selected(self, length: int) -> int:
        """The keys that a selection has of a sequence of this length. Of columns, one is the last."""
        last = (length - 1) % self.page_size + 1
        return self.selected if self.select == "positions" else (self.selected - 1) * self.page_size + last

    def _pairs(self, lengths: tuple[int, int], causal: bool = True) -> int:
        """The (query, key) pairs of a sequence: a query at position p sees p + 1 keys, or as many as the window has."""
        new, context = lengths
        if self.select:
            return new * self._keys(lengths)
        if self.tree:
            return new * context + sum(map(depth, range(new)))
        if self.image:
            return sum(end - begin for begin, end in self.spans(new, context))
        if not causal:
            return new * (new + context)
        narrow = new if self.window is None else max(0, min(new, self.window - context))
        triangle = narrow * context + narrow * (narrow + 1) // 2
        return triangle + (new - narrow) * (self.window or 0)

    def spans(self, new: int, context: int) -> list[tuple[int, int]]:
        """The keys [begin, end) that each new token sees in a sequence with images."""
        found = []
        for p in range(context, context + new):
            first = p - p % self.image
            begin = 0 if self.window is None else max(0, p - self.window + 1)
            is_text = p // self.image % 2 == 1
            found.append((begin, p + 1) if is_text else (min(begin, first), min(first + self.image, context + new)))
        return found

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        fields = json.loads(text)
        pairs = {name: tuple((first, second) for first, second in fields[name]) for name in ("sequences", "prefixes")}
        return cls(**fields | pairs | {"options": tuple(fields["options"])})


OPTIONAL = (
    "v_format",
    "hadamard",
    "v_dim",
    "latent",
    "tree",
    "part_causal",
    "image",
    "select",
    "prefixes",
    "rope",
    "batch_invariant",
)
"""The fields of a workload that an implementation may not support."""


def depth(node: int) -> int:
    """The level of a node in a binary tree whose nodes are numbered level by level, the root's level being 1."""
    return (node + 1).bit_length()


def parse_batch(spec: str) -> Workload:
    """A batch in vLLM's words: `2q2k_32q1s1k` is 2 sequences of 2048 new tokens and 32 of 1 new token in 1024. Each part is a count
    (1 if left out), q and the new tokens, s and the tokens of the sequence (as many as new ones if left out); k is 1024.

    >>> parse_batch("q4s1k_2q8").sequences
    ((4, 1020), (8, 0), (8, 0))
    """
    sequences: list[tuple[int, int]] = []
    for part in spec.split("_"):
        found = re.fullmatch(r"(\d*)q(\d+)(k?)(?:s(\d+)(k?))?", part)
        if not found:
            raise ArgumentError("--batch", repr(spec), "parts like 2q2k, q1s1k or 32q1s500, joined by _")
        count, new = int(found[1] or 1), int(found[2]) << (10 if found[3] else 0)
        total = new if found[4] is None else int(found[4]) << (10 if found[5] else 0)
        if not 1 <= new <= total or not count:
            raise ArgumentError(
                "--batch", repr(part), "1 sequence or more, 1 new token or more, and not more than the sequence has"
            )
        sequences += [(new, total - new)] * count
    return Workload(spec, tuple(sequences))


def ragged(count: int, most: int) -> Lengths:
    """Decoding sequences of all lengths up to `most`, repeatable."""
    return tuple((1, 1 + (i * 7919) % most) for i in range(count))


def _log_uniform(count: int, least: int, most: int) -> Lengths:
    """Decoding sequences, as many between 16 and 32 tokens as between 8192 and 16384, repeatable."""
    draw = random.Random(0)
    return tuple((1, int(least * (most / least) ** draw.random()) - 1) for _ in range(count))


_SHAPES = (
    Workload("decode 16 x 4096", ((1, 4095),) * 16),
    Workload("decode 1 x 32768", ((1, 32767),)),
    Workload("decode 64 ragged to 1024", ragged(64, 1024)),
    Workload("prefill 512 over 512", ((512, 512),)),
    Workload("prefill 512 over 4096", ((512, 4096),)),
    Workload("mixed: 256 over 1024 + 15 decodes at 2048", ((256, 1024), *((1, 2047),) * 15)),
)

_CPU_DECODE, _CPU_PREFILL = _SHAPES[0], _SHAPES[3]

CPU_WORKLOADS: tuple[Workload, ...] = (
    *(replace(shape, dtype=dtype) for dtype in ("fp32", "bf16") for shape in _SHAPES),
    *(replace(shape, dtype="fp16") for shape in (_CPU_DECODE, _CPU_PREFILL)),
    *(replace(shape, format=format) for format in (FP8, "e5m2", "int8") for shape in (_CPU_DECODE, _CPU_PREFILL)),
    replace(_CPU_DECODE, format="int4", scales="token"),
    replace(_CPU_DECODE, format="nvfp4"),
    *(replace(shape, head_dim=dim) for dim in (64, 96, 256) for shape in (_CPU_DECODE, _CPU_PREFILL)),
    *(replace(shape, q_heads=q_heads) for q_heads in (8, 64) for shape in (_CPU_DECODE, _CPU_PREFILL)),
)
"""Every shape in two types; then other formats, head sizes and groups, one at a time."""

_DECODE = Workload("decode 64 x 4096", ((1, 4095),) * 64)
_PREFILL = Workload("prefill 1 x 8192", ((8192, 0),))
_WRITE = Workload("write 8192", ((8192, 0),), operation="write")
# The lengths that `random.seed(0)` gives in vLLM's test of mixed batches.
_VLLM_TEST = Workload(
    "batch of vLLM's mixed-batch test",
    tuple(zip((880, 410, 792, 927, 446, 57, 281, 1004, 539, 1), (430, 956, 818, 865, 326, 1007, 504, 382, 613, 929))),
    dtype="fp16",
    q_heads=64,
    kv_heads=64,
    page_size=32,
)

CUDA_WORKLOADS: tuple[Workload, ...] = (
    Workload("decode 1 x 8192", ((1, 8191),)),
    Workload("decode 1 x 131072", ((1, 131071),)),
    Workload("decode 16 x 4096", ((1, 4095),) * 16),
    _DECODE,
    Workload("decode 256 x 1024", ((1, 1023),) * 256),
    replace(_DECODE, q_heads=64, kv_heads=64),
    replace(_DECODE, q_heads=64),
    replace(_DECODE, format=FP8),
    replace(_DECODE, format="int4", scales="token"),
    replace(_DECODE, format="nvfp4"),
    Workload("decode 128 ragged, 16 to 16384", _log_uniform(128, 16, 16384)),
    Workload("decode 64 x 8192", ((1, 8191),) * 64, window=1024),
    Workload("verify 64 x 4 over 4096", ((4, 4096),) * 64),
    _PREFILL,
    Workload("prefill 1 x 2048 over 30720", ((2048, 30720),)),
    Workload("prefill 8 x 1024 over 1024", ((1024, 1024),) * 8),
    replace(_PREFILL, format=FP8),
    Workload("mixed: 1 x 2048 over 4096 + 63 decodes at 4096", ((2048, 4096), *((1, 4095),) * 63)),
    _VLLM_TEST,
    replace(_VLLM_TEST, dtype="bf16"),
    replace(_VLLM_TEST, form="context"),
    _WRITE,
    replace(_WRITE, format=FP8),
)
