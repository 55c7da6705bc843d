"""Translates errors from Quire's argument names to those of the vLLM operator that was called, and checks argument types."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from types import UnionType
from typing import Any, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from quire.contract.rule import Violation
from quire.errors import ArgumentError, ContractError, describe

P = ParamSpec("P")
R = TypeVar("R")

COMMON = {
    "q": "query",
    "new[0]": "key",
    "new[1]": "value",
    "k": "key",
    "v": "value",
    "out": "output",
    "page_table": "block_table",
    "kv_lens": "seq_lens",
    "q_starts": "query_start_loc",
    "slots": "slot_mapping",
    "max_q_len": "max_query_len",
    "max_kv_len": "max_seq_len",
    "alibi": "alibi_slopes",
    "window": "sliding_window",
    "scale": "sm_scale",
    "q_scale": "q_descale",
    "out_scale": "output_scale",
    "k_pages": "key_cache",
    "v_pages": "value_cache",
}
"""Quire's argument names, and the names that most of vLLM's operators use."""

IN_PROSE = ("page_table", "kv_lens", "q_starts", "slots", "max_q_len", "max_kv_len", "k_pages", "v_pages", "q_scale", "out_scale")
"""Names that are translated wherever a message contains them."""


def operator(words: Mapping[str, str] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for vLLM's operators: runs without gradients, checks argument types, and translates errors. `words` are argument
    names that differ from `COMMON`."""
    translation = COMMON | dict(words or {})
    in_prose = re.compile(rf"\b({'|'.join(IN_PROSE)})\b")

    def argument(name: str) -> str:
        """The translated argument name, with its index."""
        known = max((word for word in translation if re.match(rf"{re.escape(word)}(\[|$)", name)), key=len, default="")
        return translation[known] + name[len(known) :] if known else name

    def prose(text: str) -> str:
        text = re.sub(r"\bOptions\((\w+)=\.\.\.\)", r"\1", text)
        text = re.sub(r"(?<=memory shared with )\S+", lambda name: argument(name[0]), text)
        return in_prose.sub(lambda word: translation[word[0]], text)

    def violation(v: Violation) -> Violation:
        return replace(v, argument=argument(v.argument), given=prose(v.given), allowed=prose(v.allowed), picture=prose(v.picture))

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        kinds = argument_types(function)
        in_order = tuple(kinds.items())

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for (name, kind), value in zip(in_order, args):
                check_type(name, kind, value)
            for name, value in kwargs.items():
                if name in kinds:  # any other is a TypeError below
                    check_type(name, kinds[name], value)
            try:
                with torch.no_grad():
                    return function(*args, **kwargs)
            except ArgumentError as error:
                raise ArgumentError(argument(error.argument), error.given, prose(error.allowed)) from None
            except ContractError as error:
                raise ContractError(f"compat.vllm.{function.__name__}", [violation(v) for v in error.violations]) from None

        return call

    return decorate


class ArgumentType(NamedTuple):
    """The types that an argument may have."""

    types: tuple[type, ...]
    words: str
    dense: bool
    """Whether a tensor is allowed; it must be dense."""


WORDS: dict[Any, tuple[tuple[type, ...], str]] = {
    torch.Tensor: ((torch.Tensor,), "a dense tensor"),
    float: ((int, float), "a number"),
    int: ((int,), "an int"),
    bool: ((bool, int), "True or False"),
    str: ((str,), "a string"),
    type(None): ((type(None),), "None"),
}


def argument_types(function: Callable[..., Any]) -> dict[str, ArgumentType]:
    """The types of each argument of a function, from its annotations."""
    hints = get_type_hints(function)
    return {name: _argument_type(hints[name]) for name in inspect.signature(function).parameters}


def _argument_type(hint: Any) -> ArgumentType:
    parts = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
    types: list[type] = []
    words: list[str] = []
    for part in parts:
        pair = get_origin(part) is tuple
        some, word = ((tuple, list), "a pair of ints") if pair else WORDS.get(part, ((part,), f"a {part.__name__}"))
        types += some
        words.append(word)
    return ArgumentType(tuple(types), " or ".join(words), torch.Tensor in types)


def check_type(name: str, kind: ArgumentType, value: Any) -> None:
    """Raises ArgumentError if an argument has the wrong type."""
    wrong = not isinstance(value, kind.types)
    if not wrong and kind.dense and isinstance(value, torch.Tensor):
        wrong = value.layout is not torch.strided or value.is_quantized
    if wrong:
        raise ArgumentError(name, describe(value), kind.words)
