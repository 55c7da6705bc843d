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
    """Bytes per second that one multiprocessor reads for short queries beside long ones: two programs of 27 GB/s
    (docs/experiments.md)."""
    write_latency: float
    """Seconds of a call of `quire.write` beside the bytes it moves."""
    short_flops: float
    """The part of the published FLOP/s of the products of short queries, over tiles of at least 16 query rows: that of the kernel
    `triton-mixed`, because no measured decode is limited by its products."""


FITTED = Rates(
    read=0.924,
    latency=12.7e-6,
    unit_start=1.05e-6,
    convert=27.3e9,
    convert_fp8_queries=29.3e9,
    mixed_read=54e9,
    write_latency=4.77e-6,
    short_flops=0.465,
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
    "gluon-mixed": LongRates(128, 128, 0.632, 4.72e-6),
    "gluon-mixed-bytes": LongRates(128, 128, 0.429, 4.72e-6),
    "triton-mixed": LongRates(128, 64, 0.465, 4.72e-6),
    "triton-mixed, 8-bit queries": LongRates(128, 64, 0.3725, 4.72e-6),
}
"""By kernel of the catalogue. Only the first has two rows to fit; the start of a tile is assumed to be the same for all."""


class Derived(NamedTuple):
    """A loss that was measured only as a ratio to FlashAttention-3, on rows whose sizes were not recorded."""

    ratio: float
    """FlashAttention-3's time over Quire's."""
    what: str


OF_PLAIN_PREFILL, OF_PLAIN_DECODE = 0.90, 0.98
"""The same ratio of the plain rows (bf16, head_dim 128), in the same run: prefill, decode."""
PREFILL_HEADS = {64: Derived(0.79, "head_dim 64"), 96: Derived(0.73, "head_dim 96"), 256: Derived(0.25, "head_dim 256")}
DECODE_HEADS = {256: Derived(0.89, "head_dim 256")}
PREFILL_CAPPED = Derived(0.24, CAPPED)
PREFILL_SMALL_PAGES = Derived(0.74, "pages of 1")


def prefill_losses(layer: LayerShape) -> list[Derived]:
    """The losses of a prefill that the rows of the fit do not have."""
    found = [PREFILL_HEADS[dim] for dim in PREFILL_HEADS if dim == layer.head_dim]
    found += [PREFILL_CAPPED] if CAPPED in layer.features else []
    return found + ([PREFILL_SMALL_PAGES] if layer.page_size == 1 else [])


def prefill_factor(layer: LayerShape) -> float:
    """The part of a plain prefill's speed. The largest loss counts: losses were measured one at a time."""
    return min([1.0, *(loss.ratio / OF_PLAIN_PREFILL for loss in prefill_losses(layer))])


def decode_factor(layer: LayerShape) -> float:
    """The part of a plain decode's bandwidth."""
    loss = DECODE_HEADS.get(layer.head_dim)
    return loss.ratio / OF_PLAIN_DECODE if loss else 1.0


def long_rates(kernel: str, layer: LayerShape) -> LongRates:
    """The parameters of the kernel that computes long queries of a layer."""
    if kernel == "triton-mixed" and FORMATS[layer.q_format].itemsize == 1:
        kernel = "triton-mixed, 8-bit queries"
    rates = LONG_KERNELS[kernel]
    return rates._replace(flops=rates.flops * prefill_factor(layer))


def unmeasured(layer: LayerShape, decodes: bool, prefills: bool) -> list[str]:
    """What the model assumes about a layer, in words."""
    found = []
    if prefills:
        for loss in prefill_losses(layer):
            found.append(
                f"prefill with {loss.what}: its speed is derived from a ratio to FlashAttention-3 ({loss.ratio:g}, plain prefill "
                f"{OF_PLAIN_PREFILL:g}), not from a time; FlashAttention-3 is assumed to be as fast as without it"
            )
    if decodes and layer.head_dim in DECODE_HEADS:
        found.append(f"decode with head_dim {layer.head_dim}: derived from a ratio to FlashAttention-3, not from a time")
    if layer.head_dim not in (64, 96, 128, 256):
        found.append(f"head_dim {layer.head_dim} was not measured; the rates of head_dim 128 are assumed")
    for feature, words in ((SINKS, "sinks were"), (ALIBI, "ALiBi was")):
        if feature in layer.features:
            found.append(f"{words} not measured; {'they are' if feature == SINKS else 'it is'} assumed to cost nothing")
    if FORMATS[layer.kv_format].itemsize == 1 and layer.kv_format != OCP_FP8.name:
        found.append(f"{layer.kv_format} caches were not measured on a GPU; the rates of {OCP_FP8} are assumed")
    return found
