"""What Quire's GPU kernels reach, as data: fitted to times measured on an H200, or derived from measured ratios.

The times are those of docs/performance.md and docs/experiments.md: one call of `quire.attend` between two events, L2 cache cold.
`tests/plan/test_fit.py` repeats the fit and names the rows it uses; `tests/plan/test_measured.py` compares the model with all rows.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.cache.format import FORMATS, OCP_FP8
from quire.plan.counts import LayerShape
from quire.plan.models import ALIBI, CAPPED, SINKS


class Rates(NamedTuple):
    """The parameters of the time model that do not depend on the kernel of long queries."""

    read: float
    """The part of the published memory bandwidth that a decode reaches."""
    latency: float
    """Seconds of a call that no other work hides: launches, lengths and first pages, the last tile, `combine`."""
    unit_start: float
    """Seconds to start one key head of one sequence in a program."""
    convert: float
    """Elements of an 8-bit cache that one multiprocessor converts in a second, with 16-bit queries."""
    convert_fp8_queries: float
    """The same with 8-bit queries."""
    mixed_read: float
    """Bytes per second that one multiprocessor reads for short queries beside long ones."""
    write_latency: float
    """Seconds of a call of `quire.write` beside the bytes it moves."""
    short_flops: float
    """The part of the published FLOP/s of the products of short queries, over tiles of at least 16 query rows."""


FITTED = Rates(
    read=0.932,
    latency=14.7e-6,
    unit_start=1.05e-6,
    convert=27.7e9,
    convert_fp8_queries=29.7e9,
    mixed_read=29.1e9,
    write_latency=4.89e-6,
    short_flops=0.327,
)


class LongRates(NamedTuple):
    """The parameters of a kernel for long queries: tiles of queries over tiles of keys."""

    rows: int
    """Query rows of a tile."""
    keys: int
    """Keys of a tile."""
    flops: float
    """The part of the published 16-bit FLOP/s that the loop over key tiles reaches."""
    tile_start: float
    """Seconds to start and finish a tile of queries."""


LONG_KERNELS: dict[str, LongRates] = {
    "gluon-mixed": LongRates(128, 128, 0.694, 6.60e-6),
    "gluon-mixed-bytes": LongRates(128, 128, 0.495, 6.60e-6),
    "triton-mixed": LongRates(128, 64, 0.474, 6.60e-6),
    "triton-mixed, 8-bit queries": LongRates(128, 64, 0.378, 6.60e-6),
}
"""By kernel of the catalogue. Only the first has enough rows to fit both; the start of a tile is assumed to be the same for all."""


PREFILL_HEADS = {64: 0.703, 80: 0.777, 96: 0.874, 256: 1.117}
"""The part of the speed of head_dim 128 that a prefill reaches, by head_dim; one row each. Measured with `gluon-mixed`, and assumed
for the kernels without rows of their own."""
PREFILL_HEADS_OF_BYTES = {**PREFILL_HEADS, 64: 0.852, 256: 1.05}
"""The same of `gluon-mixed-bytes`, where converting takes a part of the time."""
PREFILL_CAPPED = 0.564
"""The same for logits that are capped, at head_dim 128."""
DECODE_HEADS = {256: 0.89 / 0.98}
"""The part of the bandwidth of head_dim 128 that a decode reaches, from ratios to FlashAttention-3 in one run."""


def prefill_factor(kernel: str, layer: LayerShape) -> float:
    """The part of a plain prefill's speed. The larger loss counts: losses were measured one at a time."""
    heads = PREFILL_HEADS_OF_BYTES if kernel == "gluon-mixed-bytes" else PREFILL_HEADS
    of_head = heads.get(layer.head_dim, 1.0)
    return min(of_head, PREFILL_CAPPED) if CAPPED in layer.features else of_head


def decode_factor(layer: LayerShape) -> float:
    """The part of a plain decode's bandwidth."""
    return DECODE_HEADS.get(layer.head_dim, 1.0)


def long_rates(kernel: str, layer: LayerShape) -> LongRates:
    """The parameters of the kernel that computes long queries of a layer."""
    if kernel == "triton-mixed" and FORMATS[layer.q_format].itemsize == 1:
        kernel = "triton-mixed, 8-bit queries"
    rates = LONG_KERNELS[kernel]
    return rates._replace(flops=rates.flops * prefill_factor(kernel, layer))


def unmeasured(layer: LayerShape, decodes: bool) -> list[str]:
    """What the model assumes about a layer, in words."""
    found = []
    if decodes and layer.head_dim in DECODE_HEADS:
        found.append(f"decode with head_dim {layer.head_dim}: derived from a ratio to FlashAttention-3, not from a time")
    if layer.head_dim not in (128, *PREFILL_HEADS):
        found.append(f"head_dim {layer.head_dim} was not measured; the rates of head_dim 128 are assumed")
    if SINKS in layer.features and decodes:
        found.append("decode with sinks was not measured; they are assumed to cost nothing")
    if ALIBI in layer.features:
        found.append("ALiBi was not measured; it is assumed to cost nothing")
    if FORMATS[layer.kv_format].itemsize == 1 and layer.kv_format != OCP_FP8.name:
        found.append(f"{layer.kv_format} caches were not measured on a GPU; the rates of {OCP_FP8} are assumed")
    return found
