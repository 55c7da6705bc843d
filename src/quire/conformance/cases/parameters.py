"""The parameters of a call, forbidden combinations of their values, and the generated cases: all pairs, or triples, of values."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.cache.format import BYTE_NAMES, FLOAT_NAMES, FP8_NAMES
from quire.conformance.cases.case import Case
from quire.conformance.cases.covering import Forbidden, Row, Space, covering_array
from quire.options import NUMBERS

Lengths = Sequence[tuple[int, int]]
"""(q_len, kv_len) of every sequence."""

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""All other formats have one byte per element."""
SPLIT_LENGTHS = ("splits", "long")
"""Values of `lengths` with sequences that kernels divide into several splits."""
MOST_HEADS, MOST_HEADS_LONG = 32, 16
"""The most query heads of a case: more take longer without testing anything else."""


def _of(field: str, *values: Any) -> dict[str, dict[str, Any]]:
    return {str(value): {field: value} for value in values}


PARAMETERS: dict[str, dict[str, dict[str, Any]]] = {
    "form": _of("form", "full", "context"),
    # Formats of 4 bits, and other formats for V than for K, have cases of their own in standard.txt. So do spans, selections,
    # shards, prefixes, latent caches and batch invariance.
    "format": _of("format", *FLOAT_NAMES, *BYTE_NAMES),
    "scales": _of("scales", "none", "tensor", "head", "token"),
    "q_dtype": _of("q_dtype", "fp32", "fp16", "bf16", FP8_NAMES[0]),
    "layout": _of("layout", "nhd", "hnd", "vllm_x", "vllm_joint", "aiter"),
    "storage": _of("storage", "native", "bytes", "padded"),
    "kv_heads": _of("kv_heads", 1, 2, 3),
    "group": _of("group", 1, 3, 5, 7, 8, 12, 16),
    "head_dim": _of("head_dim", 64, 80, 128, 256)
    | {"96/64": {"head_dim": 96, "v_head_dim": 64}, "64/128": {"head_dim": 64, "v_head_dim": 128}},
    "page_size": _of("page_size", 1, 8, 16, 24, 64, 128),
    "mask": {"causal": {}, "non-causal": {"causal": "no"}, "per-sequence": {"causal": "mixed"}, "tree": {"mask": True}},
    "window": {
        "none": {},
        "self": {"window": (0, 0)},
        "narrow": {"window": (12, 0)},
        "wide": {"window": (300, 0)},
        "both": {"window": (9, 5)},
        "right": {"window": (None, 5)},
    },
    **{name: {"none": {}, "3": {name: 3.0}} for name in NUMBERS},
    "alibi": _of("alibi", False, True),
    "sinks": _of("sinks", False, True),
    "lse": _of("lse", False, True),
    "padding": _of("padding", 0, 3),
    "empty": {"none": {}, "idle": {}, "no keys": {}},
    "lengths": {name: {} for name in ("decode", "mixed", "pages", "tiles", "prefill", "prefill tiles", *SPLIT_LENGTHS)},
    "table": _of("table", "shuffled", "shared", "high"),
    "index": {
        "int32": {},
        "int64": {"index": ("int64", "int64", "int64")},
        "int64 table": {"index": ("int64", "int32", "int32")},
        "int64 lens": {"index": ("int32", "int64", "int32")},
        "int64 starts": {"index": ("int32", "int32", "int64")},
    },
    "strides": _of("strides", "dense", "views"),
    "tail": _of("tail", "page", "-1", "none"),
    "hints": _of("hints", "exact", "none", "low"),
    "data": _of("data", "random", "needle", "extreme"),
    "poison": _of("poison", "nan", "inf"),
}
"""Each parameter, its values, and the fields of a case that each value sets. `lengths_of` computes `empty` and `lengths`."""


def lengths_of(lengths: str, page_size: int, empty: str = "none") -> Lengths:
    """The lengths of a case: at boundaries of pages, tiles and splits, and with sequences without new tokens or without keys."""
    p = page_size
    found = {
        "decode": [(1, 37), (1, 1), (1, 64), (1, 100)],
        "mixed": [(1, 37), (5, 40), (20, 20), (1, 64)],
        # The fourth sequence has a context of one page; the new tokens of the fifth end with a page.
        "pages": [(1, p), (1, p + 1), (1, 2 * p - 1), (3, p + 3), (min(p, 24), 2 * p), (2, 2 * p + 1)],
        "tiles": [(15, 31), (16, 64), (17, 65), (1, 63), (33, 129)],
        "prefill": [(40, 40), (1, 1), (33, 33)],
        "prefill tiles": [(129, 129), (63, 191)],
        "splits": [(1, 255), (1, 257), (1, 513), (1, 1025)],
        "long": [(3, 600), (1, 2000), (40, 1100)],
    }[lengths]
    if empty == "idle":
        return [(0, 9), *found[:1], (0, p), *found[1:], (0, 0)]
    if empty == "no keys":
        return [*found[:1], (2, 0), *found[1:]]
    return found


def shares(lengths: str, page_size: int, empty: str) -> bool:
    """Whether at least two sequences have a context of one page, which they can share."""
    return sum(kv_len - q_len >= page_size for q_len, kv_len in lengths_of(lengths, page_size, empty)) > 1


def _splits_an_axis_evenly(layout: str, format: str, head_dim: str, page_size: str) -> bool:
    x = 16 // ELEMENT_BYTES.get(format, 1)
    if layout not in ("vllm_x", "aiter"):
        return True
    return int(head_dim.partition("/")[0]) % x == 0 and (layout == "vllm_x" or int(page_size) % x == 0)


FORBIDDEN = (
    Forbidden(
        "a quantised cache has scales, and no other cache has",
        ("format", "scales"),
        lambda format, scales: (format in ELEMENT_BYTES) != (scales == "none"),
    ),
    Forbidden("only fp8 pages are passed as bytes", ("storage", "format"), lambda s, f: s == "bytes" and f not in FP8_NAMES),
    Forbidden("fp8 queries require a cache of the same type", ("q_dtype", "format"), lambda q, f: q in FP8_NAMES and q != f),
    Forbidden(
        "a layout that splits an axis requires a multiple of 16 bytes along it",
        ("layout", "format", "head_dim", "page_size"),
        lambda *given: not _splits_an_axis_evenly(*given),
    ),
    Forbidden(
        "a window wider than every sequence has no effect",
        ("window", "lengths"),
        lambda window, lengths: window == "wide" and lengths not in SPLIT_LENGTHS,
    ),
    Forbidden(
        "a tree of one token is a causal query",
        ("mask", "lengths"),
        lambda mask, lengths: mask == "tree" and lengths in ("decode", "splits"),
    ),
    Forbidden(
        "a causal query, a query of a tree and a new token passed as an argument are keys themselves",
        ("empty", "mask", "form"),
        lambda empty, mask, form: empty == "no keys" and (mask in ("causal", "tree") or form == "context"),
    ),
    Forbidden(
        "no two sequences have a whole page of context to share",
        ("table", "lengths", "page_size", "empty"),
        lambda table, lengths, page_size, empty: table == "shared" and not shares(lengths, int(page_size), empty),
    ),
    Forbidden(
        "page ids above 65536 with large pages take too much memory",
        ("table", "page_size", "head_dim", "kv_heads"),
        lambda table, page_size, head_dim, kv_heads: (
            table == "high" and (int(page_size) > 24 or head_dim == "256" or int(kv_heads) > 2)
        ),
    ),
    Forbidden(
        "gaps between 65536 pages take too long to fill",
        ("table", "storage"),
        lambda table, storage: table == "high" and storage == "padded",
    ),
    Forbidden(
        "one scale for all tokens saturates extreme keys",
        ("data", "scales"),
        lambda data, scales: data == "extreme" and scales in ("tensor", "head"),
    ),
    Forbidden(
        "with a sink, logits of -200 give outputs too small for fp32",
        ("data", "sinks"),
        lambda data, sinks: data == "extreme" and sinks == "True",
    ),
    Forbidden("fp8 cannot represent extreme queries", ("data", "q_dtype"), lambda data, q: data == "extreme" and q in FP8_NAMES),
    Forbidden(
        "too many heads take too long",
        ("group", "kv_heads", "lengths"),
        lambda group, kv_heads, lengths: int(group) * int(kv_heads) > (MOST_HEADS_LONG if lengths in SPLIT_LENGTHS else MOST_HEADS),
    ),
)
"""Combinations that are meaningless or too expensive: no case has them."""

SPACE = Space({name: tuple(values) for name, values in PARAMETERS.items()}, FORBIDDEN)
WORDS = {2: "pair", 3: "triple"}


def case_of(name: str, row: Row) -> Case:
    """The case with these parameter values."""
    given: dict[str, Any] = {}
    for parameter, value in row.items():
        given |= PARAMETERS[parameter][value]
    sequences = lengths_of(row["lengths"], given["page_size"], row["empty"])
    q_lens, kv_lens = tuple(q for q, _ in sequences), tuple(kv for _, kv in sequences)
    return Case(name, q_lens=q_lens, kv_lens=kv_lens, seed=zlib.crc32(name.encode()) % 1000, **given)


def _file(strength: int) -> Path:
    return Path(__file__).with_name(f"{WORDS[strength]}s.txt")


def generate() -> None:
    """Writes pairs.txt and triples.txt after a change of `PARAMETERS`: `python -m quire.conformance.cases.parameters` (minutes)."""
    pairs = covering_array(SPACE, 2, attempts=16)
    for strength, rows in ((2, pairs), (3, covering_array(SPACE, 3, given=pairs, attempts=2))):
        lines = [str(case_of(f"{WORDS[strength]}-{n:03}", row)) for n, row in enumerate(rows)]
        _file(strength).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    generate()
