"""A workload's tensors: what every implementation is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.batch import Batch
from quire.bench import features
from quire.bench.workloads import Workload
from quire.cache.format import FORMATS, Format
from quire.cache.groups import joined
from quire.cache.hadamard import hadamard
from quire.cache.kv_cache import KVCache
from quire.cache.layout import LAYOUTS
from quire.options import Options
from quire.rope import Rope

# Powers of two, so that a stored element times its scale is exact in 16 bits and the forms agree. Values are stored as they are:
# FlashInfer would multiply its output in a kernel of its own otherwise.
K_SCALE, V_SCALE, Q_SCALE = 0.5, 1.0, 0.5


@dataclass(frozen=True)
class BenchCase:
    """The cache holds every token, in layout nhd. `k` and `v` are the new tokens, as the cache gives them back; a write starts from
    an empty cache. `rope` is how a write rotates `q` and `k`."""

    workload: Workload
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: KVCache
    batch: Batch
    options: Options
    rope: Rope | None = None

    def query(self, format: str) -> torch.Tensor:
        """The queries, quantised (`x / Q_SCALE`) if `format` is not their own."""
        if format == self.workload.dtype:
            return self.q
        return FORMATS[format].encode(self.q.float() / Q_SCALE)

    def out(self) -> torch.Tensor:
        """Memory for an output, filled with NaN."""
        return self.q.new_full((*self.q.shape[:2], self.workload.value_dim), torch.nan)

    def page_lists(self) -> list[torch.Tensor]:
        """The pages of each sequence, in order."""
        used = [-(-(new + context) // self.cache.page_size) for new, context in self.workload.sequences]
        return [row[:count] for row, count in zip(self.batch.page_table, used)]

    def keys_and_values(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of some pages, [tokens, kv_heads, head_dim], as numbers: fp32 if the cache is quantised. Keys are as they are
        stored: transformed, if those of the cache are."""
        return _numbers(self.cache, lambda x: x[pages.long()].flatten(0, 1))


def _numbers(cache: KVCache, chosen: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of the tokens that `chosen` takes from `[pages, page_size, ...]`, their scales applied."""
    k = chosen(cache.k_bytes).view(cache.k.dtype) if cache.k_groups is None else _grouped(cache.k_view, cache.k_groups, chosen)
    v = chosen(cache.v_bytes).view(cache.v.dtype) if cache.v_groups is None else _grouped(cache.v_view, cache.v_groups, chosen)
    numbers = []
    for x, format, scale in ((k, cache.k_format, cache.k_scale), (v, cache.v_format, cache.v_scale)):
        x = format.unpack(x) if format.latent or format.pack > 1 or format.group else x
        if scale is not None:
            x = format.scaled_in_place(x.float(), chosen(scale).unsqueeze(-1) if scale.dim() == 3 else scale)
        numbers.append(x.float() if cache.quantised else x)
    return numbers[0], numbers[1]


def _grouped(view: torch.Tensor, groups: torch.Tensor, chosen: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The codes and scales of chosen tokens of a format with scales of groups."""
    return chosen(torch.cat([part.flatten(4).flatten(2, 3).transpose(1, 2) for part in (view, groups)], -1))


def build(workload: Workload, device: torch.device | str = "cpu", folder: str | None = None) -> BenchCase:
    """The tensors of a workload, the same in every process. With a folder, K and V are files in it that all processes map: then the
    implementations read the same physical memory."""
    w, device = workload, torch.device(device)
    values = torch.Generator(device).manual_seed(1)
    formats, dtype = w.formats, FORMATS[w.dtype].dtype
    table, pages = features.page_table(w)
    batch = _batch(w, table, device)
    slots = batch.slots_of_tokens(w.tokens, w.page_size)
    shapes = [(pages, w.page_size, w.kv_heads, dim) for dim in ((w.head_dim,) if w.latent else (w.head_dim, w.value_dim))]
    scales: list[Any] = [scale if format.scaled else None for scale, format in zip(_scales(w), formats)]
    if w.operation == "write":
        batch.given_slots = slots
        stored = [
            torch.zeros((*shape[:3], format.units_of(shape[3])), dtype=format.dtype, device=device)
            for shape, format in zip(shapes, formats)
        ]
    else:
        files = [None if folder is None else Path(folder, name) for name in "kv"]
        stored = []
        for i, (shape, format, file) in enumerate(zip(shapes, formats, files)):
            # Random keys stand for transformed ones, too: their transform is as random.
            part = _pages(shape, torch.float32 if format.quantised else dtype, values, file)
            if format.quantised:
                part, scales[i] = _quantised(part, format, w.scales, scales[i])
            stored.append(part)
    if w.latent:
        cache = KVCache.wrap(stored[0], layout="nhd", format=w.cache_format, k_scale=scales[0], v_in_k=w.v_dim)
    else:
        k_format, v_format = (format.name for format in formats)
        how = {"k_scale": scales[0], "v_scale": scales[1], "hadamard": w.hadamard}
        cache = KVCache.wrap(*stored, layout="nhd", k_format=k_format, v_format=v_format, **how)
    if w.operation == "write":
        # One tensor of both, so that they can be copied as one.
        k, v = torch.randn(2, w.tokens, w.kv_heads, w.head_dim, dtype=dtype, device=device, generator=values).unbind()
    else:
        k, v = _numbers(cache, lambda x: x.flatten(0, 1)[slots])
        k, v = (hadamard(k) if w.hadamard else k).to(dtype), v.to(dtype)
    q = torch.randn(w.tokens, w.q_heads, w.head_dim, generator=values, device=device).to(dtype)
    rope = Rope.make(w.head_dim, max_positions=max(map(sum, w.sequences)), device=device) if w.rope else None
    return BenchCase(w, q, k, v, cache, batch, features.options(w, device), rope)


def _batch(w: Workload, table: torch.Tensor, device: torch.device) -> Batch:
    """The sequences of a workload, on a device."""
    lens = [new + context for new, context in w.sequences]
    starts = torch.tensor([0, *(new for new, _ in w.sequences)], device="cpu").cumsum(0).int()
    spans, select = features.spans(w), features.select(w, device)
    return Batch(
        table.to(device),
        torch.tensor(lens, device="cpu").int().to(device),
        starts.to(device),
        max_q_len=max(new for new, _ in w.sequences),
        max_kv_len=max(lens),
        spans=None if spans is None else spans.to(device),
        select=select,
        prefixes=features.prefixes(w, device),
    )


def _scales(w: Workload) -> tuple[float, float]:
    """The scales of K and of V. A fused write of FlashInfer has one for both."""
    return K_SCALE, K_SCALE if w.rope else V_SCALE


def _quantised(x: torch.Tensor, format: Format, kind: str, scale: Any) -> tuple[torch.Tensor, Any]:
    """K or V in a format, and its scales: one for the tensor, which is given, or those of its tokens."""
    assert format.largest is not None
    if format.latent:
        return format.encode(x), None
    scale = scale if kind == "tensor" else format.token_scale(x)
    stored = format.quantise(x, scale if kind == "tensor" else scale.unsqueeze(-1))
    return joined(stored, format, LAYOUTS["nhd"].k) if format.group else stored, scale


def _pages(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator, file: Path | None) -> torch.Tensor:
    """Random pages. On the host they are fifths of small integers, which are generated ten times as fast as normal numbers."""
    if g.device.type != "cpu":
        return torch.randn(shape, generator=g, device=g.device, dtype=dtype)
    pages = torch.randint(-8, 9, shape, generator=g, dtype=torch.int16, device="cpu")
    if file is None:
        return pages.to(dtype).div_(5)
    made = file.exists()
    mapped = torch.from_file(str(file), shared=True, size=pages.numel(), dtype=dtype).view(shape)
    return mapped if made else mapped.copy_(pages).div_(5)
