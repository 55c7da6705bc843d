"""The features of a workload as tensors: page tables with shared prefixes, masks, spans, selections and softmax options."""

from __future__ import annotations

import math
from typing import Any

import torch

from quire.batch import Batch
from quire.bench.workloads import Workload
from quire.cache.prefixes import Prefixes
from quire.cache.select import Select
from quire.options import NUMBERS, Options


def page_table(w: Workload) -> tuple[torch.Tensor, int]:
    """The page table of a workload on the host, its pages in random order, and how many pages there are. Sequences that share
    prefixes share pages."""
    used = [-(-(new + context) // w.page_size) for new, context in w.sequences]
    shared = sum(count for _, count in _columns(w))
    groups = [-(-len(used) // size) for size, _ in w.prefixes]
    pages = sum(n - shared for n in used) + sum(n * count for n, (_, count) in zip(groups, _columns(w)))
    shuffle = torch.Generator().manual_seed(0)
    ids = torch.randperm(pages, generator=shuffle, device="cpu").int()
    # Peers read past the end of a table's row without a mask: its width is rounded up, and its padding is the id of a page.
    table = torch.zeros(len(used), -(-max(used) // 8) * 8, dtype=torch.int32, device="cpu")
    column = 0
    for size, count in _columns(w):
        for first in range(0, len(used), size):
            table[first : first + size, column : column + count], ids = ids[:count], ids[count:]
        column += count
    for row, n in zip(table, used):
        row[column:n], ids = ids[: n - column], ids[n - column :]
    return table, pages


def _columns(w: Workload) -> list[tuple[int, int]]:
    """The prefixes of a workload, their lengths in pages."""
    return [(size, keys // w.page_size) for size, keys in w.prefixes]


def prefixes(w: Workload, device: torch.device) -> Prefixes | None:
    """Which sequences have the same pages."""
    if not w.prefixes:
        return None
    found, begin, seqs = [], 0, len(w.sequences)
    for size, count in _columns(w):
        for first in range(0, seqs, size):
            found.append((tuple(range(first, min(first + size, seqs))), begin, begin + count))
        begin += count
    return Prefixes(found, seqs, device)


def options(w: Workload, device: torch.device) -> Options:
    """The options of the layer. Numbers, slopes and sinks are such that they change the result."""
    n = w.q_heads
    longest = max(map(sum, w.sequences))
    slopes = 2.0 ** (-8 * torch.arange(1, n + 1, device=device) / n)
    # About the LSE of the other logits; in bf16, as models store them and FlashAttention-3 takes them.
    sinks = (math.log(min(w.window or longest, longest)) + torch.linspace(-1, 1, n, device=device)).bfloat16()
    values = dict.fromkeys(NUMBERS, 2.0) | {"alibi": slopes, "sinks": sinks}
    causal = torch.arange(len(w.sequences), device=device) % 2 == 0
    given: dict[str, Any] = {name: values[name] for name in w.options}
    return Options(
        **given,
        window=None if w.image else w.window,
        scale=w.scale,
        causal=causal if w.part_causal else True,
        mask=tree_mask(w).to(device) if w.tree else None,
        batch_invariant=w.batch_invariant,
    )


def tree_mask(w: Workload) -> torch.Tensor:
    """bool `[tokens, M]`: each new token sees itself and the nodes above it in the tree of its sequence."""
    most = max(new for new, _ in w.sequences)
    mask = torch.zeros(most, most, dtype=torch.bool, device="cpu")
    for node in range(most):
        above = (node - 1) // 2
        mask[node] = mask[above] if node else False
        mask[node, node] = True
    return torch.cat([mask[:new] for new, _ in w.sequences])


def spans(w: Workload) -> torch.Tensor | None:
    """int32 `[tokens, 2]`: the keys that each new token of a workload with images sees."""
    if not w.image:
        return None
    return torch.tensor([span for new, context in w.sequences for span in w.spans(new, context)], dtype=torch.int32, device="cpu")


def select(w: Workload, device: torch.device) -> Select | None:
    """Random keys that each query sees, or random pages that each sequence sees, the last page among them; in order."""
    if not w.select:
        return None
    draw = torch.Generator().manual_seed(3)

    def some(count: int, among: int) -> torch.Tensor:
        return torch.randperm(among, generator=draw, device="cpu")[:count].sort()[0]

    rows = []
    for new, context in w.sequences:
        if w.select == "positions":
            rows += [some(w.selected, context + 1) for _ in range(new)]
        else:
            last = (new + context - 1) // w.page_size
            rows.append(torch.cat((some(w.selected - 1, last), torch.tensor([last], device="cpu"))))
    entries = torch.stack(rows)[:, None].int().to(device)
    return Select(positions=entries) if w.select == "positions" else Select(columns=entries)


def visible(w: Workload, batch: Batch, mask: torch.Tensor | None, seq: int) -> torch.Tensor:
    """Which keys of a sequence each of its new tokens sees, bool `[new, new + context]`, on the device of the batch: causality,
    window, a tree mask, spans, and whether the sequence is causal."""
    new, context = w.sequences[seq]
    first = sum(count for count, _ in w.sequences[:seq])
    keys = torch.arange(new + context, device=batch.device)
    at = torch.arange(context, new + context, device=batch.device)[:, None]
    if batch.spans is not None:
        begin, end = batch.spans[first : first + new].T[:, :, None]
        return (begin <= keys) & (keys < end)
    if mask is not None:
        seen = torch.ones(new, new + context, dtype=torch.bool, device=batch.device)
        seen[:, context:] = mask[first : first + new, :new]
        return seen
    if w.part_causal and seq % 2:
        return torch.ones(new, new + context, dtype=torch.bool, device=batch.device)
    return (keys <= at) & (at - keys < (w.window or new + context))
