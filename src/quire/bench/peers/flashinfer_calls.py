"""How FlashInfer is called for each kind of workload: its paged wrappers, the wrapper with sinks, the cascade of shared prefixes,
the wrapper for latent caches, and its writes with RoPE."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from quire.bench.case import Q_SCALE, BenchCase
from quire.bench.features import visible
from quire.bench.implementations import BoundImplementation
from quire.bench.peers.pages import PeerPages, pages_of
from quire.bench.workloads import Workload
from quire.bench.written import rotated_difference

DIMS = (64, 128, 256)
"""Sizes of heads of the paged wrappers with tensor cores."""
DECODE_ONLY, GROUPS = 512, (1, 2, 3, 4, 8)
"""A size that only the decode wrapper without tensor cores has, and the groups that it has."""
SPLIT = 2048
"""Keys of a part where results must not depend on the batch: vLLM's own choice."""
MASKS = ("tree", "part_causal", "image")
"""Features that a custom mask expresses."""
MOST_MASKED = 2**31
"""The largest custom mask, in (query, key) pairs: it is given as as many bytes."""


def bind(flashinfer: Any, size: int, case: BenchCase) -> BoundImplementation | None:
    """The call for a workload, planned with a workspace of some bytes; None if no wrapper supports it."""
    w = case.workload
    if w.operation == "write":
        return None if case.rope is None else _rotation(flashinfer, case)
    pages = pages_of(case)
    if pages is None or not _supports(w):
        return None
    workspace = torch.zeros(size, dtype=torch.uint8, device=case.q.device)
    if w.latent:
        return _latent(flashinfer, workspace, case, pages)
    if w.prefixes:
        return _cascade(flashinfer, workspace, case)
    if case.options.sinks is not None:
        return _with_sinks(flashinfer, workspace, case, pages)
    one_each = w.tokens == len(w.sequences) and not w.batch_invariant
    return (_decode if one_each else _prefill)(flashinfer, workspace, case, pages)


def _supports(w: Workload) -> bool:
    decode = w.tokens == len(w.sequences)
    if w.format not in ("", "e4m3fn", "e5m2"):
        return False
    if w.latent:
        return not w.format and (w.head_dim, w.v_dim) == (576, 512) and w.features <= {"latent", "v_dim", "select"}
    if "sinks" in w.options:
        return not w.format and w.head_dim in DIMS and w.features == {"sinks"}
    if w.prefixes:
        return not w.format and w.head_dim in DIMS and w.features == {"prefixes"}
    if w.features.intersection(MASKS) and sum(new * (new + context) for new, context in w.sequences) > MOST_MASKED:
        return False
    if w.v_dim:
        return (w.head_dim, w.v_dim) == (192, 128)
    if w.head_dim == DECODE_ONLY:
        return decode and w.q_heads // w.kv_heads in GROUPS
    return w.head_dim in DIMS


def _features(case: BenchCase) -> dict[str, Any]:
    """The arguments of a plan that come from the features of a workload. ALiBi has the slopes of FlashInfer, which are those of a
    case if the number of heads is a power of two."""
    w, options = case.workload, case.options
    given: dict[str, Any] = {"q_data_type": case.q.dtype, "kv_data_type": case.cache.k.dtype}
    if w.window is not None and not w.features.intersection(MASKS):
        given["window_left"] = w.window - 1
    if options.softcap is not None:
        given["logits_soft_cap"] = options.softcap
    if options.alibi is not None:
        given["pos_encoding_mode"] = "ALIBI"
    if w.scale is not None:
        given["sm_scale"] = options.scale
    return given


def _heads(case: BenchCase, pages: PeerPages) -> tuple[int, int, int, int]:
    w = case.workload
    return w.q_heads, w.kv_heads, w.head_dim, pages.page_size


def _scales(case: BenchCase) -> dict[str, float]:
    cache = case.cache
    if cache.k_scale is None or cache.v_scale is None:
        return {}
    return {"k_scale": float(cache.k_scale), "v_scale": float(cache.v_scale)}


def _bound(case: BenchCase, pages: PeerPages, wrapper: Any, *args: Any) -> BoundImplementation:
    out, scales = case.out(), _scales(case)

    def run() -> torch.Tensor:
        wrapper.run(case.q, (pages.k, pages.v), *args, out=out, **scales)
        return out

    return BoundImplementation(run, case.workload.dtype)


def _decode(flashinfer: Any, workspace: torch.Tensor, case: BenchCase, pages: PeerPages) -> BoundImplementation:
    """One new token each: on tensor cores, where the size of a head allows it."""
    cores = case.workload.head_dim != DECODE_ONLY
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=cores)
    wrapper.plan(*pages.csr, *_heads(case, pages), **_features(case))
    return _bound(case, pages, wrapper)


def _prefill(flashinfer: Any, workspace: torch.Tensor, case: BenchCase, pages: PeerPages) -> BoundImplementation:
    w, given, how = case.workload, _features(case), {}
    if w.features.intersection(MASKS):
        seqs = range(len(w.sequences))
        given["custom_mask"] = torch.cat([visible(w, case.batch, case.options.mask, seq).flatten() for seq in seqs])
    else:
        given["causal"] = True
    if w.v_dim:
        # The kernels for Hopper take no pages with two sizes of heads.
        how, given["head_dim_vo"] = {"backend": "fa2"}, w.v_dim
    if w.batch_invariant:
        how, given["fixed_split_size"] = {"backend": "fa2"}, max(1, SPLIT // w.page_size)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", **how)
    wrapper.plan(case.batch.q_starts, *pages.csr, *_heads(case, pages), **given)
    return _bound(case, pages, wrapper)


def _with_sinks(flashinfer: Any, workspace: torch.Tensor, case: BenchCase, pages: PeerPages) -> BoundImplementation:
    """The wrapper that is compiled with a sink: it takes the sinks, in fp32, and the scale when it runs."""
    w, given, sinks = case.workload, _features(case), case.options.sinks
    assert sinks is not None
    how = given | {"head_dim_qk": w.head_dim, "head_dim_vo": w.head_dim}
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace, "NHD", **how)
    wrapper.plan(case.batch.q_starts, *pages.csr, *_heads(case, pages), causal=True, **given)
    return _bound(case, pages, wrapper, sinks.float(), w.head_dim**-0.5)


def _cascade(flashinfer: Any, workspace: torch.Tensor, case: BenchCase) -> BoundImplementation:
    """A level for each level of the prefixes, and one for the keys of each sequence. It allocates its output."""
    w, batch, device, pages = case.workload, case.batch, case.q.device, PeerPages(case.cache.k, case.cache.v, case.batch)
    starts, seqs, column = batch.q_starts.tolist(), len(w.sequences), 0
    levels = []
    for size, keys in w.prefixes:
        count, first = keys // w.page_size, range(0, seqs, size)
        queries = torch.tensor([*(starts[i] for i in first), starts[-1]], dtype=torch.int32, device=device)
        ids = batch.page_table[::size, column : column + count].flatten()
        indptr = torch.arange(len(first) + 1, dtype=torch.int32, device=device) * count
        levels.append((queries, indptr, ids, torch.full_like(indptr[1:], w.page_size)))
        column += count
    lists = [row[column:] for row in case.page_lists()]
    indptr = torch.tensor([0, *map(len, lists)], device="cpu").cumsum(0).int().to(device)
    levels.append((batch.q_starts, indptr, torch.cat(lists), pages.csr[2]))
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(levels), workspace, "NHD")
    wrapper.plan(*map(list, zip(*levels)), *_heads(case, pages), causal=True, **_features(case))
    return BoundImplementation(partial(wrapper.run, case.q, (pages.k, pages.v)), w.dtype)


def _latent(flashinfer: Any, workspace: torch.Tensor, case: BenchCase, pages: PeerPages) -> BoundImplementation:
    """Keys in two parts: the one that is also the value, and the rotated one."""
    w, out = case.workload, case.out()
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace)
    offsets, ids, _ = pages.csr
    sizes = (w.q_heads, w.v_dim, w.head_dim - w.v_dim, pages.page_size)
    scale = w.head_dim**-0.5 if w.scale is None else w.scale
    wrapper.plan(case.batch.q_starts, offsets, ids, pages.batch.kv_lens, *sizes, True, scale, case.q.dtype, case.cache.k.dtype)
    queries = case.q[..., : w.v_dim].contiguous(), case.q[..., w.v_dim :].contiguous()
    keys = pages.k[:, :, 0, : w.v_dim], pages.k[:, :, 0, w.v_dim :]

    def run() -> torch.Tensor:
        wrapper.run(*queries, *keys, out=out)
        return out

    return BoundImplementation(run, w.dtype)


def _rotation(flashinfer: Any, case: BenchCase) -> BoundImplementation | None:
    """Over an 8-bit cache one launch, which quantises the queries as well; else a rotation and a write."""
    w, rope, cache, batch = case.workload, case.rope, case.cache, case.batch
    if rope is None or w.format not in ("", "e4m3fn", "e5m2"):
        return None
    offsets, ids, last = PeerPages(cache.k, cache.v, batch).csr
    tables, at = torch.cat((rope.cos, rope.sin), 1), batch.positions_of_tokens(w.tokens).int()
    seqs = batch.sequences_of_tokens(w.tokens).int()
    if not w.format:
        rotated: list[torch.Tensor] = []

        def run() -> torch.Tensor:
            flat = (case.q.flatten(1), case.k.flatten(1))
            q, k = flashinfer.apply_rope_with_cos_sin_cache(at, *flat, w.head_dim, tables, is_neox=True)
            flashinfer.append_paged_kv_cache(k.view_as(case.k), case.v, seqs, at, (cache.k, cache.v), ids, offsets, last)
            rotated[:] = [q.view_as(case.q)]
            return cache.k

        return BoundImplementation(run, w.dtype, lambda: rotated_difference(case, rotated[0]))
    out, dtype = torch.empty_like(case.q, dtype=cache.k.dtype), cache.k.dtype
    assert cache.k_scale is not None
    fused = partial(
        flashinfer.rope.rope_quantize_fp8_append_paged_kv_cache,
        *(case.q, case.k, None, None, case.v, tables, at, (cache.k, cache.v), ids, offsets, seqs, at),
        quantize_dtype=dtype,
        quant_scale_q=1 / Q_SCALE,
        quant_scale_kv=1 / float(cache.k_scale),
        page_size=cache.page_size,
        q_rope_out=out,
    )

    def run_fused() -> torch.Tensor:
        fused()
        return cache.k

    return BoundImplementation(run_fused, cache.format.name, lambda: rotated_difference(case, out, Q_SCALE))
