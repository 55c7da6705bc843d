"""The definitions of FlashInfer that Quire implements, as callables and as files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import ArgumentError
from quire.integrations.engines import ENGINES
from quire.integrations.flashinfer import solutions

AUTHOR = "quire"
HARDWARE = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120")
"""FlashInfer 0.7.2 requires the field and does not read it: what a GPU can run is decided by `quire.attend`."""
SOURCE = '''"""Quire as a solution for FlashInfer's trace-apply; written by `python -m quire.integrations.flashinfer`."""

from quire.integrations.flashinfer.solutions import {function} as run
'''


class Sizes(NamedTuple):
    """What FlashInfer names its definitions after."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int


def _functions() -> dict[Any, Callable[..., Any]]:
    """FlashInfer's templates, and Quire's functions for them."""
    ENGINES["flashinfer"].require()
    from flashinfer.trace.templates import attention

    return {
        attention.gqa_paged_decode_trace: solutions.paged_decode,
        attention.gqa_paged_prefill_trace: solutions.paged_prefill,
        attention.gqa_ragged_prefill_trace: solutions.ragged_prefill,
        attention.trtllm_batch_decode_trace: solutions.function_decode,
        attention.trtllm_batch_context_trace: solutions.function_context,
    }


def _axes(sizes: Sizes) -> dict[str, int]:
    """The constant axes of all templates. The functions for one tensor of pages have two halves in it, keys and values."""
    names = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
    return {**dict(zip(names, sizes)), "num_heads": sizes.q_heads, "kv_cache_dim": 2}


def _named(sizes: Sizes) -> dict[str, tuple[Any, Callable[..., Any]]]:
    """By name of the definition: the template and the function."""
    if sizes.q_heads % sizes.kv_heads:
        raise ArgumentError("q_heads", sizes.q_heads, f"a multiple of kv_heads, {sizes.kv_heads}")
    axes = _axes(sizes)
    return {template.definition_name(axes): (template, function) for template, function in _functions().items()}


def enable(*, q_heads: int, kv_heads: int, head_dim: int, page_size: int) -> tuple[str, ...]:
    """Lets FlashInfer's calls with these sizes run on Quire, in this process; `flashinfer.trace_apply.disable_apply()` undoes it.
    FlashInfer has one set of solutions: this replaces another one.

    Returns:
        The names of the definitions.

    Raises:
        EngineError: This release of FlashInfer is not supported, or it has no such calls.
    """
    named = _named(Sizes(q_heads, kv_heads, head_dim, page_size))
    from flashinfer import trace_apply

    from quire.integrations.engines import EngineError

    if not trace_apply.enable_apply({name: function for name, (_, function) in named.items()}):
        raise EngineError("flashinfer.trace_apply.enable_apply found no function to replace")
    return tuple(named)


def write(folder: Path, sizes: Sizes) -> list[Path]:
    """Writes `definitions/` and `solutions/` for FLASHINFER_TRACE_APPLY_PATH.

    Returns:
        The files.

    Raises:
        EngineError: This release of FlashInfer is not supported.
    """
    named = _named(sizes)
    from flashinfer.trace.solution import BuildSpec, Solution, SourceFile

    written = []
    for name, (template, function) in named.items():
        solution = Solution(
            name=f"quire_{name}",
            definition=name,
            author=AUTHOR,
            spec=BuildSpec("python", HARDWARE, "solution.py::run", dependencies=("quire",)),
            sources=[SourceFile("solution.py", SOURCE.format(function=function.__name__))],
            description="quire.attend",
        )
        parts = {"definitions": _definition(name, template, sizes), "solutions": solution.to_dict()}
        for part, content in parts.items():
            path = folder / part / template.op_type / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=2) + "\n")
            written.append(path)
    return written


def _definition(name: str, template: Any, sizes: Sizes) -> dict[str, Any]:
    """A definition as FlashInfer writes it for a live call, for these sizes. Its types are unknown here, and are not compared."""
    values = _axes(sizes)
    constants = {axis: {"type": "const", "value": values[axis]} for axis in template.axes if axis in values}
    axes = {axis: constants.get(axis, {"type": "var"}) for axis in template.axes}
    return {
        "name": name,
        "description": template.description,
        "op_type": template.op_type,
        "tags": list(template.tags),
        "axes": axes,
        "constraints": list(template.constraints),
        "inputs": {key: _spec(value) for key, value in template.inputs.items()},
        "outputs": {key: _spec(value) for key, value in template.outputs.items()},
    }


def _spec(value: Any) -> dict[str, Any]:
    shape = getattr(value, "dims", None) or getattr(value, "shape", None)
    made: dict[str, Any] = {"shape": None if shape is None else list(shape), "dtype": getattr(value, "dtype", None) or "unknown"}
    return {**made, "optional": True} if getattr(value, "optional", False) else made
