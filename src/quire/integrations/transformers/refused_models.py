"""Models that choose a class for attention from a dictionary of names, not through transformers' `AttentionInterface`. Quire's
names get an entry that refuses the model: without it transformers raises a bare KeyError."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, NoReturn

from quire.integrations.engines import EngineError

DICTIONARIES = {
    "falcon": "FALCON_ATTENTION_CLASSES",
    "gptj": "GPTJ_ATTENTION_CLASSES",
    "gpt_neo": "GPT_NEO_ATTENTION_CLASSES",
    "bark": "BARK_ATTENTION_CLASSES",
}
"""By model type: its dictionary of attention classes."""


def refuse_models(names: Iterable[str]) -> None:
    """Adds entries for names of attention implementations to the dictionaries; nothing that is there changes."""
    for model, dictionary in DICTIONARIES.items():
        classes = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), dictionary)
        for name in names:
            classes.setdefault(name, _refuse)


def _refuse(config: Any, *others: Any, **more: Any) -> NoReturn:
    """What the model calls to make an attention layer."""
    what = f"{config.model_type} computes attention in its own code, not through transformers' AttentionInterface"
    raise EngineError(f"{what}: Quire does not support it; choose another attn_implementation, such as 'eager'")
