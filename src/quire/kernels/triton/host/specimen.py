"""A call made from a problem, with tensors without memory: what is compiled for the problem is known before the first call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from quire.cache.format import FORMATS
from quire.cache.prefixes import Prefixes
from quire.cache.select import Select
from quire.cache.shard import Shard
from quire.options import NUMBERS, TENSORS, TYPE_TRAITS
from quire.problem import Extent, Problem


def specimen(problem: Problem, extent: Extent) -> Any:
    """The members of a call that launchers read, with tensors on torch's meta device. Only their types matter."""
    tokens, seqs, dims = extent.tokens, extent.seqs, (problem.head_dim, problem.v_head_dim)
    q_dtype = FORMATS[problem.q_dtype].dtype
    new_dtype = FORMATS[problem.new_dtype].dtype if problem.new_dtype else torch.bfloat16
    if q_dtype.itemsize > 1:
        new_dtype = FORMATS[problem.new_dtype or problem.q_dtype].dtype
    k, v = (_meta_tensor(tokens, problem.kv_heads, dim, dtype=new_dtype) for dim in dims)
    return SimpleNamespace(
        q=_meta_tensor(tokens, problem.q_heads, problem.head_dim, dtype=q_dtype),
        k=k,
        v=v,
        new=(k, v) if problem.form == "context" else None,
        out=_meta_tensor(tokens, problem.q_heads, problem.v_head_dim, dtype=FORMATS[problem.out_dtype].dtype),
        lse=_meta_tensor(tokens, problem.q_heads) if problem.lse else None,
        cache=_cache(problem),
        batch=_batch(problem, extent),
        options=_options(problem, seqs),
        given_slots=None,
        zero_padding=False,
        **_rotation(problem, tokens),
    )


def _rotation(problem: Problem, tokens: int) -> dict[str, Any]:
    """The members of a call about its rotation."""
    traits, q = problem.rope, _meta_tensor(tokens, problem.q_heads, problem.head_dim, dtype=_dtype(problem.q_dtype))
    if traits is None:
        return {"rope": None}
    names = ("q_norm", "k_norm")
    norms = {
        name: None if getattr(traits, name) == "none" else _meta_tensor(problem.head_dim, dtype=_dtype(getattr(traits, name)))
        for name in names
    }
    table = _meta_tensor(2, traits.rotary_dim // 2)
    rope = SimpleNamespace(cos=table, sin=table, eps=1e-6, **norms)
    return {"rope": rope, **dict.fromkeys(("q_in", "q_out"), q if traits.q else None), "rope_positions": None}


def _cache(problem: Problem) -> Any:
    formats = [FORMATS[name] for name in problem.formats]
    k, v = (
        _meta_tensor(2, problem.page_size, problem.kv_heads, format.units_of(dim), dtype=format.dtype)
        for dim, format in zip((problem.head_dim, problem.v_head_dim), formats)
    )
    shape = {"tensor": (), "head": (problem.kv_heads,), "token": (2, problem.page_size, problem.kv_heads)}.get(problem.scales)
    k_scale, v_scale = (None if shape is None or not strides else _meta_tensor(*shape) for strides in _scale_strides(problem))
    cells = _meta_tensor(2 * problem.page_size, dtype=torch.int64)
    ledger = SimpleNamespace(position=cells.int(), issue=cells, current=cells, violations=_meta_tensor(9, dtype=torch.int64))
    return SimpleNamespace(
        k=k,
        v=v,
        k_scale=k_scale,
        v_scale=v_scale,
        pages=2,
        page_size=problem.page_size,
        v_head_dim=problem.v_head_dim,
        ledger=ledger,
    )


def _scale_strides(problem: Problem) -> tuple[tuple[int, ...] | None, ...]:
    return problem.k_scale_strides, problem.v_scale_strides


def _batch(problem: Problem, extent: Extent) -> Any:
    table, lens, starts = (getattr(torch, name) for name in problem.index_types)
    width = -(-extent.max_kv_len // problem.page_size)
    return SimpleNamespace(
        page_table=_meta_tensor(extent.seqs, width, dtype=table),
        kv_lens=_meta_tensor(extent.seqs, dtype=lens),
        q_starts=_meta_tensor(extent.seqs + 1, dtype=starts),
        max_q_len=extent.max_q_len,
        max_keys=extent.max_kv_len,
        shard=Shard(0, 2, 1) if problem.shard else None,
        spans=None if problem.spans == "none" else _meta_tensor(extent.tokens, 2, dtype=getattr(torch, problem.spans)),
        select=_select(problem, extent),
        prefixes=_prefixes(extent, width) if problem.prefixes else None,
    )


def _prefixes(extent: Extent, width: int) -> Prefixes:
    """Prefixes of which nothing is known on the host, and one, of two sequences, that is."""
    made = Prefixes.allocate(extent.seqs, 1, 2, width, device="meta")
    made._measure(((2, 1),), 1)
    return made


def _select(problem: Problem, extent: Extent) -> Select | None:
    if problem.select == "none":
        return None
    rows = extent.tokens if problem.select == "positions" else extent.seqs
    return Select(**{problem.select: _meta_tensor(rows, problem.kv_heads, 64, dtype=_dtype(problem.select_index))})  # type: ignore[arg-type]


def _options(problem: Problem, seqs: int) -> Any:
    scales = {"none": None, "number": 1.0, "tensor": _meta_tensor()}
    tensors = {name: _option(problem, name, axes) for name, axes in TENSORS.items()}
    return SimpleNamespace(
        scale=None,
        causal=_meta_tensor(seqs, dtype=torch.bool) if problem.causal == "per-sequence" else problem.causal == "yes",
        numbers=tuple(1.0 if getattr(problem, name) else None for name in NUMBERS),
        tensors=tuple((tensors[name], axes) for name, axes in TENSORS.items()),
        q_scale=scales[problem.q_scale],
        out_scale=scales[problem.out_scale],
        **tensors,
    )


def _option(problem: Problem, name: str, axes: int) -> torch.Tensor | None:
    """A tensor of the options, if the problem has it. Its type is a trait of the problem, or bool."""
    if getattr(problem, name) in (False, "none"):
        return None
    dtype = _dtype(getattr(problem, TYPE_TRAITS[name])) if name in TYPE_TRAITS else torch.bool
    return _meta_tensor(*(1,) * axes, dtype=dtype)


def _dtype(name: str) -> torch.dtype:
    """A type by the name that `dtype_name` gives it."""
    found: torch.dtype = FORMATS[name].dtype if name in FORMATS else getattr(torch, name)
    return found


def _meta_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
