"""The parameters of a write, forbidden combinations of their values, and the generated cases, as in `parameters`."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from quire.cache.format import BYTE_NAMES, FLOAT_NAMES, FP8_NAMES
from quire.conformance.cases.case import Case
from quire.conformance.cases.covering import Forbidden, Row, Space, covering_array
from quire.conformance.cases.formats import GROUP, INTEGERS, units_of
from quire.conformance.cases.parameters import ELEMENT_BYTES, WORDS, lengths_of, shares

PARAMETERS: dict[str, dict[str, dict[str, Any]]] = {
    "format": {name: {"format": name} for name in (*FLOAT_NAMES, *BYTE_NAMES, *INTEGERS[1:], "nvfp4")},
    "scales": {name: {"scales": name} for name in ("none", "tensor", "head", "token")},
    "q_dtype": {name: {"q_dtype": name} for name in FLOAT_NAMES},
    "layout": {name: {"layout": name} for name in ("nhd", "hnd", "vllm_x", "vllm_joint", "aiter")},
    "storage": {name: {"storage": name} for name in ("native", "bytes", "padded")},
    "kv_heads": {str(n): {"kv_heads": n} for n in (1, 2, 3)},
    "group": {str(n): {"group": n} for n in (1, 3, 8)},
    "head_dim": {str(n): {"head_dim": n} for n in (64, 80, 128)}
    | {"96/64": {"head_dim": 96, "v_head_dim": 64}, "64/128": {"head_dim": 64, "v_head_dim": 128}},
    "page_size": {str(n): {"page_size": n} for n in (1, 8, 16, 24, 64)},
    "slots": {name: {"slots": name} for name in ("batch", "skipped", "scattered")},
    "keys": {
        "plain": {},
        "hadamard": {"hadamard": True},
        **{name: {"rope": name} for name in ("half-split", "interleaved")},
        **{f"{name} in part": {"rope": name, "rotary_dim": 48} for name in ("half-split", "interleaved")},
    },
    "norm": {name: {"norm": name} for name in ("none", "weight", "unit-offset")},
    "queries": {"yes": {}, "no": {"queries": False}},
    "positions": {name: {"positions": name} for name in ("own", "given")},
    "padding": {str(n): {"padding": n} for n in (0, 3)},
    "lengths": {name: {} for name in ("decode", "mixed", "pages", "prefill")},
    "empty": {"none": {}, "idle": {}},
    "table": {name: {"table": name} for name in ("shuffled", "shared", "high")},
    "index": {
        "int32": {},
        "int64": {"index": ("int64", "int64", "int64")},
        "int64 table": {"index": ("int64", "int32", "int32")},
        "int64 lens": {"index": ("int32", "int64", "int32")},
    },
    "strides": {name: {"strides": name} for name in ("dense", "views")},
}
"""Each parameter, its values, and the fields of a case that each value sets. `lengths_of` computes `empty` and `lengths`."""


def _dims(head_dim: str) -> tuple[int, int]:
    k, _, v = head_dim.partition("/")
    return int(k), int(v or k)


def _fits(layout: str, format: str, head_dim: str, page_size: str) -> bool:
    """Whether a layout can hold elements of a format."""
    if format in GROUP:
        return layout in ("nhd", "hnd")
    x = 16 // ELEMENT_BYTES.get(format, 1)
    if layout not in ("vllm_x", "aiter"):
        return True
    return units_of(format, _dims(head_dim)[0]) % x == 0 and (layout == "vllm_x" or int(page_size) % x == 0)


FORBIDDEN = (
    Forbidden(
        "a quantised cache has scales, and no other cache has",
        ("format", "scales"),
        lambda format, scales: (format in ELEMENT_BYTES) != (scales == "none"),
    ),
    Forbidden("only fp8 pages are passed as bytes", ("storage", "format"), lambda s, f: s == "bytes" and f not in FP8_NAMES),
    Forbidden(
        "a layout that splits an axis requires a multiple of 16 bytes along it",
        ("layout", "format", "head_dim", "page_size"),
        lambda *given: not _fits(*given),
    ),
    Forbidden(
        "keys are transformed if they are quantised, and their dim is a power of two",
        ("keys", "format", "head_dim"),
        lambda keys, format, head_dim: (
            keys == "hadamard" and (format in ELEMENT_BYTES or _dims(head_dim)[0] & (_dims(head_dim)[0] - 1) > 0)
        ),
    ),
    *(
        Forbidden(
            f"{name} belongs to a rotation",
            ("keys", name),
            lambda keys, value, plain=plain: keys in ("plain", "hadamard") and value != plain,
        )
        for name, plain in (("norm", "none"), ("queries", "yes"), ("positions", "own"))
    ),
    Forbidden(
        "sequences without a context of one page share none",
        ("table", "lengths", "page_size", "empty"),
        lambda table, lengths, page_size, empty: table == "shared" and not shares(lengths, int(page_size), empty),
    ),
    Forbidden(
        "page ids above 65536 with large pages take too much memory",
        ("table", "page_size", "kv_heads"),
        lambda table, page_size, kv_heads: table == "high" and (int(page_size) > 16 or int(kv_heads) > 2),
    ),
    Forbidden(
        "gaps between 65536 pages take too long to fill",
        ("table", "storage"),
        lambda table, storage: table == "high" and storage == "padded",
    ),
)
"""Combinations that are meaningless or too expensive: no case has them."""

SPACE = Space({name: tuple(values) for name, values in PARAMETERS.items()}, FORBIDDEN)


def case_of(name: str, row: Row) -> Case:
    """The case with these parameter values."""
    given: dict[str, Any] = {}
    for parameter, value in row.items():
        given |= PARAMETERS[parameter][value]
    sequences = lengths_of(row["lengths"], given["page_size"], row["empty"])
    given |= {"q_lens": tuple(q for q, _ in sequences), "kv_lens": tuple(kv for _, kv in sequences)}
    return Case(name, operation="write", seed=zlib.crc32(name.encode()) % 1000, **given)


def generate() -> None:
    """Writes write_pairs.txt and write_triples.txt after a change of `PARAMETERS`, in a minute:
    `python -m quire.conformance.cases.write_parameters`."""
    pairs = covering_array(SPACE, 2, attempts=8)
    for strength, rows in ((2, pairs), (3, covering_array(SPACE, 3, given=pairs, attempts=1))):
        lines = [str(case_of(f"write-{WORDS[strength]}-{n:03}", row)) for n, row in enumerate(rows)]
        Path(__file__).with_name(f"write_{WORDS[strength]}s.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    generate()
