"""Every kernel there is, in order of preference: the first whose limits all hold runs."""

from __future__ import annotations

from quire.dispatch.kernel import Kernel, Span

_ANY_HEAD = Span(1, 512)
_QUERIES = ("fp32", "fp16", "bf16", "e4m3fn", "e4m3fnuz", "e5m2")

_TRITON = (
    *("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121"),
    *("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1151", "gfx1200", "gfx1201"),
)
"""The GPUs that Triton compiles for: the least common ones by the rows of their families in `kernels/triton/tuning.py`."""

_WHOLE_ROWS = ("nhd", "hnd", "vllm_joint")
"""Layouts in which a head of a token lies in one piece, in K and in V."""
_HOPPER_HEAD = Span(33, 128)

_NATIVE = "kernels/native/libquire.so"

CATALOGUE: tuple[Kernel, ...] = (
    Kernel(
        "triton-decode",
        "attend",
        "few new tokens a row: the keys of all rows are shared out evenly over the card, then combined",
        "quire.kernels.triton.launcher:decode",
        vendors=("nvidia", "amd"),
        arches=_TRITON,
        needs=("triton",),
        q_dtypes=_QUERIES,
        memory=("aligned",),
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
        max_q_len=16,
    ),
    Kernel(
        "gluon-mixed",
        "attend",
        "long rows by warps that only load and warps that only compute, short rows by shares of keys, side by side",
        "quire.kernels.gluon.launcher:launcher",
        arches=("sm90",),
        needs=("triton",),
        pairs=("fp16 over fp16", "bf16 over bf16"),
        layouts=_WHOLE_ROWS,
        memory=("aligned",),
        head_dim=_HOPPER_HEAD,
        v_head_dim=_HOPPER_HEAD,
        without=("mask", "batch_invariant"),
    ),
    Kernel(
        "gluon-mixed-bytes",
        "attend",
        "the same over caches of bytes, which become numbers on their way into shared memory",
        "quire.kernels.gluon.launcher:launcher",
        arches=("sm90",),
        needs=("triton",),
        q_dtypes=("fp16", "bf16"),
        formats=("e4m3fn", "e4m3fnuz", "e5m2", "int8"),
        scales=("tensor", "head"),
        layouts=_WHOLE_ROWS,
        memory=("aligned",),
        head_dim=_HOPPER_HEAD,
        v_head_dim=_HOPPER_HEAD,
        without=("mask", "batch_invariant", "context-form"),
    ),
    Kernel(
        "triton-mixed",
        "attend",
        "long rows by tiles of queries and short rows by shares of keys, side by side in one launch",
        "quire.kernels.triton.launcher:mixed",
        vendors=("nvidia", "amd"),
        arches=_TRITON,
        needs=("triton",),
        q_dtypes=_QUERIES,
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
    ),
    Kernel(
        "triton",
        "write",
        "finds the slots, quantises and stores, in one launch: every format and layout",
        "quire.kernels.triton.write:launcher",
        vendors=("nvidia", "amd"),
        arches=_TRITON,
        needs=("triton",),
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
    ),
    Kernel(
        "triton",
        "audit",
        "compares every required slot with the ledger, beside the calls: what it finds is read on request",
        "quire.kernels.triton.ledger:launcher",
        vendors=("nvidia", "amd"),
        arches=_TRITON,
        needs=("triton",),
    ),
    Kernel(
        "native",
        "attend",
        "C++ for this CPU's instruction set, straight from the pages: every feature, format and layout",
        "quire.kernels.native.attend:launcher",
        vendors=("cpu",),
        library=_NATIVE,
        q_dtypes=_QUERIES,
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
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
        capturable=False,
    ),
    # Last come the kernels that are always there. They read lengths on the host, so a CUDA graph cannot record them.
    Kernel(
        "torch",
        "attend",
        "online softmax over tiles of pages, in torch operators: every feature, on any device",
        "quire.kernels.torch.attend:launcher",
        q_dtypes=_QUERIES,
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
        capturable=False,
    ),
    Kernel(
        "torch",
        "write",
        "scatters keys and values into their slots, in torch operators: every format and layout, on any device",
        "quire.kernels.torch.write:launcher",
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
        capturable=False,
    ),
)
