"""The cases, edges first. Each level holds those before it: `smoke` in seconds, `standard` in minutes, `full` for a night."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from quire.conformance.case import ALLOWED, Case
from quire.errors import ArgumentError

LEVELS = ("smoke", "standard", "full")

_DECODE: dict[str, Any] = {"q_lens": (1, 1, 1, 1), "kv_lens": (37, 1, 64, 100)}
_EDGES: dict[str, Any] = {"q_lens": (1, 15, 16, 17, 0, 1, 1, 2), "kv_lens": (1, 15, 16, 17, 9, 16, 33, 34)}
_LONG: dict[str, Any] = {"q_lens": (1, 3, 1), "kv_lens": (1025, 600, 2000), "data": "needle"}
_LENGTHS: dict[str, dict[str, Any]] = {
    "long": {"q_lens": (3, 1, 40), "kv_lens": (600, 2000, 1100), "kv_heads": 1},
    "long-decode": {"q_lens": (1, 1, 1), "kv_lens": (600, 2000, 90), "kv_heads": 1},
}
"""Rows of several shares for kernels that split keys: many have faults only from the second share on."""
_EVERYTHING: dict[str, Any] = {"window": (300, 0), "softcap": 20.0, "alibi": True, "sinks": True, "lse": True, "data": "needle"}
_EVERYTHING |= {"format": "e4m3fn", "scales": "head"}
_INT64: dict[str, Any] = {"index": ("int64", "int64", "int64")}

SMOKE = (
    Case("mixed", lse=True),
    Case("decode-needle", **_DECODE, data="needle"),
    Case("edges", **_EDGES, padding=3, lse=True),
    Case("prefill-tiles", q_lens=(129, 63), kv_lens=(129, 191), kv_heads=1, group=2),
    Case("window-needle", data="needle", window=(8, 0), tail="-1"),
    Case("fp8-head-scales", format="e4m3fn", scales="head"),
    Case("context-form", form="context", padding=2),
    Case("int64", **_INT64),
    Case("softcap-alibi", softcap=3.0, alibi=True),
    Case("sinks-window-lse", sinks=True, window=(12, 0), lse=True),
    Case("x-packed-int8-tokens", layout="vllm_x", format="int8", scales="token"),
    Case("tree", q_lens=(6, 9), kv_lens=(40, 30), mask=True, alibi=True, window=(20, 0)),
    Case("long-bf16", **_LONG, q_dtype="bf16", format="bf16", kv_heads=1),
    Case("long-random", q_lens=(1, 2), kv_lens=(1500, 700), kv_heads=1, lse=True, seed=3),
    Case("high-pages", table="high", kv_heads=1),
    Case("far", table="far", kv_heads=1, format="e4m3fn", scales="tensor"),
)

STANDARD = (
    # Lengths.
    Case("decode", **_DECODE, lse=True, seed=1),
    Case("one-of-each", q_lens=(1,), kv_lens=(1,)),
    Case("first-prefill", q_lens=(40, 33), kv_lens=(40, 33)),
    Case("chunk", q_lens=(32, 20), kv_lens=(96, 71), data="needle"),
    Case("many", q_lens=(1,) * 24 + (7, 2), kv_lens=(*range(3, 75, 3), 50, 20), kv_heads=1, group=4),
    Case("many-sequences", q_lens=(1,) * 130, kv_lens=tuple(1 + 7 * n % 45 for n in range(130)), kv_heads=1),
    Case("empty-last", q_lens=(1, 3, 0), kv_lens=(37, 20, 9)),
    Case("edges-needle", **_EDGES, data="needle", poison="inf", tail="-1", seed=2),
    Case("prefill-256", q_lens=(257, 5), kv_lens=(257, 300), kv_heads=1, group=1, data="needle"),
    Case("long-needle", **_LONG, lse=True),
    Case("longer-needle", q_lens=(1,), kv_lens=(16384,), kv_heads=1, group=4, data="needle"),
    Case("hints-low", q_lens=(1, 30, 9), kv_lens=(80, 40, 33), hints="low"),
    Case("hints-none", q_lens=(1, 30, 9), kv_lens=(80, 40, 33), hints="none"),
    # Types.
    Case("fp32", q_dtype="fp32", format="fp32", lse=True),
    Case("bf16", q_dtype="bf16", format="bf16"),
    Case("fp32-over-bf16", q_dtype="fp32", format="bf16"),
    Case("int64-needle", **_INT64, data="needle", lse=True),
    Case("int64-starts", index=("int32", "int32", "int64")),
    Case("int64-lens", index=("int32", "int64", "int32")),
    Case("int64-table", index=("int64", "int32", "int32")),
    # Caches.
    Case("e4m3fn-tensor", format="e4m3fn", scales="tensor", data="needle"),
    Case("e4m3fn-bytes", format="e4m3fn", scales="tensor", storage="bytes", q_dtype="bf16"),
    Case("e4m3fnuz-tensor", format="e4m3fnuz", scales="tensor"),
    Case("e5m2-tensor", format="e5m2", scales="tensor"),
    Case("e5m2-heads-bytes", format="e5m2", scales="head", storage="bytes", q_dtype="bf16"),
    Case("e4m3fn-tokens", format="e4m3fn", scales="token", lse=True),
    Case("int8-heads", format="int8", scales="head", data="needle"),
    Case("int8-tokens", format="int8", scales="token", q_dtype="bf16"),
    Case("fp8-queries", q_dtype="e4m3fn", format="e4m3fn", scales="tensor"),
    Case("fp8-context", format="e4m3fn", scales="head", form="context"),
    Case("hnd", layout="hnd", data="needle"),
    Case("x-packed", layout="vllm_x"),
    Case("x-packed-fp8", layout="vllm_x", format="e4m3fn", scales="head"),
    Case("joint", layout="vllm_joint", storage="padded"),
    Case("aiter", layout="aiter", format="e4m3fn", scales="tensor", storage="bytes"),
    Case("padded", storage="padded", poison="inf"),
    Case("very-far", table="very-far", kv_heads=1, format="e4m3fn", scales="tensor", data="needle"),
    Case("far-bytes", table="far", kv_heads=1, format="e5m2", scales="tensor", storage="bytes"),
    Case("shared", q_lens=(1, 5, 2), kv_lens=(60, 50, 75), table="shared"),
    # Pages and heads.
    Case("page-1", page_size=1),
    Case("page-8", page_size=8, data="needle"),
    Case("page-24", page_size=24),
    Case("page-32", page_size=32),
    Case("page-128", page_size=128, q_lens=(1, 9, 3), kv_lens=(300, 129, 128)),
    Case("heads-1-8", kv_heads=1, group=8, data="needle"),
    Case("heads-8-8", kv_heads=8, group=1),
    Case("heads-4-3", kv_heads=4, group=3),
    Case("heads-3-2", kv_heads=3, group=2),
    Case("dim-128", head_dim=128, q_dtype="bf16", format="bf16", data="needle"),
    Case("dim-80", head_dim=80),
    Case("dim-256", head_dim=256, kv_heads=1),
    Case("dim-96-of-values-64", head_dim=96, v_head_dim=64),
    # Decoding alone: many kernels do nothing else, and must show everything there.
    Case("decode-bf16", **_DECODE, q_dtype="bf16", format="bf16", head_dim=128, kv_heads=1, group=8, data="needle"),
    Case("decode-fp8", **_DECODE, format="e4m3fn", scales="head", data="needle"),
    Case("decode-fp8-bytes", **_DECODE, format="e5m2", scales="tensor", storage="bytes", q_dtype="bf16"),
    Case("decode-int8-tokens", **_DECODE, format="int8", scales="token", lse=True),
    Case("decode-hnd", **_DECODE, layout="hnd", data="needle", seed=4),
    Case("decode-x-packed-fp8", **_DECODE, layout="vllm_x", format="e4m3fn", scales="tensor", storage="bytes"),
    Case("decode-int64", **_DECODE, **_INT64, data="needle"),
    Case("decode-high-pages", **_DECODE, table="high", kv_heads=1),
    Case("decode-far", **_DECODE, table="far", kv_heads=1, format="e4m3fn", scales="tensor"),
    Case("decode-hints-low", **_DECODE, hints="low"),
    Case("decode-padding", q_lens=(1, 0, 1, 1), kv_lens=(37, 5, 64, 100), padding=3, tail="-1", data="needle", lse=True),
    Case("decode-everything", **_DECODE, window=(40, 0), softcap=3.0, alibi=True, sinks=True, lse=True, kv_heads=4, group=3),
    # Every feature over several shares of keys.
    *(
        case
        for name, lengths in _LENGTHS.items()
        for case in (
            Case(f"{name}-sinks", **lengths, sinks=True, lse=True),
            Case(f"{name}-alibi", **lengths, alibi=True, data="needle"),
            Case(f"{name}-window", **lengths, window=(400, 0), data="needle"),
            Case(f"{name}-softcap", **lengths, softcap=3.0),
            Case(f"{name}-fp8", **{**lengths, "kv_heads": 2}, format="e4m3fn", scales="head"),
            Case(f"{name}-int8", **lengths, format="int8", scales="token", data="needle"),
            Case(f"{name}-everything", **lengths, **_EVERYTHING),
        )
    ),
    Case("long-tree", q_lens=(6, 9), kv_lens=(700, 1300), kv_heads=1, mask=True),
    Case("long-context", **_LENGTHS["long"], form="context", data="needle"),
    # Logits of which no exponential is a number unless the largest is taken off.
    Case("extreme", data="extreme", lse=True),
    Case("extreme-decode", **_DECODE, data="extreme"),
    Case("extreme-long", **_LENGTHS["long"], data="extreme"),
    Case("extreme-long-decode", **_LENGTHS["long-decode"], data="extreme", lse=True),
    Case("extreme-sinks", data="extreme", sinks=True),
    Case("extreme-softcap", data="extreme", softcap=20.0),
    # Rows of wider tensors.
    Case("strided", strides="views", lse=True),
    Case("strided-decode", **_DECODE, strides="views"),
    Case("strided-context", strides="views", form="context"),
    # Features.
    Case("window", q_lens=(1, 30, 9), kv_lens=(80, 40, 33), window=(15, 0), lse=True),
    Case("window-1", window=(0, 0)),
    Case("window-decode", **_DECODE, window=(31, 0), data="needle", poison="inf"),
    Case("window-both-sides", causal="no", window=(6, 4)),
    Case("window-both-sides-needle", causal="no", window=(9, 5), data="needle", lse=True),
    Case("window-right", causal="no", window=(None, 5)),
    Case("encoder", causal="no", q_lens=(20, 33, 5), kv_lens=(20, 33, 5)),
    Case("cross", causal="no", q_lens=(20, 3, 2), kv_lens=(7, 40, 0)),
    Case("causal-mixed", causal="mixed", lse=True),
    Case("softcap", softcap=4.0),
    Case("softcap-window", softcap=2.0, window=(10, 0), lse=True),
    Case("alibi", alibi=True, lse=True),
    Case("alibi-decode", **_DECODE, alibi=True, group=4),
    Case("alibi-sinks", alibi=True, sinks=True),
    Case("alibi-window", alibi=True, window=(10, 0)),
    Case("sinks", sinks=True, lse=True),
    Case("sinks-decode", **_DECODE, sinks=True, data="needle"),
    Case("scale", scale=0.3),
    Case("tree-plain", q_lens=(6, 1, 9), kv_lens=(40, 20, 30), mask=True),
    Case("tree-window", q_lens=(6, 9), kv_lens=(40, 30), mask=True, window=(5, 0), lse=True),
    Case("context-needle", form="context", data="needle", q_lens=(1, 9, 20), kv_lens=(40, 30, 20)),
    Case("context-window", form="context", window=(10, 0), alibi=True),
    Case("everything", window=(25, 0), softcap=3.0, alibi=True, sinks=True, lse=True, format="e4m3fn", scales="head", padding=2),
)


def _full() -> Iterator[Case]:
    """Every layout with every format and kind of scale, every type of query; long rows; the standard cases with other numbers."""
    for layout, format in product(ALLOWED["layout"], ALLOWED["format"]):
        quantised = format in ("e4m3fn", "e4m3fnuz", "e5m2", "int8")
        for scales in ("tensor", "head", "token") if quantised else ("none",):
            name = f"{layout}-{format}" + (f"-{scales}" if quantised else "")
            for q_dtype in ("fp32", "fp16", "bf16"):
                yield Case(f"{name}-{q_dtype}", layout=layout, format=format, scales=scales, q_dtype=q_dtype, lse=True)
    for length in (4096, 32768, 131072):
        yield Case(f"needle-{length}", q_lens=(1,), kv_lens=(length,), kv_heads=1, group=4, data="needle", lse=True)
        yield Case(f"needle-chunk-{length}", q_lens=(3,), kv_lens=(length,), kv_heads=1, group=2, data="needle", window=(1000, 0))
    for size in (2, 4, 48, 64, 256):
        yield Case(f"page-{size}-full", page_size=size)
    for dim in (8, 32, 40, 112, 160, 192, 512):
        yield Case(f"dim-{dim}-full", head_dim=dim)
    for n, case in enumerate((*SMOKE, *STANDARD)):
        yield case.replace(name=f"{case.name}-again", seed=100 + n, poison="inf" if case.poison == "nan" else "nan")


def cases(level: str) -> list[Case]:
    """The cases of a level."""
    if level not in LEVELS:
        raise ArgumentError("level", level, ", ".join(LEVELS))
    found = list(SMOKE)
    if level in ("standard", "full"):
        found += STANDARD
    if level == "full":
        found += _full()
    return found
