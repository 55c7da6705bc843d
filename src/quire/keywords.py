"""Keyword arguments that a function does not have: an error that points to the right one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

from quire.errors import UnknownArgumentError, describe

BATCH_NAMES = {
    "page_table": "block_table block_tables req_to_token kv_indices",
    "kv_lens": "seq_lens seqlens_k cache_seqlens context_lens seqused_k",
    "q_starts": "query_start_loc cu_seqlens_q qo_indptr",
    "slots": "slot_mapping out_cache_loc",
    "max_q_len": "max_query_len max_seqlen_q",
    "max_kv_len": "max_seq_len max_seqlen_k",
    "spans": "mm_prefix_range",
}
"""Arguments of a Batch, and what vLLM, SGLang, FlashAttention and FlashInfer call them."""
CALL_NAMES = {"lse": "return_lse return_softmax_lse", "out": "output", "q": "query", "k": "key", "v": "value", "cache": "kv_cache"}
"""Arguments of the operators, and what others call them."""
CACHE_NAMES = {
    "k_pages": "kv_cache key_cache k_cache kv_pages cache",
    "v_pages": "value_cache v_cache",
    "kv_heads": "num_kv_heads num_key_value_heads n_kv_heads heads num_heads",
    "head_dim": "head_size",
    "pages": "num_blocks num_pages num_gpu_blocks max_num_pages",
    "page_size": "block_size tokens_per_block",
    "layout": "kv_layout",
    "format": "kv_cache_dtype",
}
"""Arguments of a KVCache and of a PagePool, and what others call them."""
OPTION_NAMES = {
    "scale": "sm_scale softmax_scale",
    "window": "sliding_window window_size window_left",
    "alibi": "alibi_slopes",
    "sinks": "s_aux learnable_sink",
    "causal": "is_causal",
    "mask": "attn_mask custom_mask",
    "q_scale": "q_descale",
    "out_scale": "output_scale",
}
"""Arguments of Options, and what others call them."""


def suggestion(given: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown name: the name that was probably meant, if there is one."""
    near = difflib.get_close_matches(str(given).lower(), list(names), 1)
    return f"; did you mean {near[0]}?" if near else ""


Function = TypeVar("Function", bound=Callable[..., Any])


def with_pointers(function: Function) -> Function:
    """Decorates a function: a keyword argument that it does not have raises an error that points to the right one, and a required
    argument that is not given is None, which the function refuses with what is allowed."""
    parameters = inspect.signature(function).parameters
    names = frozenset(parameters)
    ordered = tuple(one.name for one in parameters.values() if one.kind is not inspect.Parameter.KEYWORD_ONLY)
    needed = tuple(one.name for one in parameters.values() if one.default is inspect.Parameter.empty)

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        for name in named:
            if name not in names:
                refuse_unknown(function, {name: named[name]})
        for name in needed:
            if name not in named and name not in ordered[: len(args)]:
                named[name] = None
        return function(*args, **named)

    return cast(Function, call)


def refuse_unknown(function: Callable[..., Any], unknown: Mapping[str, Any]) -> NoReturn:
    """Raises about the first keyword argument that a function does not have."""
    name, value = next(iter(unknown.items()))
    raise UnknownArgumentError(name, describe(value), _pointer(function, name))


def _pointer(function: Callable[..., Any], name: str) -> str:
    from quire.options import Options

    own = [one for one in inspect.signature(function).parameters if one not in ("self", "unknown")]
    title = f"quire.{function.__qualname__.removesuffix('.__init__')}"
    options = list(Options.__dataclass_fields__)
    for right, others in (CALL_NAMES | CACHE_NAMES).items():
        if right in own and name in others.split():
            return _at(title, own, right, "")
    for names, owner in ((BATCH_NAMES, "Batch"), (dict.fromkeys(options, "") | OPTION_NAMES, "Options")):
        for right, others in names.items():
            if name == right or name in others.split():
                return _at(title, own, right, owner)
    near = difflib.get_close_matches(name, [*own, *options, *BATCH_NAMES], 1)
    if near:
        return _at(title, own, near[0], "Options" if near[0] in options else "Batch")
    return f"{title} has no such argument; it has {', '.join(own)}"


def _at(title: str, own: list[str], right: str, owner: str) -> str:
    if right in own:
        return f"the argument is called {right}: {title}({right}=...)"
    if owner == "Options":
        return f"an option of the layer: options=quire.Options({right}=...)"
    return f"a part of the batch: quire.Batch({right}=...)"
