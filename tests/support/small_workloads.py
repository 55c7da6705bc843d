"""The workloads of the benchmark at sizes that a CPU computes at once: the same kinds of sequences, heads and features."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from quire.bench.case import BenchCase, build
from quire.bench.reference_check import BenchReference
from quire.bench.workloads import Workload


def small(w: Workload) -> Workload:
    """A workload with fewer, shorter sequences and fewer heads; groups, sizes of heads and pages, and features are kept."""
    kv_heads = min(w.kv_heads, 2)
    group = min(w.q_heads // w.kv_heads, 16)
    changes = {"q_heads": kv_heads * group, "kv_heads": kv_heads}
    if w.window is not None:
        changes["window"] = 24
    if w.prefixes:
        most = len(w.sequences)
        sizes = [8 if size == most else 4 if most == 64 and size == 16 else 2 for size, _ in w.prefixes]
        levels = tuple((size, 4 * w.page_size) for size in sizes)
        keys = sum(count for _, count in levels) + 20
        return replace(w, **changes, sequences=((1, keys - 1),) * 8, prefixes=levels)
    if w.image:
        return replace(w, **changes, image=8, sequences=((40, 0), (33, 16)))
    if w.select:
        keys = 12 * w.page_size
        return replace(w, **changes, selected=6, sequences=((1, keys - 1), (1, keys - 4), (1, 7 * w.page_size)))
    kinds = [*list(dict.fromkeys(w.sequences))[:2], w.sequences[-1]]
    sequences = tuple((min(new, 41 - i), min(context, 60 + 7 * i)) for i, (new, context) in enumerate(kinds))
    return replace(w, **changes, sequences=sequences)


@cache
def small_reference(w: Workload) -> tuple[BenchCase, BenchReference]:
    """The tensors of a small workload of attention, and what its result is compared with. Tests share them and change neither."""
    case = build(small(w))
    return case, BenchReference(case)
