"""Sets of workloads for GPUs: the known ones, and those that vary one parameter or use one feature."""

from __future__ import annotations

from dataclasses import replace

from quire.bench.workloads import CUDA_WORKLOADS, FP8, Lengths, Workload, ragged
from quire.options import NUMBERS

_PREFILL = Workload("prefill 1 x 8192", ((8192, 0),))
_MANY = Workload("prefill 8 x 1024 over 1024", ((1024, 1024),) * 8)
_CHUNKS = (
    Workload("prefill 1 x 128 over 2000", ((128, 2000),)),
    Workload("prefill 16 x 128 over 2000", ((128, 2000),) * 16),
    Workload("prefill 1 x 512 over 100000", ((512, 100_000),)),
)


def _ragged_prefill(count: int, most: int) -> Lengths:
    """Prompts of all lengths up to `most`, every second one over a context, repeatable."""
    return tuple((1 + (i * 2711) % most, (i % 2) * ((i * 7919) % 4096)) for i in range(count))


_RAGGED = (
    Workload("prefill 16 ragged to 4096", _ragged_prefill(16, 4096)),
    Workload("prefill 64 ragged to 512", _ragged_prefill(64, 512)),
)
_TREE = Workload("prefill 16 x 256 over 2048", ((256, 2048),) * 16, tree=True)
# Gemma 4: local layers with a window, global ones with larger and fewer heads.
_LOCAL = Workload("prefill 2 x 4096", ((4096, 0),) * 2, q_heads=16, head_dim=256, window=1024, image=256)
_GLOBAL = replace(_LOCAL, kv_heads=2, head_dim=512, window=None)
# gpt-oss: sinks in every layer, a window in every second one.
_SINKS = replace(_PREFILL, q_heads=64, head_dim=64, options=("sinks",))

PREFILL: tuple[Workload, ...] = (
    *(replace(_PREFILL, head_dim=dim) for dim in (64, 80, 96, 256)),
    replace(_PREFILL, q_heads=16, kv_heads=2, head_dim=512),
    replace(_PREFILL, q_heads=16, kv_heads=16, head_dim=192, v_dim=128),
    *(replace(_PREFILL, q_heads=q_heads, kv_heads=kv) for q_heads, kv in ((32, 32), (40, 8), (28, 4), (64, 8), (32, 2))),
    *(replace(_PREFILL, page_size=size) for size in (1, 7, 32, 64, 128, 256, 544)),
    replace(_PREFILL, dtype="fp16"),
    *(replace(_PREFILL, options=(name,)) for name in (*NUMBERS, "alibi")),
    _SINKS,
    replace(_SINKS, window=128),
    *(replace(_PREFILL, window=window) for window in (128, 1024, 4096)),
    _TREE,
    replace(_MANY, part_causal=True),
    *_CHUNKS,
    *_RAGGED,
    *(replace(shape, format=format) for format in ("", FP8) for shape in (_LOCAL, _GLOBAL)),
    replace(_PREFILL, format="e5m2"),
    replace(_PREFILL, format=FP8, head_dim=64),
    replace(_PREFILL, format=FP8, head_dim=256),
    replace(_PREFILL, format=FP8, window=1024),
    replace(_CHUNKS[2], format=FP8),
    replace(_PREFILL, batch_invariant=True),
    replace(_CHUNKS[1], batch_invariant=True),
)
"""Long queries: sizes, groups, pages, softmax options, masks, chunks, formats."""

_DECODE = Workload("decode 64 x 4096", ((1, 4095),) * 64)
_VERIFY = Workload("verify 16 x 16 over 4096", ((16, 4096),) * 16, q_heads=64)
_MIXED = Workload("mixed: 1 x 512 over 512 + 31 decodes at 1024", ((512, 512), *((1, 1023),) * 31))

DECODE: tuple[Workload, ...] = (
    Workload("decode 1 x 1024", ((1, 1023),)),
    Workload("decode 8 x 300", ((1, 299),) * 8),
    Workload("decode 1 x 4096", ((1, 4095),), q_heads=64),
    Workload("decode 4 x 2048", ((1, 2047),) * 4, head_dim=64),
    Workload("verify 1 x 5 over 2000", ((5, 2000),)),
    _VERIFY,
    replace(_VERIFY, format=FP8),
    Workload("verify 16 x 64 over 2048", ((64, 2048),) * 16, tree=True),
    *(replace(_DECODE, head_dim=dim) for dim in (64, 96, 256)),
    replace(_DECODE, q_heads=16, kv_heads=2, head_dim=512),
    replace(_DECODE, q_heads=16, kv_heads=1),
    *(replace(_DECODE, page_size=size) for size in (1, 64, 544)),
    replace(_DECODE, dtype="fp16"),
    *(replace(_DECODE, options=(name,)) for name in (*NUMBERS, "alibi")),
    *(replace(_DECODE, q_heads=64, head_dim=64, options=("sinks",), window=window) for window in (None, 128)),
    Workload("decode 64 ragged to 1024", ragged(64, 1024)),
    Workload("decode 64 ragged to 1024", ragged(64, 1024), format=FP8),
    _MIXED,
    replace(_MIXED, format=FP8),
    replace(_DECODE, format="e5m2"),
    replace(_DECODE, batch_invariant=True),
)
"""Short queries, and both kinds in one batch."""

_LATENT = Workload(
    "decode 64 x 4096",
    ((1, 4095),) * 64,
    q_heads=128,
    kv_heads=1,
    head_dim=576,
    v_dim=512,
    latent=True,
    scale=192**-0.5,
    page_size=64,
)


def _sharing(name: str, sequences: int, private: int, *levels: tuple[int, int]) -> Workload:
    """Decodes over shared keys and `private` ones."""
    keys = sum(count for _, count in levels) + private
    return Workload(name, ((1, keys - 1),) * sequences, prefixes=levels)


_ROPE = Workload("write 8192", ((8192, 0),), operation="write", rope=True)
_ROPE_DECODE = Workload("write 64 x 1", ((1, 4095),) * 64, operation="write", rope=True)
_SPARSE = Workload("decode 16 x 32768", ((1, 32767),) * 16)

FEATURES: tuple[Workload, ...] = (
    _LATENT,
    replace(_LATENT, q_heads=16),
    replace(_LATENT, format=FP8),
    replace(_LATENT, format="fp8_ds_mla"),
    replace(_LATENT, name="decode 1 x 16384", sequences=((1, 16383),)),
    replace(_LATENT, name="verify 16 x 4 over 4096", sequences=((4, 4096),) * 16),
    replace(_LATENT, name="prefill 1 x 2048", sequences=((2048, 0),)),
    replace(_LATENT, name="prefill 1 x 2048 over 6144", sequences=((2048, 6144),), q_heads=16),
    _sharing("decode 64 x 256 over 8192 shared", 64, 256, (64, 8192)),
    _sharing("decode 64 x 256 over 32768 shared", 64, 256, (64, 32768)),
    _sharing("decode 32 x 16 answers of 512 to prompts of 1024", 512, 512, (16, 1024)),
    _sharing("decode 64 x 256 below a tree of depth 3", 64, 256, (64, 4096), (16, 2048), (4, 1024)),
    *(w for w in CUDA_WORKLOADS if w.format in ("int4", "nvfp4")),
    replace(_DECODE, format="int8", v_format="int4", scales="token"),
    replace(_DECODE, format="int4", scales="token", hadamard=True),
    replace(_SPARSE, select="positions", selected=2048),
    replace(_SPARSE, select="columns", selected=128),
    replace(_LATENT, name=_SPARSE.name, sequences=_SPARSE.sequences, select="positions", selected=2048),
    *(replace(shape, format=format) for shape in (_ROPE, _ROPE_DECODE) for format in ("", FP8)),
)
"""Latent caches, shared prefixes, formats of 4 bits, sparse selection, and writes that rotate."""

SETS: dict[str, tuple[Workload, ...]] = {"known": CUDA_WORKLOADS, "prefill": PREFILL, "decode": DECODE, "features": FEATURES}
SETS["all"] = tuple(dict.fromkeys(workload for rows in tuple(SETS.values()) for workload in rows))
"""By name, as `quire bench --set` takes them."""
