"""Random legal calls with a known answer, from a seed: every layout, format, scale, mask, form, stride and index type.

Answers come from `support.oracle`. Whatever nobody may read holds NaN, or a page id that does not exist.
"""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import quire
from support import oracle

TYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int4": torch.uint8,
}
FLOATS = ("fp32", "fp16", "bf16")
FP8 = ("e4m3fn", "e4m3fnuz", "e5m2")
UNIT = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""The relative error of one rounding."""
LEAST = {"fp32": 2.0**-126, "fp16": 2.0**-14, "bf16": 2.0**-126}
"""The smallest normal number: below it a rounding has an absolute error, and some hardware makes it 0."""
NAN = {"e4m3fn": 0x7F, "e4m3fnuz": 0x80, "e5m2": 0x7F, "int8": 0x80, "int4": 0x88}
GUARD = 40.0
"""What stands in padding rows of an output, and must stay there."""


def numbers(tensor: torch.Tensor) -> oracle.Array:
    """A tensor in float64; fp8 by the oracle's tables."""
    for name in FP8:
        if tensor.dtype is TYPES[name]:
            return oracle.decode(tensor.contiguous().view(torch.uint8).numpy(), name)
    return tensor.double().numpy()


def strided(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The same values in memory of another arrangement, in half of the cases."""
    if rng.random() < 0.5 or not tensor.numel():
        return tensor
    order = list(range(tensor.dim()))
    if rng.random() < 0.4:
        rng.shuffle(order)
    sizes = [tensor.shape[axis] + rng.choice([0, 1, 3]) for axis in order]
    raw = tensor.dtype if tensor.dtype.itemsize > 1 else torch.uint8
    room = torch.zeros(sizes, dtype=raw).permute([order.index(axis) for axis in range(tensor.dim())])
    for axis, size in enumerate(tensor.shape):
        room = room.narrow(axis, rng.randint(0, room.shape[axis] - size), size)
    room.copy_(tensor.view(raw))
    return room.view(tensor.dtype)


@dataclass
class RandomCall:
    """A call and its answer. `expected`, `allowed` are `[tokens, q_heads, v_head_dim]`; those of the LSE `[tokens, q_heads]`."""

    seed: int
    told: dict[str, Any]
    q: torch.Tensor
    cache: quire.KVCache
    batch: quire.Batch
    options: quire.Options
    new: tuple[torch.Tensor, torch.Tensor] | None
    out: torch.Tensor | None
    out_format: str
    out_scale: float
    lse: bool
    live: int
    answer: oracle.Answer
    allowed: oracle.Array
    allowed_lse: oracle.Array
    needed: list[tuple[int, int]]
    """Page and offset of each slot that the ledger's check must ask for."""

    def on(self, device: str) -> RandomCall:
        """The same call on a device, strides and offsets included."""
        known: dict[int, torch.Tensor] = {}

        def move(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            storage = value.untyped_storage()
            if storage.data_ptr() not in known:
                known[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).to(device)  # type: ignore[call-overload]
            there = known[storage.data_ptr()].untyped_storage()
            empty = torch.empty(0, dtype=value.dtype, device=device)
            return empty.set_(there, value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]

        c, b = self.cache, self.batch
        tensors = {"k_scale": move(c.k_scale), "v_scale": move(c.v_scale)}
        tensors |= {"k_format": c.k_format.name, "v_format": c.v_format.name}
        joint = c.layout.name == "vllm_joint"
        storage = (self._joint(move),) if joint else (move(c.k), move(c.v))
        cache = quire.KVCache.wrap(*storage, layout=c.layout.name, head_dim=c.head_dim if joint else None, ledger=True, **tensors)
        hints = {"max_q_len": b.max_q_len, "max_kv_len": b.max_kv_len}
        batch = quire.Batch(*map(move, (b.page_table, b.kv_lens, b.q_starts)), **hints, spans=move(b.spans))
        options = quire.Options(**{f.name: move(getattr(self.options, f.name)) for f in dataclasses.fields(self.options)})
        new = None if self.new is None else (move(self.new[0]), move(self.new[1]))
        return dataclasses.replace(self, q=move(self.q), cache=cache, batch=batch, options=options, new=new, out=move(self.out))

    def _joint(self, move: Any) -> torch.Tensor:
        """The one tensor that holds keys and values side by side, from the view of its keys."""
        k = self.cache.k
        shape = (*k.shape[:-1], (self.cache.head_dim + self.cache.v_head_dim) // self.cache.k_format.pack)
        return move(k.as_strided(shape, k.stride(), k.storage_offset()))

    def fresh_out(self) -> torch.Tensor | None:
        """The output buffer, if one is given: a wrong number where results go, GUARD behind them."""
        if self.out is not None:
            wrong = torch.full(self.out.shape, GUARD, dtype=torch.float32)
            wrong[: self.live] = 1e4 if self.out_format not in FP8 else 96.0
            self.out.copy_(wrong.to(self.out.dtype).to(self.out.device))
        return self.out

    def wrong(self, out: torch.Tensor, lse: torch.Tensor | None) -> str | None:
        """What is wrong with a result, or None."""
        got, live = numbers(out.cpu())[: self.live], slice(0, self.live)
        want, allowed = self.answer.out[live] / self.out_scale, self.allowed[live] / self.out_scale
        if self.out_format in FP8:
            low, high = (oracle.decode(oracle.encode(want + s * allowed, self.out_format), self.out_format) for s in (-1, 1))
            bad = ~((got >= low) & (got <= high))
        else:
            bad = ~(np.abs(got - want) <= allowed)
        if bad.any():
            at = tuple(int(i[0]) for i in bad.nonzero())
            return (
                f"{int(bad.sum())} of {bad.size} outputs, first {at}: {got[at]:.9g} instead of {want[at]:.9g} +- {allowed[at]:.2g}"
            )
        behind = out[self.live :].cpu().float()
        if behind.numel() and not (behind == (0.0 if self.out is None else GUARD)).all():
            return "a padding row of the output was written" if self.out is not None else "a padding row is not 0"
        if lse is not None:
            logs, exact = lse.cpu().double().numpy()[live], self.answer.lse[live]
            with np.errstate(invalid="ignore"):
                bad = ~((logs == exact) | (np.abs(logs - exact) <= self.allowed_lse[live]))
            if bad.any():
                at = tuple(int(i[0]) for i in bad.nonzero())
                return f"{int(bad.sum())} of {bad.size} LSEs, first {at}: {logs[at]:.9g} instead of {exact[at]:.9g}"
        return None


@dataclass
class Shape:
    """The part of a call that is drawn first."""

    format: str
    v_format: str
    layout: str
    page_size: int
    x: int
    kv_heads: int
    group: int
    head_dim: int
    v_head_dim: int
    q_lens: list[int]
    kv_lens: list[int]
    causal: list[bool]
    kind: str
    """causal, none, per-sequence, tree or spans."""
    form: str
    padding: int

    @property
    def quantised(self) -> bool:
        return not {self.format, self.v_format} <= set(FLOATS)

    @property
    def starts(self) -> oracle.Array:
        return np.concatenate([[0], np.cumsum(self.q_lens)]).astype(np.int64)


def draw_shape(rng: random.Random, small: bool, spans: bool = False) -> Shape:
    format, layout = rng.choice([*FLOATS, *FP8, "int8", "int4"]), rng.choice(["nhd", "hnd", "vllm_x", "vllm_joint", "aiter"])
    page_size, kv_heads = rng.choice([1, 3, 16, 16, 32, 7, 64, 528]), rng.choice([1, 1, 2, 3, 4])
    group = rng.choice([1, 1, 2, 3, 4, 5, 7, 8]) if small or rng.random() < 0.9 else 64 // kv_heads
    widths = [8, 16, 24] if small else [8, 16, 29, 32, 64, 64, 96, 128, 128, 80, 192, 256]
    head_dim = rng.choice(widths) if rng.random() < 0.8 else rng.randint(1, 24 if small else 300)
    v_head_dim = head_dim if rng.random() < 0.5 else rng.choice(widths)
    x, v_format, pack = 1, format, 2 if format == "int4" else 1
    if layout != "vllm_joint" and rng.random() < 0.3:
        v_format = rng.choice(list(TYPES))
    if layout in ("vllm_x", "aiter"):
        x = rng.choice([16 // TYPES[format].itemsize, 8, 4, 1])
        page_size = max(x, page_size // x * x) if layout == "aiter" else page_size
    head_dim = max(x * pack, head_dim // (x * pack) * x * pack)
    v_head_dim += v_head_dim % 2 if v_format == "int4" else 0
    kind, form = rng.choice(["causal"] * 4 + ["none", "per-sequence", "tree", "tree"]), rng.choice(["full", "full", "context"])
    kind = "spans" if spans else kind
    seqs, mode = rng.choice([1, 1, 2, 3, 6]), rng.choice(["decode", "verify", "mixed", "mixed"])
    longest = {"decode": 1, "verify": 16, "mixed": 40 if small or kind == "tree" else 160}[mode]
    q_lens = [rng.choice([0, 1, 1, rng.randint(1, longest), rng.randint(1, longest)]) for _ in range(seqs)]
    context = [rng.choice([0, 1, rng.randint(0, 60), rng.randint(0, 60 if small else 500)]) for _ in range(seqs)]
    causal = [{"causal": True, "none": False, "tree": True, "spans": False}.get(kind, rng.random() < 0.5) for _ in range(seqs)]
    kv_lens = [q + c for q, c in zip(q_lens, context)]
    if form == "full":
        # Without causality a sequence may have more queries than keys, or no key.
        kv_lens = [n if sees or rng.random() < 0.6 else rng.choice([0, 1, n // 2]) for n, sees in zip(kv_lens, causal)]
    padding = rng.choice([0, 0, 1, 5])
    dims = (page_size, x, kv_heads, group, head_dim, v_head_dim)
    return Shape(format, v_format, layout, *dims, q_lens, kv_lens, causal, kind, form, padding)


def draw_window(rng: random.Random, shape: Shape) -> Any:
    longest = max([*shape.kv_lens, 2])
    side = [None, 0, 1, rng.randint(0, longest), 2**40]
    return rng.choice([None, None, None, 1, rng.randint(1, longest), (rng.choice(side), rng.choice(side))])


def draw_tree(rng: random.Random, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask of random trees, and the depths of their tokens as positions. Rows beyond the last token hold anything."""
    tokens = sum(shape.q_lens) + shape.padding
    mask = torch.rand(tokens, max([*shape.q_lens, 0]) + rng.choice([0, 3])) < 0.5
    positions = torch.full((tokens,), -5)
    for start, q_len, kv_len in zip(shape.starts, shape.q_lens, shape.kv_lens):
        tree, depth = torch.zeros(q_len, q_len, dtype=torch.bool), []
        for token in range(q_len):
            parent = rng.randint(-1, token - 1)
            if parent >= 0:
                tree[token] = tree[parent]
            tree[token, token] = True
            depth.append(kv_len - q_len + (0 if parent < 0 else depth[parent] - (kv_len - q_len) + 1))
        mask[start : start + q_len, :q_len] = tree
        positions[start : start + q_len] = torch.tensor(depth, dtype=torch.long)
    return mask, positions


def draw_spans(rng: random.Random, shape: Shape) -> oracle.Array:
    """The keys that each new token sees, `[tokens, 2]`: as with causality, a window, aligned chunks or images, or any; some
    see none. Rows beyond the last token hold anything."""
    kind, size = rng.choice(["causal", "window", "chunks", "images", "any", "any"]), rng.randint(1, 40)
    spans = []
    for q_len, kv_len in zip(shape.q_lens, shape.kv_lens):
        image = (0, 0)
        for at in range(kv_len - q_len, kv_len):
            if at >= image[1] and rng.random() < 0.3:
                image = (at, min(kv_len, at + size))
            a, b = sorted(rng.randint(0, kv_len) for _ in "ab")
            made = {
                "causal": (0, at + 1),
                "window": (at - size, at + 1),
                "chunks": (at // size * size, at + 1),
                "images": (min(image[0], at - 3), image[1]) if at < image[1] else (at - 3, at + 1),
                "any": (a, b),
            }[kind]
            made = (max(made[0], 0), max(min(made[1], kv_len), 0))
            spans.append(rng.choice([(3, 3), (9, -(10**9)), (kv_len + 50, kv_len + 7)]) if rng.random() < 0.1 else made)
    spans += [(-5, 10**9)] * shape.padding
    return np.array(spans, np.int64).reshape(-1, 2)


def draw_options(rng: random.Random, shape: Shape) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of `Options`, and the same as the oracle takes them."""
    heads = shape.kv_heads * shape.group
    given: dict[str, Any] = {}
    window = draw_window(rng, shape)
    window = None if shape.kind == "spans" else window
    if window is not None:
        given["window"] = window
    if rng.random() < 0.2:
        given["softcap"] = rng.choice([0.5, 5.0, 30.0, 1e4])
    if rng.random() < 0.25:
        given["scale"] = rng.choice([0.0, 1.0, 0.05, -0.1])
    for name, values in (("alibi", torch.rand(heads) * rng.choice([0.01, 0.3])), ("sinks", torch.randn(heads) * 2)):
        if rng.random() < 0.25:
            given[name] = strided(values.to(TYPES[rng.choice(FLOATS)]), rng)
    if shape.kind == "none":
        given["causal"] = False
    elif shape.kind == "per-sequence":
        given["causal"] = torch.tensor(shape.causal, dtype=torch.bool)
    mask = positions = None
    if shape.kind == "tree":
        mask, positions = draw_tree(rng, shape)
        given["mask"] = strided(mask, rng)
        if window is not None or "alibi" in given:
            given["positions"] = strided(positions.to(rng.choice([torch.int32, torch.int64])), rng)
        else:
            positions = None
    if rng.random() < 0.2 and not (shape.form == "context" and shape.quantised):
        given["batch_invariant"] = True
    sides = window if isinstance(window, tuple) else (None, None) if window is None else (window - 1, window - 1)
    exact = {
        "window": sides,
        "mask": None if mask is None else mask.numpy(),
        "positions": None if positions is None else positions.numpy(),
        "scale": given.get("scale", shape.head_dim**-0.5),
        "softcap": given.get("softcap"),
        "alibi": None if "alibi" not in given else numbers(given["alibi"]),
        "sinks": None if "sinks" not in given else numbers(given["sinks"]),
    }
    return given, exact


def draw_pages(rng: random.Random, shape: Shape, sights: list[oracle.Sight]) -> tuple[oracle.Array, int, list[oracle.Array]]:
    """A page table `[seqs, columns]`, the number of pages, and for each sequence which of its keys must be in the cache."""
    cached = [s.visible.any(0) for s in sights]
    if shape.form == "context":
        for mine, q_len, kv_len in zip(cached, shape.q_lens, shape.kv_lens):
            mine[kv_len - q_len :] = False
    wanted = [sorted({int(at) // shape.page_size for at in mine.nonzero()[0]}) for mine in cached]
    least = max([columns[-1] + 1 for columns in wanted if columns], default=0)
    width = max([-(-n // shape.page_size) for n in shape.kv_lens], default=0) + rng.choice([0, 0, 3])
    if shape.form == "context" and rng.random() < 0.4:
        width = least
    pages = sum(map(len, wanted)) + rng.randint(1, 3)
    ids = rng.sample(range(pages), pages)
    nowhere = [-1, -7, pages, pages + 3, 2**31 - 1, -(2**31)]
    table = np.array([[rng.choice(nowhere) for _ in range(width)] for _ in wanted], np.int64).reshape(len(wanted), width)
    for row, columns in zip(table, wanted):
        for column in columns:
            row[column] = ids.pop()
    return table, pages, cached


def draw_scales(rng: random.Random, shape: Shape, pages: int) -> list[Any]:
    """The scales of the keys and of the values, fp32: one number, one a head, or one a token and head; None for floats."""
    kind, found = rng.choice(["tensor", "head", "token"]), []
    for format in (shape.format, shape.v_format):
        least = 4.0 / oracle.LARGEST.get(format, 1.0)
        one = torch.tensor(least * rng.uniform(0.5, 2))
        if kind != "tensor":
            one = (torch.rand((shape.kv_heads,) if kind == "head" else (pages, shape.page_size, shape.kv_heads)) + 0.5) * least
        found.append(None if format in FLOATS else one)
    return found


def arranged(k: torch.Tensor, v: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Pages `[pages, page_size, kv_heads, dim]` in the layout's own order."""
    pages, size, heads, dim = k.shape
    if shape.layout == "nhd":
        return k, v
    if shape.layout == "hnd":
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    if shape.layout == "vllm_joint":
        return (torch.cat([k, v], 3).transpose(1, 2).contiguous(),)
    k = k.reshape(pages, size, heads, dim // shape.x, shape.x).permute(0, 2, 3, 1, 4).contiguous()
    if shape.layout == "vllm_x":
        return k, v.permute(0, 2, 3, 1).contiguous()
    return k, v.reshape(pages, size // shape.x, shape.x, heads, -1).permute(0, 3, 1, 4, 2).contiguous()


def draw_stored(
    rng: random.Random, shape: Shape, format: str, dim: int, used: oracle.Array, scale: torch.Tensor | None
) -> tuple[torch.Tensor, oracle.Array]:
    """Elements `[pages, page_size, kv_heads, dim]` as they are stored, NaN in slots that are not `used [pages, page_size]`, and the
    numbers that they stand for."""
    values = torch.randn(*used.shape, shape.kv_heads, dim) * rng.choice([1.0, 1.0, 0.1, 3.0])
    unused = torch.from_numpy(~used)
    if scale is None:
        stored = values.to(TYPES[format])
        exact = numbers(stored)
        stored[unused] = rng.choice([math.nan, math.inf])
        return stored, exact
    wide = scale.double().numpy()[..., None] if scale.dim() == 3 else scale.double().reshape(-1, 1).numpy()
    codes = oracle.encode(values.double().numpy() / wide, format)
    exact = oracle.decode(codes, format) * wide
    codes[~used] = NAN[format]
    if scale.dim() == 3:
        scale[unused] = math.nan
    return torch.from_numpy(codes).view(TYPES[format]), exact


def draw_cache(rng: random.Random, shape: Shape, used: oracle.Array) -> tuple[quire.KVCache, list[oracle.Array]]:
    """A cache, and the numbers in it: keys, values."""
    k_scale, v_scale = draw_scales(rng, shape, len(used))
    k, exact_k = draw_stored(rng, shape, shape.format, shape.head_dim, used, k_scale)
    v, exact_v = draw_stored(rng, shape, shape.v_format, shape.v_head_dim, used, v_scale)
    parts = arranged(k, v, shape)
    if rng.random() < 0.4:
        parts = tuple(part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in parts)
    named = {"k_scale": k_scale, "v_scale": v_scale}
    scales = {name: strided(scale, rng) for name, scale in named.items() if scale is not None}
    joint = {"head_dim": shape.head_dim} if shape.layout == "vllm_joint" else {}
    storage = [strided(part, rng) for part in parts]
    names = {"k_format": shape.format, "v_format": shape.v_format}
    return quire.KVCache.wrap(*storage, layout=shape.layout, **names, **joint, **scales), [exact_k, exact_v]


def draw_batch(rng: random.Random, shape: Shape, table: oracle.Array, spans: oracle.Array | None = None) -> quire.Batch:
    """Index tensors of any type and stride, hints that may be too low, and any length for sequences without new tokens."""
    lens = [n if q or rng.random() < 0.5 else rng.choice([0, 17, 10**6]) for q, n in zip(shape.q_lens, shape.kv_lens)]
    lens = [min(n, 17) if shape.kind == "tree" and not q else n for q, n in zip(shape.q_lens, lens)]
    index = []
    for values in (table, lens, shape.starts):
        index.append(strided(torch.from_numpy(np.array(values, np.int64)).to(rng.choice([torch.int32, torch.int64])), rng))
    hints = [rng.choice([None, max([*of, 0]), 1, 10**6]) for of in (shape.q_lens, shape.kv_lens)]
    held = None if spans is None else strided(torch.from_numpy(spans).to(rng.choice([torch.int32, torch.int64])), rng)
    return quire.Batch(*index, max_q_len=hints[0], max_kv_len=hints[1], spans=held)


def draw_queries(rng: random.Random, shape: Shape, given: dict[str, Any]) -> tuple[torch.Tensor, oracle.Array, str]:
    """Queries, the numbers they stand for, and their format; NaN in padding rows."""
    live, format = sum(shape.q_lens), rng.choice(["fp32", "fp16", "bf16", "bf16", "fp8"])
    values = torch.randn(live + shape.padding, shape.kv_heads * shape.group, shape.head_dim) * rng.choice([1.0, 1.0, 0.1, 4.0])
    scale = 1.0
    if format == "fp8":
        format, scale = rng.choice(FP8), rng.choice([1.0, 0.0625, 2.5])
        given["q_scale"] = scale if rng.random() < 0.5 else torch.tensor(scale)
        codes = oracle.encode(values.double().numpy() / scale, format)
        codes[live:] = NAN[format]
        q = torch.from_numpy(codes).view(TYPES[format])
    else:
        q = values.to(TYPES[format])
        q[live:] = math.nan
    exact = numbers(q) * float(np.float32(scale))
    return strided(q, rng), exact, format


def draw_out(rng: random.Random, shape: Shape, given: dict[str, Any], q_format: str) -> tuple[torch.Tensor | None, str, float]:
    """An output buffer or None, the format of the output, and its scale."""
    size = (sum(shape.q_lens) + shape.padding, shape.kv_heads * shape.group, shape.v_head_dim)
    if rng.random() < 0.2:
        scale = rng.choice([1.0, 0.5, 0.03125])
        given["out_scale"] = scale if rng.random() < 0.5 else torch.tensor(scale)
        format = q_format if q_format in FP8 else "e4m3fn"
        if rng.random() < 0.5:
            format = rng.choice(FP8)
            return strided(torch.zeros(size, dtype=torch.uint8).view(TYPES[format]), rng), format, scale
        return None, format, scale
    if rng.random() < 0.5:
        format = rng.choice(FLOATS)
        return strided(torch.zeros(size, dtype=TYPES[format]), rng), format, 1.0
    return None, "bf16" if q_format in FP8 else q_format, 1.0


def draw_new(rng: random.Random, shape: Shape, sights: list[oracle.Sight]) -> tuple[list[torch.Tensor], list[oracle.Array], str]:
    """New keys and values beside the cache, their numbers and their format; NaN where nobody looks."""
    format = rng.choice(FLOATS)
    live = sum(shape.q_lens)
    hidden = np.ones(live + shape.padding, bool)
    for start, q_len, kv_len, mine in zip(shape.starts, shape.q_lens, shape.kv_lens, sights):
        hidden[start : start + q_len] = ~mine.visible.any(0)[kv_len - q_len :]
    made = [torch.randn(len(hidden), shape.kv_heads, dim).to(TYPES[format]) for dim in (shape.head_dim, shape.v_head_dim)]
    exact = [numbers(part) for part in made]
    for part in made:
        part[torch.from_numpy(hidden)] = math.nan
    return [strided(part, rng) for part in made], exact, format


def asked_by_the_ledger(shape: Shape, exact: dict[str, Any], table: oracle.Array, pages: int) -> list[tuple[int, int]]:
    """The slots, and the positions they must hold, of what the ledger's check asks for: of each sequence the keys from the first
    that its window reaches; a tree's new tokens are left out."""
    asked = []
    for row, (start, q_len, kv_len) in enumerate(zip(shape.starts, shape.q_lens, shape.kv_lens)):
        first, left = 0, exact["window"][0]
        if left is not None:
            lowest = kv_len - q_len if exact["positions"] is None else min([*exact["positions"][start : start + q_len], 2**62])
            first = max(int(lowest) - left, 0)
        end = kv_len - q_len if shape.form == "context" or shape.kind == "tree" else kv_len
        for position in range(first, end if q_len else 0):
            column = position // shape.page_size
            page = int(table[row, column]) if column < table.shape[1] else -1
            if 0 <= page < pages:
                asked.append((page * shape.page_size + position % shape.page_size, position))
    return asked


def draw(seed: int, small: bool = False, spans: bool = False) -> RandomCall:
    """The call of a seed; small ones take an interpreter about a second. With `spans`, tokens see intervals of keys."""
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _draw(seed, rng, draw_shape(rng, small, spans))


def _draw(seed: int, rng: random.Random, shape: Shape) -> RandomCall:
    given, exact = draw_options(rng, shape)
    starts, sees = shape.starts, []
    spans = draw_spans(rng, shape) if shape.kind == "spans" else None
    for i, (q_len, kv_len) in enumerate(zip(shape.q_lens, shape.kv_lens)):
        rows = slice(starts[i], starts[i + 1])
        tree = [None if exact[name] is None else exact[name][rows] for name in ("mask", "positions")]
        if spans is not None:
            sees.append(oracle.sight_of_spans(q_len, kv_len, spans[rows]))
            continue
        sees.append(oracle.sight(q_len, kv_len, shape.causal[i], exact["window"], *tree))
    table, pages, cached = draw_pages(rng, shape, sees)
    used = np.zeros((pages, shape.page_size), bool)
    for i, mine in enumerate(cached):
        at = mine.nonzero()[0]
        used[table[i, at // shape.page_size] if len(at) else at, at % shape.page_size] = True
    cache, held = draw_cache(rng, shape, used)
    q, exact_q, q_format = draw_queries(rng, shape, given)
    out, out_format, out_scale = draw_out(rng, shape, given, q_format)
    new, fresh, new_format = draw_new(rng, shape, sees) if shape.form == "context" else ([], [], "fp32")
    logit = {name: exact[name] for name in ("scale", "softcap", "alibi", "sinks")}
    answers = []
    for i, (q_len, kv_len) in enumerate(zip(shape.q_lens, shape.kv_lens)):
        at, dense = cached[i].nonzero()[0], []
        for part, pages_of_part in enumerate(held):
            mine = np.zeros((kv_len, *pages_of_part.shape[2:]))
            mine[at] = pages_of_part[table[i, at // shape.page_size] if len(at) else at, at % shape.page_size]
            if new:
                mine[kv_len - q_len :] = fresh[part][starts[i] : starts[i + 1]]
            dense.append(mine)
        answers.append(oracle.attention(exact_q[starts[i] : starts[i + 1]], *dense, sees[i], **logit))
    answer = oracle.Answer(*(np.concatenate([a[field] for a in answers]) for field in range(4)))
    floats = {q_format if q_format in FLOATS else "bf16", shape.format, shape.v_format, new_format} & set(FLOATS)
    allowed, allowed_lse = budgets(answer, shape, max(UNIT[name] for name in floats), out_format)
    told = {"shape": shape, "q": q_format, "out": out_format, "options": sorted(given), "table": table.shape}
    return RandomCall(
        seed, told, q, cache, draw_batch(rng, shape, table, spans), quire.Options(**given), (new[0], new[1]) if new else None, out,
        out_format, float(np.float32(out_scale)), rng.random() < 0.6, sum(shape.q_lens), answer, allowed, allowed_lse,
        asked_by_the_ledger(shape, exact, table, pages),
    )  # fmt: skip


def budgets(answer: oracle.Answer, shape: Shape, factors: float, out_format: str) -> tuple[oracle.Array, oracle.Array]:
    """Errors that are allowed in the output and in the LSE: of a logit one rounding of each of its terms in fp32, of the output one
    rounding of each weight and each value to the type of the products, and one to its own type. Weights and results below the
    smallest normal number lose their size at most."""
    logit = (math.sqrt(shape.head_dim) + 8) * 2.0**-24 * answer.terms
    inner = factors * answer.weighted + 2 * (logit + 2.0**-22)[..., None] * answer.weighted
    keys = max([*shape.kv_lens, 1])
    tiny = keys * 2.0**-24 * 12 + LEAST.get(out_format, 0.0)
    size = np.abs(answer.out).max(initial=0.0)
    least = tiny if factors >= UNIT["fp16"] else LEAST.get(out_format, 0.0) + 1e-9 * size
    allowed = 4 * (UNIT.get(out_format, 2.0**-24) * np.abs(answer.out) + inner) + least
    finite = np.where(np.isfinite(answer.lse), np.abs(answer.lse), 0.0)
    return allowed, 4 * (logit + 2.0**-23 * finite + 2.0**-22)


@dataclass
class RandomWrite:
    """A write into a cache full of NaN, and the memory that it must leave behind, with the scales if it makes them."""

    k: torch.Tensor
    v: torch.Tensor
    cache: quire.KVCache
    storage: list[torch.Tensor]
    batch: quire.Batch
    slots: torch.Tensor | None
    expected: tuple[torch.Tensor, ...]
    expected_scales: list[torch.Tensor | None]
    """Where the write makes them."""

    def wrong(self) -> str | None:
        for got, want in zip(self.storage, self.expected):
            same = got.cpu().flatten().view(torch.uint8) == want.flatten().view(torch.uint8)
            if not same.all():
                return f"{int((~same).sum())} of {same.numel()} bytes are wrong"
        for found, made in zip((self.cache.k_scale, self.cache.v_scale), self.expected_scales):
            if made is not None:
                assert found is not None
                if not torch.equal(found.cpu().nan_to_num(-1.0), made.nan_to_num(-1.0)):
                    return "scales are wrong"
        return None


def draw_write(seed: int, device: str = "cpu", small: bool = False) -> RandomWrite:
    """The write of a seed. Its memory is contiguous: strides of caches are what `draw` draws."""
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = draw_shape(rng, small)
        shape.kv_lens = [max(q, n) for q, n in zip(shape.q_lens, shape.kv_lens)]
        return _draw_write(rng, shape, device)


def _draw_write(rng: random.Random, shape: Shape, device: str) -> RandomWrite:
    columns = [-(-n // shape.page_size) for n in shape.kv_lens]
    pages, live = sum(columns) + 2, sum(shape.q_lens)
    ids = rng.sample(range(pages), pages)
    table = np.full((len(columns), max(columns) + rng.choice([0, 2])), -1)
    for row, count in zip(table, columns):
        row[:count] = [ids.pop() for _ in range(count)]
    places = [
        (table[i, at // shape.page_size], at % shape.page_size)
        for i, (q_len, kv_len) in enumerate(zip(shape.q_lens, shape.kv_lens))
        for at in range(kv_len - q_len, kv_len)
    ]
    format, written = rng.choice(FLOATS), list(range(live))
    slots = None
    if rng.random() < 0.4:
        written = [token for token in written if rng.random() < 0.8]
        slots = torch.full((live + shape.padding,), -1)
        for token in written:
            slots[token] = int(places[token][0]) * shape.page_size + places[token][1]
        slots = strided(slots.to(rng.choice([torch.int32, torch.int64])), rng)
    drawn, formats = draw_scales(rng, shape, pages), (shape.format, shape.v_format)
    made = [torch.randn(live + shape.padding, shape.kv_heads, dim).to(TYPES[format]) for dim in (shape.head_dim, shape.v_head_dim)]
    cells, scales, blank = [], [], []
    for part, store, scale in zip(made, formats, drawn):
        x, mine = part.float().numpy(), None if scale is None else scale.clone().numpy()
        if mine is not None and mine.ndim == 3:
            mine[:] = math.nan
        used = np.zeros((pages, shape.page_size), bool)
        stored, _ = draw_stored(random.Random(1), shape, store, part.shape[2], used, None if scale is None else scale.clone())
        blank.append(stored.clone())
        for token in written:
            stored[places[token]] = _stored_token(x[token], store, mine, places[token])
        part[live:] = math.nan
        cells.append(stored)
        scales.append(mine)
    storage = [part.to(device) for part in arranged(*blank, shape)]
    given: dict[str, Any] = {"k_format": shape.format, "v_format": shape.v_format}
    for name, scale in zip(("k_scale", "v_scale"), drawn):
        if scale is not None:
            given[name] = (torch.full_like(scale, math.nan) if scale.dim() == 3 else scale.clone()).to(device)
    joint = {"head_dim": shape.head_dim} if shape.layout == "vllm_joint" else {}
    cache = quire.KVCache.wrap(*storage, layout=shape.layout, **joint, **given)
    index = [torch.from_numpy(np.array(values, np.int64)).to(device) for values in (table, shape.kv_lens, shape.starts)]
    expected_scales = [None if mine is None or mine.ndim < 3 else torch.from_numpy(mine) for mine in scales]
    k, v = (strided(part, rng).to(device) for part in made)
    slots = None if slots is None else slots.to(device)
    return RandomWrite(k, v, cache, storage, quire.Batch(*index), slots, arranged(*cells, shape), expected_scales)


def _stored_token(x: oracle.Array, format: str, scale: oracle.Array | None, place: tuple[int, int]) -> torch.Tensor:
    """One token's `[kv_heads, dim]` as it is stored; a scale of its own is made and noted in `scale`."""
    if scale is None:
        return torch.from_numpy(x).to(TYPES[format])
    if scale.ndim == 3:
        largest = np.abs(x).max(1) / np.float32(oracle.LARGEST[format])
        scale[place] = np.where(largest == 0, np.float32(1), largest)
    mine = scale[place] if scale.ndim == 3 else scale
    divided = (x / np.asarray(mine, np.float32).reshape(-1, 1)).astype(np.float32)
    return torch.from_numpy(oracle.encode(divided.astype(np.float64), format)).view(TYPES[format])
