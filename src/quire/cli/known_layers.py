"""`--like`: the layers of a known model, by kind. `explain` and `warm` have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from quire.cli.command import Args, OneOfNames, Option
from quire.errors import ArgumentError
from quire.options import NUMBERS, PER_HEAD
from quire.plan.layer_kinds import FAMILIES, NAMES, AttentionLayers, layers_like

_OF_MODEL = ("q_heads", "kv_heads", "head_dim", "v_head_dim", "v_in_k", "window", *NUMBERS, *PER_HEAD, "non_causal")
"""Options that `--like` replaces."""


def like_option() -> Option:
    """The option."""
    return Option(
        "--like",
        metavar="MODEL",
        type=OneOfNames(lambda: NAMES),
        group="the layer",
        help=f"the layers of a model, by kind: {', '.join(FAMILIES)}; or of a size, by the names of quire plan",
    )


def layers_of(args: Args, others: Mapping[str, tuple[str, str]] | None = None) -> tuple[str, tuple[AttentionLayers, ...]]:
    """The name of the model that `--like` means, and its layers by kind. Refuses options that the model has, and others, by name:
    what they are called, and why."""
    why = {name: (f"--{name.replace('_', '-')}", "it has the shape of the layers") for name in _OF_MODEL} | dict(others or {})
    context = click.get_current_context()
    for name, (option, reason) in why.items():
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise ArgumentError(option, f"{getattr(args, name)} with --like {args.like}", f"nothing: {reason}")
    return layers_like(args.like)


def options_of(args: Args, kinds: tuple[AttentionLayers, ...]) -> Iterator[Args]:
    """For each kind of layer, the options that describe it."""
    for kind in kinds:
        features: dict[str, Any] = dict.fromkeys(kind.features, True) | {name: 1.0 for name in kind.features if name in NUMBERS}
        shape = {name: getattr(kind, name) for name in ("q_heads", "kv_heads", "head_dim", "v_in_k")} | {"window": kind.window or 0}
        yield Args(**vars(args) | shape | features)
