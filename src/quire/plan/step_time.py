"""The time of one layer's attention on one GPU: a model of how the kernels divide their work."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from quire.cache.format import FORMATS
from quire.dispatch.choose import choose
from quire.errors import ArgumentError
from quire.plan.counts import WHOLE, LayerShape, PageShard, count
from quire.plan.kernel_rates import FITTED, LONG_KERNELS, LongRates, Rates, decode_factor, long_rates
from quire.plan.machines import Machine
from quire.platform import Platform
from quire.problem import Extent, Problem

SHORT = 16
"""A sequence with at most so many new tokens is computed as a decode: its keys are divided among programs."""
MOST_SCHEDULED = 4096
"""Tiles of queries that are scheduled one by one; of more, the last one counts half."""
_PLANNED = ("triton-decode", *(name for name in LONG_KERNELS if "," not in name))
"""The kernels whose times are modelled."""
_PRODUCT_ROWS = 16
"""The fewest query rows of a matrix product."""


HBM, FLOPS, CONVERSION, LATENCY = "HBM bytes", "tensor-core FLOPs", "8-bit conversion", "latency"
"""The resources of one GPU."""


class LayerTime(NamedTuple):
    """Seconds of one call: `latency`, and work that is limited by one resource."""

    seconds: float
    latency: float
    limit: str
    """The resource that the work needs for the longest time: HBM, FLOPS or CONVERSION."""
    kernel: str

    @property
    def work(self) -> float:
        return self.seconds - self.latency


class _Short(NamedTuple):
    """Seconds that sequences with few new tokens need to read, to multiply, and to convert 8-bit elements."""

    read: float = 0.0
    product: float = 0.0
    convert: float = 0.0

    @property
    def longest(self) -> float:
        return max(self)


def layer_time(
    layer: LayerShape,
    sequences: Iterable[tuple[int, int]],
    machine: Machine,
    shard: PageShard = WHOLE,
    rates: Rates = FITTED,
    long_kernel: LongRates | None = None,
) -> LayerTime:
    """The time of `quire.attend` for a batch. `long_kernel` replaces the parameters of the kernel that the dispatcher chooses."""
    batch = Counter({one: times for one, times in Counter(sequences).items() if one[0]})
    if not batch:
        return LayerTime(0.0, 0.0, HBM, "none")
    kernel = kernel_of(layer, max(new for new, _ in batch), max(sum(one) for one in batch), machine)
    few, many = (Counter({one: n for one, n in batch.items() if (one[0] <= SHORT) is short}) for short in (True, False))
    short = _short_times(layer, few, shard, machine, rates)
    needs = {HBM: short.read, FLOPS: short.product, CONVERSION: short.convert}
    work = short.longest
    if many:
        tiles = _tile_seconds(layer, many, machine, shard, long_kernel or long_rates(kernel, layer))
        streamed = count(layer, many, shard).bytes / (rates.read * machine.bandwidth)
        needs[HBM] += streamed
        needs[FLOPS] += sum(seconds * times for seconds, times in tiles.items()) / machine.multiprocessors
        late = machine.multiprocessors // 2 if few else 0
        if few:  # short sequences have half of the multiprocessors, which continue with tiles of queries
            slower = max(1.0, rates.read * machine.bandwidth / (late * rates.mixed_read))
            work = max(short.read * slower, 2 * short.product, 2 * short.convert)
        work = max(_scheduled(tiles, machine.multiprocessors, late, work), streamed, work)
    return LayerTime(rates.latency + work, rates.latency, max(needs, key=needs.__getitem__), kernel)


def write_time(layer: LayerShape, tokens: int, machine: Machine, rates: Rates = FITTED) -> float:
    """The time of `quire.write` for so many new tokens: reads 16-bit K and V, stores them in the cache."""
    return rates.write_latency + write_bytes(layer, tokens) / (rates.read * machine.bandwidth) if tokens else 0.0


def write_bytes(layer: LayerShape, tokens: int) -> int:
    """Bytes that `quire.write` moves for so many new tokens."""
    read = 2 * layer.kv_heads * layer.head_dim * max(2, FORMATS[layer.q_format].itemsize)
    return tokens * (read + layer.key_bytes)


@lru_cache(maxsize=4096)
def kernel_of(layer: LayerShape, max_q_len: int, max_kv_len: int, machine: Machine) -> str:
    """The kernel that the dispatcher chooses for a layer on a machine."""
    quantised = FORMATS[layer.kv_format].quantised
    features: dict[str, Any] = dict.fromkeys(layer.features, True)
    side = None if layer.window is None else layer.window - 1
    problem = Problem(
        q_heads=layer.q_heads,
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        page_size=layer.page_size,
        q_dtype=layer.q_format,
        out_dtype=layer.q_format if FORMATS[layer.q_format].itemsize > 1 else "bf16",
        format=layer.kv_format,
        scales="tensor" if quantised else "none",
        window=(side, side),
        device="cuda",
        **features,
    )
    # So many tokens that the kernel is not that of few rows, whose times are not modelled.
    decision = choose(
        problem, Extent(1, max(max_q_len, MOST_SCHEDULED * SHORT), max_q_len, max_kv_len), Platform.named(machine.platform)
    )
    if decision.chosen is None or decision.chosen.name not in _PLANNED:
        able = [candidate for candidate in decision.candidates if candidate.kernel.name in _PLANNED]
        nearest = min(able, key=lambda candidate: len(candidate.refusals))
        broken = [one for one in nearest.refusals if one.rule != "v_head_dim"]  # it is the head_dim of every model here
        raise ArgumentError(
            "--model",
            ", ".join(f"{one.rule} {one.given}" for one in broken),
            ", ".join(f"{one.rule} {one.allowed}" for one in broken) + f" ({nearest.kernel.name} on {machine.name})",
        )
    return decision.chosen.name


def _short_times(layer: LayerShape, short: Counter[tuple[int, int]], shard: PageShard, machine: Machine, rates: Rates) -> _Short:
    if not short:
        return _Short()
    counts = count(layer, short, shard)
    starts = short.total() * layer.kv_heads / (2 * machine.multiprocessors) * rates.unit_start
    read = counts.bytes / (rates.read * machine.bandwidth * decode_factor(layer)) + starts
    rows = max(new for new, _ in short) * layer.group
    padded = -(-rows // _PRODUCT_ROWS) * _PRODUCT_ROWS
    elements = counts.keys * layer.kv_heads * layer.head_dim
    product = 4 * elements * padded / (rates.short_flops * machine.flops)
    if FORMATS[layer.kv_format].itemsize > 1:
        return _Short(read, product)
    each = rates.convert_fp8_queries if FORMATS[layer.q_format].itemsize == 1 else rates.convert
    return _Short(read, product, 2 * elements / (each * machine.multiprocessors) + starts)


def _tile_seconds(
    layer: LayerShape, long: Counter[tuple[int, int]], machine: Machine, shard: PageShard, rates: LongRates
) -> Counter[float]:
    """Seconds of each tile of queries on one multiprocessor, and how many tiles take as long. The rows of a tile are the query
    heads of one key head, for as many tokens as there is room for; it visits whole tiles of keys."""
    per_key_tile = rates.rows * rates.keys * 4 * layer.head_dim / (rates.flops * machine.flops / machine.multiprocessors)
    tokens = max(1, rates.rows // layer.group)
    tiles_of_token = layer.kv_heads * -(-layer.group // rates.rows)
    found: Counter[float] = Counter()
    for (new, context), times in long.items():
        first = np.arange(0, new, tokens, dtype=np.int64)
        end = context + np.minimum(first + tokens, new)
        begin = np.zeros_like(first) if layer.window is None else np.maximum(context + first + 1 - layer.window, 0)
        keys = end - begin // rates.keys * rates.keys
        visited = np.maximum(-(-keys // (rates.keys * shard.ranks)), 1)
        for tiles, tile_count in zip(*np.unique(visited, return_counts=True)):
            found[float(tiles) * per_key_tile + rates.tile_start] += int(tile_count) * times * tiles_of_token
    return found


def _scheduled(tiles: Counter[float], multiprocessors: int, late: int, start: float) -> float:
    """When the last tile ends: the longest tiles first, each on the next idle multiprocessor; `late` of them are idle only from
    `start` on."""
    total = sum(seconds * times for seconds, times in tiles.items())
    if tiles.total() > MOST_SCHEDULED:
        even = (total + late * start) / multiprocessors
        if even < start:  # the others finish before `start`
            even = total / (multiprocessors - late)
        return even + max(tiles) / 2
    idle = [0.0] * (multiprocessors - late) + [start] * late
    heapq.heapify(idle)
    last = 0.0
    for seconds in sorted(tiles.elements(), reverse=True):
        end = idle[0] + seconds
        heapq.heapreplace(idle, end)
        last = max(last, end)
    return last
