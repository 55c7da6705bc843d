"""What a call is, in the words of the library: pointers, strides and numbers. `call.h` has the same."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

from quire.batch import Batch as Rows
from quire.cache.kv_cache import KVCache
from quire.problem import dtype_name

TYPES = {name: number for number, name in enumerate(("fp32", "fp16", "bf16", "e4m3fn", "e4m3fnuz", "e5m2", "int8"))}
UNBOUNDED = 2**63 - 1


def _integers(names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in names.split()]


def _pointers(names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names.split()]


class Array(ctypes.Structure):
    """[tokens, heads, dim]."""

    _fields_ = [*_pointers("data"), *_integers("token head dim type")]


class Index(ctypes.Structure):
    """Integers, each read in its own type."""

    _fields_ = [*_pointers("data"), *_integers("row column wide")]


class Pages(ctypes.Structure):
    """[pages, heads, slot/, slot%, dim/, dim%], and the scales of slots and heads."""

    _fields_ = [
        *_pointers("data"),
        *_integers("page head slot_high slot_low dim_high dim_low slot_part dim_part dim type"),
        *_pointers("scale"),
        *_integers("scale_page scale_slot scale_head"),
    ]


class Cache(ctypes.Structure):
    _fields_ = [("k", Pages), ("v", Pages), *_integers("pages page_size heads")]


class Batch(ctypes.Structure):
    _fields_ = [("table", Index), ("kv_lens", Index), ("q_starts", Index), *_integers("seqs width")]


class Attend(ctypes.Structure):
    _fields_ = [
        *((name, Array) for name in ("q", "out", "new_k", "new_v")),
        *_pointers("lse"),
        *_integers("lse_token lse_head tokens group"),
        ("cache", Cache),
        ("batch", Batch),
        *((name, ctypes.c_double) for name in ("scale", "softcap", "out_scale")),
        *_integers("left right"),
        *_pointers("alibi sinks causal_of"),
        *_integers("causal_stride causal"),
        *_pointers("mask"),
        *_integers("mask_token mask_column"),
        ("positions", Index),
        *_integers("context_from only_low only_high zero_padding invariant threads level"),
    ]


class Write(ctypes.Structure):
    _fields_ = [
        ("k", Array),
        ("v", Array),
        ("cache", Cache),
        ("batch", Batch),
        ("slots", Index),
        *_integers("tokens threads level"),
    ]


def array(tensor: torch.Tensor) -> Array:
    return Array(tensor.data_ptr(), *tensor.stride(), TYPES[dtype_name(tensor.dtype)])


def index(tensor: torch.Tensor) -> Index:
    row, column = (*tensor.stride(), 0)[:2]
    return Index(tensor.data_ptr(), row, column, tensor.dtype is torch.int64)


def pages(view: torch.Tensor, format: str, scale: torch.Tensor | None) -> Pages:
    _, _, _, slot_part, dim_high, dim_part = view.shape
    strides: Iterable[int] = (0, 0, 0)
    if scale is not None:
        strides = {0: (0, 0, 0), 1: (0, 0, *scale.stride()), 3: scale.stride()}[scale.dim()]
    pointer = None if scale is None else scale.data_ptr()
    return Pages(view.data_ptr(), *view.stride(), slot_part, dim_part, dim_high * dim_part, TYPES[format], pointer, *strides)


def cache_of(cache: KVCache) -> Cache:
    k, v = (pages(*part) for part in _parts(cache))
    return Cache(k, v, cache.pages, cache.page_size, cache.kv_heads)


def _parts(cache: KVCache) -> tuple[tuple[torch.Tensor, str, torch.Tensor | None], ...]:
    format = cache.format.name
    return (cache.k_view, format, cache.k_scale), (cache.v_view, format, cache.v_scale)


def batch_of(batch: Rows) -> Batch:
    lists = (index(tensor) for tensor in (batch.page_table, batch.kv_lens, batch.q_starts))
    return Batch(*lists, batch.seqs, batch.page_table.shape[1])
