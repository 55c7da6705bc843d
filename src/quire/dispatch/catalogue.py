"""The catalogue of kernels, in order of preference: the first kernel whose limits all hold runs."""

from __future__ import annotations

from quire.cache.format import BYTE_NAMES, QUERY_NAMES
from quire.dispatch.kernel import IntRange, Kernel

_ANY_HEAD = IntRange(1, 512)
_ANY_LATENT = IntRange(1, 576)
_LATENT_MEMORY = 132 * 1024
"""As compiled: 16 queries and 16 keys of 1024 elements of fp32, and what belongs to them."""

_TRITON = (
    *("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121"),
    *("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1151", "gfx1200", "gfx1201"),
)
"""The GPUs that Triton compiles for. Others use the entries of their family in `kernels/triton/host/tuning.py`."""

_CONTIGUOUS_HEADS = ("nhd", "hnd", "vllm_joint")
"""Layouts in which one head of one token is contiguous, in K and in V."""
_HOPPER_HEAD = IntRange(33, 256)

FEW_ROWS = 8192
"""As tiles of 128 rows, long queries of fewer rows give work to less than half of the multiprocessors of an H200. As decodes, whose
keys are divided among programs, they take 0.4 to 1.0 of the time (docs/performance.md)."""

_NATIVE = "kernels/native/libquire.so"

_PLAIN_ALONE = ("mask", "shard", "spans", "select", "window")
"""What kernels that read shared prefixes once do not support: a batch with prefixes is then read sequence by sequence."""

CATALOGUE: tuple[Kernel, ...] = (
    Kernel(
        "triton-shared",
        "attend",
        "decode that reads the pages of shared prefixes once for all of their sequences; the rest of each is as in triton-decode",
        "quire.kernels.triton.host.shared:launcher",
        vendors=("nvidia", "amd"),
        arches=_TRITON,
        needs=("triton",),
        q_dtypes=QUERY_NAMES,
        memory=("aligned",),
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
        latent_dim=_ANY_LATENT,
        latent_memory=_LATENT_MEMORY,
        max_q_len=16,
        shares=8192,
        without=_PLAIN_ALONE,
    ),
    Kernel(
        "triton-decode",
        "attend",
        "split-KV decode, for up to 16 new tokens per sequence or few query rows: keys are divided evenly among programs (with "
        "batch_invariant at multiples of 256), partial results are combined",
        "quire.kernels.triton.host.launcher:decode",
        vendors=("nvidia", "amd"),
        arches=_TRITON,
        needs=("triton",),
        q_dtypes=QUERY_NAMES,
        memory=("aligned",),
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
        latent_dim=_ANY_LATENT,
        latent_memory=_LATENT_MEMORY,
        long_rows=FEW_ROWS,
    ),
    Kernel(
        "gluon-mixed",
        "attend",
        "warp-specialised prefill (producer and consumer warps) for long queries, concurrent with split-KV for short ones",
        "quire.kernels.gluon.launcher:launcher",
        arches=("sm90",),
        needs=("triton",),
        pairs=("fp16 over fp16", "bf16 over bf16"),
        layouts=_CONTIGUOUS_HEADS,
        memory=("aligned",),
        head_dim=_HOPPER_HEAD,
        v_head_dim=_HOPPER_HEAD,
        without=("mask", "batch_invariant", "select", "mixed-formats", "v_in_k"),
    ),
    Kernel(
        "gluon-mixed-bytes",
        "attend",
        "as gluon-mixed, for 8-bit caches, which are converted while they are loaded into shared memory",
        "quire.kernels.gluon.launcher:launcher",
        arches=("sm90",),
        needs=("triton",),
        q_dtypes=("fp16", "bf16"),
        formats=BYTE_NAMES,
        scales=("tensor", "head"),
        layouts=_CONTIGUOUS_HEADS,
        memory=("aligned",),
        head_dim=_HOPPER_HEAD,
        v_head_dim=_HOPPER_HEAD,
        without=("mask", "batch_invariant", "context-form", "select", "mixed-formats", "v_in_k"),
    ),
    Kernel(
        "triton-mixed",
        "attend",
        "tiles of queries for long queries and split-KV for short ones (with batch_invariant the same tiles), in one launch",
        "quire.kernels.triton.host.launcher:mixed",
        vendors=("nvidia", "amd"),
        arches=_TRITON,
        needs=("triton",),
        q_dtypes=QUERY_NAMES,
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
        latent_dim=_ANY_LATENT,
        latent_memory=_LATENT_MEMORY,
    ),
    Kernel(
        "triton",
        "write",
        "computes the slots, quantises and stores in one launch: every format and layout",
        "quire.kernels.triton.host.write:launcher",
        vendors=("nvidia", "amd"),
        arches=_TRITON,
        needs=("triton",),
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
        latent_dim=_ANY_LATENT,
    ),
    Kernel(
        "triton",
        "audit",
        "compares every required slot with the ledger without synchronization; the result is read on request",
        "quire.kernels.triton.host.audit:launcher",
        vendors=("nvidia", "amd"),
        arches=_TRITON,
        needs=("triton",),
    ),
    Kernel(
        "native-shared",
        "attend",
        "as native; reads the pages of shared prefixes once for all of their sequences",
        "quire.kernels.native.attend:shared_launcher",
        vendors=("cpu",),
        library=_NATIVE,
        q_dtypes=QUERY_NAMES,
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
        latent_dim=_ANY_LATENT,
        shares=64,
        without=_PLAIN_ALONE,
        capturable=False,
    ),
    Kernel(
        "native",
        "attend",
        "C++ for this CPU's instruction set, reads pages in place: every feature, format and layout",
        "quire.kernels.native.attend:launcher",
        vendors=("cpu",),
        library=_NATIVE,
        q_dtypes=QUERY_NAMES,
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
        latent_dim=_ANY_LATENT,
        capturable=False,
    ),
    Kernel(
        "native",
        "write",
        "C++ for this CPU's instruction set: quantises and stores, every format and layout",
        "quire.kernels.native.write:launcher",
        vendors=("cpu",),
        library=_NATIVE,
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
        latent_dim=_ANY_LATENT,
        capturable=False,
    ),
    # The kernels that are always available come last. They read lengths on the host, so a CUDA graph cannot capture them.
    Kernel(
        "torch",
        "attend",
        "online softmax over tiles of pages, in torch operators: every feature, on any device",
        "quire.kernels.torch.attend:launcher",
        q_dtypes=QUERY_NAMES,
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
        latent_dim=_ANY_LATENT,
        capturable=False,
    ),
    Kernel(
        "torch",
        "write",
        "scatters keys and values into their slots, in torch operators: every format and layout, on any device",
        "quire.kernels.torch.write:launcher",
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
        latent_dim=_ANY_LATENT,
        capturable=False,
    ),
)
