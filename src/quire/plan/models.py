"""Shapes of public models: what attention, the cache and the weights depend on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from quire.errors import ArgumentError
from quire.keywords import suggestion

CAPPED, SINKS, ALIBI = "softcap", "sinks", "alibi"
"""Features of attention that public models have."""


class LayerKind(NamedTuple):
    """Layers of a model that have the same attention."""

    layers: int
    """How many there are."""
    window: int | None
    """Keys that a query sees, its own included; None for all."""


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder-only transformer that a plan needs."""

    name: str
    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """The width of the MLP; of one expert, if there are experts."""
    vocabulary: int
    experts: int = 0
    window: int | None = None
    full_every: int = 1
    """With a window: every so many layers one without it; 0: every layer has the window."""
    features: tuple[str, ...] = ()
    """Features of the attention, as `quire.Options` names them."""
    tied: bool = False
    """Whether the output layer shares the weights of the embedding."""
    weight_bits: float = 16
    expert_bits: float = 0
    """Bits of a weight of an expert; 0: as `weight_bits`."""
    windowed: tuple[bool, ...] = ()
    """For each layer whether it has the window, if no rule describes it."""
    mlp_matrices: int = 3
    """Of an MLP: a gated one has three, a plain one two."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The layers by their window."""
        if self.window is None:
            windowed = 0
        elif self.windowed:
            windowed = sum(self.windowed)
        else:
            windowed = self.layers - (self.layers // self.full_every if self.full_every else 0)
        kinds = (LayerKind(windowed, self.window), LayerKind(self.layers - windowed, None))
        return tuple(kind for kind in kinds if kind.layers)

    @property
    def parameters(self) -> int:
        """The weights of the model: embeddings, projections, MLPs and routers. Norms and biases, below 0.1 %, are left out."""
        return self._expert_parameters + self._other_parameters

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        expert_bits = self.expert_bits or self.weight_bits
        return (self._expert_parameters * expert_bits + self._other_parameters * self.weight_bits) / 8

    @property
    def _expert_parameters(self) -> int:
        return self.layers * self.experts * self.mlp_matrices * self.hidden * self.intermediate

    @property
    def _other_parameters(self) -> int:
        projections = 2 * self.hidden * (self.q_heads + self.kv_heads) * self.head_dim
        mlp = self.hidden * self.experts if self.experts else self.mlp_matrices * self.hidden * self.intermediate
        return self.layers * (projections + mlp) + self.vocabulary * self.hidden * (1 if self.tied else 2)


_MXFP4 = 4.25
"""Bits of an MXFP4 weight: 4, and 8 for the scale of every 32."""


def _gemma2(name: str, hidden: int, layers: int, heads: tuple[int, int, int], intermediate: int) -> ModelShape:
    how = {"window": 4096, "full_every": 2, "features": (CAPPED,), "tied": True}
    return ModelShape(name, hidden, layers, *heads, intermediate, 256000, **how)  # type: ignore[arg-type]


def _gemma3(name: str, hidden: int, layers: int, heads: tuple[int, int, int], intermediate: int, window: int) -> ModelShape:
    return ModelShape(name, hidden, layers, *heads, intermediate, 262144, window=window, full_every=6, tied=True)


def _gpt_oss(name: str, layers: int, experts: int) -> ModelShape:
    how = {"window": 128, "full_every": 2, "features": (SINKS,), "expert_bits": _MXFP4}
    return ModelShape(name, 2880, layers, 64, 8, 64, 2880, 201088, experts, **how)  # type: ignore[arg-type]


_TABLE = (
    # name, hidden, layers, q_heads, kv_heads, head_dim, intermediate, vocabulary
    ModelShape("llama-3.2-1b", 2048, 16, 32, 8, 64, 8192, 128256, tied=True),
    ModelShape("llama-3.2-3b", 3072, 28, 24, 8, 128, 8192, 128256, tied=True),
    ModelShape("llama-3-8b", 4096, 32, 32, 8, 128, 14336, 128256),
    ModelShape("llama-3-70b", 8192, 80, 64, 8, 128, 28672, 128256),
    ModelShape("llama-3-405b", 16384, 126, 128, 8, 128, 53248, 128256),
    ModelShape("qwen3-0.6b", 1024, 28, 16, 8, 128, 3072, 151936, tied=True),
    ModelShape("qwen3-1.7b", 2048, 28, 16, 8, 128, 6144, 151936, tied=True),
    ModelShape("qwen3-4b", 2560, 36, 32, 8, 128, 9728, 151936, tied=True),
    ModelShape("qwen3-8b", 4096, 36, 32, 8, 128, 12288, 151936),
    ModelShape("qwen3-14b", 5120, 40, 40, 8, 128, 17408, 151936),
    ModelShape("qwen3-32b", 5120, 64, 64, 8, 128, 25600, 151936),
    ModelShape("qwen3-30b-a3b", 2048, 48, 32, 4, 128, 768, 151936, experts=128),
    ModelShape("qwen3-235b-a22b", 4096, 94, 64, 4, 128, 1536, 151936, experts=128),
    ModelShape("mistral-7b-v0.1", 4096, 32, 32, 8, 128, 14336, 32000, window=4096, full_every=0),
    ModelShape("mistral-7b-v0.3", 4096, 32, 32, 8, 128, 14336, 32768),
    ModelShape("mistral-small-24b", 5120, 40, 32, 8, 128, 32768, 131072),
    ModelShape("mistral-large-123b", 12288, 88, 96, 8, 128, 28672, 32768),
    ModelShape("mixtral-8x7b", 4096, 32, 32, 8, 128, 14336, 32000, experts=8),
    ModelShape("mixtral-8x22b", 6144, 56, 48, 8, 128, 16384, 32768, experts=8),
    _gemma2("gemma-2-2b", 2304, 26, (8, 4, 256), 9216),
    _gemma2("gemma-2-9b", 3584, 42, (16, 8, 256), 14336),
    _gemma2("gemma-2-27b", 4608, 46, (32, 16, 128), 36864),
    _gemma3("gemma-3-1b", 1152, 26, (4, 1, 256), 6912, 512),
    _gemma3("gemma-3-4b", 2560, 34, (8, 4, 256), 10240, 1024),
    _gemma3("gemma-3-12b", 3840, 48, (16, 8, 256), 15360, 1024),
    _gemma3("gemma-3-27b", 5376, 62, (32, 16, 128), 21504, 1024),
    _gpt_oss("gpt-oss-20b", 24, 32),
    _gpt_oss("gpt-oss-120b", 36, 128),
)
MODELS: dict[str, ModelShape] = {model.name: model for model in _TABLE}
"""Public models by name, with the shapes of their published configurations."""


def model_named(name: str) -> ModelShape:
    """A model of the table; capitals, blanks, underscores and hyphens do not matter, nor does an organisation before it.

    Raises:
        ArgumentError: no model has this name; the message suggests one.
    """
    found = known_name(name, MODELS)
    if found is None:
        allowed = f"one of {', '.join(MODELS)}; or the path of a Hugging Face config.json or of its folder"
        raise ArgumentError("--model", repr(name), allowed + suggestion(_spelled(name), MODELS))
    return MODELS[found]


def known_name(given: str, names: Iterable[str]) -> str | None:
    """Which of the names is meant, with or without hyphens, and what says more than a table entry; None if none is."""
    by_letters = {_without_hyphens(name): name for name in names}
    words = (_spelled(given), _without_variant(_spelled(given)))
    return next((by_letters[word] for word in map(_without_hyphens, words) if word in by_letters), None)


def _spelled(name: str) -> str:
    """A name in the table's letters."""
    return name.rpartition("/")[2].lower().replace("_", "-").replace(" ", "-")


def _without_hyphens(name: str) -> str:
    return name.replace("-", "")


def _without_variant(word: str) -> str:
    """The name of a table entry for a name that says more: releases of Llama 3 with the same shapes, and fine-tuned variants."""
    for ending in ("-instruct", "-it", "-base", "-hf"):
        word = word.removesuffix(ending)
    word = word.removeprefix("meta-")
    for release in ("llama-3.1-", "llama-3.3-"):
        word = word.replace(release, "llama-3-")
    return word
