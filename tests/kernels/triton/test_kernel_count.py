"""Bounded compilation: whatever batches a layer gets, they need a few compiled kernels, counted here without a GPU.

Each configuration of a layer draws batches at random, as tensors without memory, and collects the key of every kernel that its
attends, writes and audits need: a key is a hash of what `triton.compile` receives.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import quire
from quire.batch import Batch
from quire.cache.format import FORMATS
from quire.cache.kv_cache import KVCache
from quire.cache.latent import as_given, rows_to_write
from quire.cache.prefixes import Prefixes
from quire.cache.select import Select
from quire.contract.call import Call
from quire.dispatch.choose import kernel_for
from quire.kernels.triton.host.launcher import Launcher
from quire.kernels.triton.host.program import as_bytes
from quire.launch import described
from quire.options import Options
from quire.platform import Platform
from quire.problem import default_out_dtype
from quire.rope import Rope

MOST = 12
ARCHES = ("sm90", "sm80", "gfx942")
BATCHES = 84
"""Of a configuration, for each card and type of indices, unless it says another number."""


@dataclass(frozen=True)
class Layer:
    """What stays the same from batch to batch."""

    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    format: str = "bf16"
    v_format: str = ""
    """As `format` if it is empty."""
    scales: str = "tensor"
    page_size: int = 16
    context: bool = False
    lse: bool = False
    mask: bool = False
    rope: bool = False
    spans: bool = False
    prefixes: bool = False
    """Whether some batches have prefixes."""
    select: tuple[str, ...] = ()
    """Of positions and columns, what batches select."""
    mixed: bool = False
    """Whether only some batches have spans or select keys."""
    aligned_pages: bool = True
    v_in_k: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    batches: int = BATCHES
    most: int = MOST


LAYERS = {
    "bf16": Layer(),
    "e4m3fn": Layer(format="e4m3fn", group=8),
    "int8 and int4": Layer(format="int8", v_format="int4", scales="token"),
    "nvfp4": Layer(format="nvfp4", v_format="nvfp4_swizzled", scales="tensor"),
    "group of 5": Layer(group=5, kv_heads=4),
    "head_dim 64": Layer(group=8, head_dim=64),
    "head_dim 256": Layer(head_dim=256, page_size=32),
    "LSE": Layer(lse=True),
    "window": Layer(options={"window": 1024}),
    "context form": Layer(context=True),
    "tree mask": Layer(mask=True),
    "spans": Layer(spans=True),
    "prefixes": Layer(prefixes=True),
    "prefixes, e4m3fn": Layer(prefixes=True, format="e4m3fn", group=8, lse=True),
    "batch-invariant": Layer(options={"batch_invariant": True}),
    "rope": Layer(rope=True),
    "latent": Layer(kv_heads=1, group=128, head_dim=576, v_in_k=512, page_size=64),
    "latent, rope": Layer(kv_heads=1, group=128, head_dim=576, v_in_k=512, page_size=64, rope=True, batches=40),
    "latent, all of K": Layer(kv_heads=1, group=16, head_dim=512, v_in_k=512, page_size=64, batches=40),
    "latent, fp8_ds_mla": Layer(kv_heads=1, group=16, head_dim=576, v_in_k=512, page_size=64, format="fp8_ds_mla"),
    "columns": Layer(select=("columns",), batches=40),
    "positions": Layer(select=("positions",), format="e4m3fn", lse=True, batches=40),
    "batch-invariant, prefixes": Layer(prefixes=True, options={"batch_invariant": True}, batches=40),
    "batch-invariant columns": Layer(select=("columns",), mixed=True, options={"batch_invariant": True}, batches=40),
    "latent, positions": Layer(
        kv_heads=1, group=128, head_dim=576, v_in_k=512, page_size=64, select=("positions",), mixed=True, batches=40
    ),
    # Some batches have spans or select keys, others do not.
    "columns sometimes": Layer(select=("columns",), mixed=True),
    "columns sometimes, e4m3fn": Layer(select=("columns",), mixed=True, format="e4m3fn", group=8, lse=True),
    "positions sometimes": Layer(select=("positions",), mixed=True),
    # On Hopper, spans have two kernels of long sequences, too.
    "spans sometimes": Layer(spans=True, mixed=True, most=14),
    "spans sometimes, wide heads": Layer(spans=True, mixed=True, head_dim=512),
    "spans sometimes, context form": Layer(spans=True, mixed=True, context=True, format="e4m3fn"),
    "pages from an odd address": Layer(spans=True, select=("columns", "positions"), mixed=True, aligned_pages=False),
    # Each kind of batch has one kernel of its own: several kinds in one layer are more than twelve together.
    "columns and prefixes": Layer(select=("columns",), mixed=True, prefixes=True, most=13),
    "spans and prefixes": Layer(spans=True, mixed=True, prefixes=True, most=15),
    "everything": Layer(select=("columns", "positions"), spans=True, mixed=True, prefixes=True, batches=150, most=17),
    "latent, prefixes": Layer(kv_heads=1, group=16, head_dim=576, v_in_k=512, page_size=64, prefixes=True, batches=40),
    "latent context form": Layer(kv_heads=1, group=16, head_dim=576, v_in_k=512, context=True, format="e4m3fn", scales="token"),
}


ROPE = Rope(torch.empty(64, 64, device="meta"), torch.empty(64, 64, device="meta"), q_norm=torch.empty(128, device="meta"))
LATENT_ROPE = Rope(torch.empty(64, 32, device="meta"), torch.empty(64, 32, device="meta"), k_norm=torch.empty(512, device="meta"))


def nothing(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Draws:
    """Random batches of one layer."""

    def __init__(self, layer: Layer, index: torch.dtype, seed: str, wide: bool = True):
        self.layer, self.index, self.chance = layer, index, random.Random(seed)
        self.wide = wide
        """Whether some page tables are too wide to count their work in 32 bits. An extent does not tell how wide a table is."""
        self.rows_of = Counter[str]()

    def one_in(self, n: int) -> bool:
        return self.chance.randrange(n) == 0

    def cache(self) -> KVCache:
        layer, formats = self.layer, [FORMATS[name] for name in (self.layer.format, self.layer.v_format or self.layer.format)]
        # Never 2^31 elements or more: such a cache is another configuration (`Problem.far`: its offsets take 64 bits). A cache is
        # allocated once, so that no layer has batches over caches of both sizes.
        pages = self.chance.choice((1, 17, 4096))
        size = (pages, layer.page_size, layer.kv_heads)
        k, v = (self.pages(*size, format.units_of(layer.head_dim), dtype=format.dtype) for format in formats)
        one = () if layer.scales == "tensor" else size
        scales = [nothing(*one) if format.scaled else None for format in formats]
        names: dict[str, Any] = {"k_format": formats[0].name, "v_format": formats[1].name, "v_scale": scales[1]}
        parts = (k, v)
        if layer.v_in_k is not None:
            names, parts = {"k_format": formats[0].name, "v_in_k": layer.v_in_k}, (k,)
        cache = KVCache.wrap(*parts, layout="nhd", k_scale=scales[0], **names)
        cells = nothing(pages * layer.page_size, dtype=torch.int64)
        marks = {"position": cells.int(), "issue": cells, "current": cells, "violations": nothing(9, dtype=torch.int64)}
        cache.ledger = SimpleNamespace(**marks)  # type: ignore[assignment]  # all that the check of a ledger asks of it
        return cache

    def pages(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        return nothing(*size, dtype=dtype) if self.layer.aligned_pages else nothing(math.prod(size) + 1, dtype=dtype)[1:].view(size)

    def batch(self) -> tuple[int, Batch]:
        """The number of tokens, and a batch of them: decodes, verifications, prefills or all of these, with hints that are exact,
        low or missing."""
        chance = self.chance
        seqs = chance.choice((1, 2, 3, chance.randint(1, 512), chance.randint(1, 512)))
        most = chance.choice((1, 1, chance.randint(2, 16), chance.randint(17, 3000)))
        tokens = max(1, min(seqs * most, chance.randint(1, seqs * most), 20_000)) if most > 1 else seqs
        tokens += chance.choice((0, 0, chance.randint(1, 100)))  # padding
        # Now and then a table so wide that its work does not fit into 32 bits.
        width = chance.randint(1, 2**22) if self.wide and self.one_in(25) else chance.randint(1, 5000)
        table = nothing(seqs + chance.randint(0, 9), width + chance.randint(0, 33), dtype=self.index)[:seqs, :width]
        lens, starts = nothing(seqs, dtype=self.index), nothing(seqs + 1, dtype=self.index)
        if self.one_in(8):
            lens = nothing(seqs, 2, dtype=self.index)[:, 1]
        if self.one_in(8):
            starts = nothing(2 * seqs + 2, dtype=self.index)[::2]
        hint, kv_hint = chance.choice((None, 1, most, tokens)), chance.choice((None, 1, width * self.layer.page_size))
        spans = None
        if self.layer.spans and not (self.layer.mixed and self.one_in(2)):
            spans = nothing(tokens, 2, dtype=self.index) if not self.one_in(4) else nothing(2, tokens, dtype=self.index).T
        prefixes = None
        if self.layer.prefixes and not self.one_in(3):
            # Not always enough shared pages to read them once.
            prefixes = Prefixes.allocate(seqs, chance.randint(1, 40), seqs, width, chance.randint(1, 8), device="meta")
            prefixes._measure(chance.choice(((), ((seqs, chance.randint(1, width)),))), width)
        batch = Batch(table, lens, starts, max_q_len=hint, max_kv_len=kv_hint, spans=spans, prefixes=prefixes)
        return tokens, batch if spans is not None else batch.with_select(self.selection(tokens, seqs))

    def selection(self, tokens: int, seqs: int) -> Select | None:
        """Entries for each head or for all of them; views of more, or of another order of axes."""
        if not self.layer.select or (self.layer.mixed and self.one_in(2)):
            return None
        kind = self.chance.choice(self.layer.select)
        rows, heads, n = (
            tokens if kind == "positions" else seqs,
            self.chance.choice((1, self.layer.kv_heads)),
            self.chance.randint(0, 4096),
        )
        entries = nothing(rows, heads, n + 3, dtype=self.index)[..., :n]
        if self.one_in(5):
            entries = nothing(n, heads, rows, dtype=self.index).permute(2, 1, 0)
        return Select(**{kind: entries})  # type: ignore[arg-type]

    def rows(self, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values: views of a fused projection, tensors of their own, or what no vector load can read."""
        layer, dim = self.layer, self.layer.head_dim
        heads = (layer.kv_heads * layer.group, layer.kv_heads, layer.kv_heads)
        how = self.chance.choice(("fused", "fused", "apart", "apart", "transposed", "odd stride", "odd start"))
        self.rows_of[how] += 1
        if how == "fused":
            more = self.chance.randint(0, 3)
            q, k, v = nothing(tokens, sum(heads) + more, dim, dtype=dtype)[:, : sum(heads)].split(heads, 1)
        elif how == "transposed":
            q, k, v = (nothing(n, tokens, dim, dtype=dtype).transpose(0, 1) for n in heads)
        elif how == "odd stride":
            q, k, v = (nothing(tokens, n, dim + 1, dtype=dtype)[..., :dim] for n in heads)
        elif how == "odd start":
            q, k, v = (nothing(tokens * n * dim + 1, dtype=dtype)[1:].view(tokens, n, dim) for n in heads)
        else:
            q, k, v = (nothing(tokens, n, dim, dtype=dtype) for n in heads)
        return q, k, v

    def calls(self) -> dict[str, Call]:
        """One batch of each operation."""
        layer, chance = self.layer, self.chance
        tokens, batch = self.batch()
        cache = self.cache()
        q, k, v = self.rows(tokens, torch.bfloat16)
        out = nothing(*q.shape[:2], cache.v_head_dim, dtype=default_out_dtype(q.dtype, False))
        if self.one_in(4):
            out = nothing(tokens, q.shape[1] * 2, cache.v_head_dim, dtype=out.dtype)[:, ::2]
        lse = None
        if layer.lse:
            lse = nothing(*q.shape[:2]) if chance.random() < 0.5 else nothing(q.shape[1], tokens).T
        options = dict(layer.options)
        if layer.mask:
            # The new tokens of all sequences may be more than a row of the mask has columns for: some rows are shorter.
            options["mask"] = nothing(tokens, chance.randint(1, 200) + 64, dtype=torch.bool)[:, : chance.randint(1, 64)]
            if self.one_in(5):
                options["mask"] = nothing(64, tokens, dtype=torch.bool).T
        slots = None
        if chance.random() < 0.5:
            dtype = torch.int32 if self.one_in(3) else torch.int64
            slots = nothing(tokens, dtype=dtype) if not self.one_in(4) else nothing(2 * tokens, dtype=dtype)[::2]
        new, padded = ((k, v) if layer.context else None), chance.random() < 0.5
        if layer.v_in_k is not None:
            first = layer.v_in_k
            new = None if new is None else (k, k[..., :first])
            parts = nothing(tokens, 1, first, dtype=k.dtype), nothing(tokens, 1, layer.head_dim - first, dtype=k.dtype)
            k, v = rows_to_write(chance.choice((k, parts)) if first < layer.head_dim else k, None, cache)
        attend = Call(cache, batch, q, Options(**options), new, out, lse=lse, zero_padding=padded)
        write = Call(cache, batch, k=k, v=v, slots=slots)
        if layer.rope:
            rope = ROPE if layer.v_in_k is None else LATENT_ROPE
            write.rope, write.q_in, write.q_out = rope, q, chance.choice((q, nothing(*q.shape, dtype=q.dtype)))
            if chance.random() < 0.5:
                write.rope_positions = nothing(tokens, dtype=chance.choice((torch.int32, torch.int64)))
        return {"attend": attend, "audit": attend, "write": write}


class Counting:
    """The compiled kernels that calls need, by the launchers that would launch them on a card."""

    def __init__(self, arch: str):
        self.platform, self.launchers = Platform.named(arch), dict[Any, Launcher]()

    def keys(self, operation: str, call: Call) -> set[str]:
        problem, extent = described(operation, call)
        kernel = kernel_for(problem, extent, self.platform, operation, None, False)
        if (problem, kernel) not in self.launchers:
            launcher = kernel.launcher_for(problem, self.platform)
            assert isinstance(launcher, Launcher)
            self.launchers[problem, kernel] = launcher
        launches = self.launchers[problem, kernel].launches(call, extent, as_bytes)
        return {program.recipe(arguments).key(self.platform) for program, _, arguments, _ in launches}


def count(layer: Layer, arch: str, index: torch.dtype, batches: int) -> Counter[str]:
    """How often each compiled kernel is needed."""
    found, counting = Counter[str](), Counting(arch)
    draws = Draws(layer, index, f"{layer} {arch} {index}")
    for _ in range(batches):
        for operation, call in draws.calls().items():
            found.update(counting.keys(operation, call))
    return found


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", LAYERS)
def test_all_batches_of_a_layer_need_few_kernels(name: str, arch: str) -> None:
    for index in (torch.int32, torch.int64):
        found = count(LAYERS[name], arch, index, LAYERS[name].batches)
        assert len(found) <= LAYERS[name].most, f"{len(found)} kernels for indices of {index}:\n" + "\n".join(sorted(found))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", LAYERS)
def test_explain_names_the_kernels_that_are_launched(name: str, arch: str) -> None:
    """`Decision.compiled` is made from the problem and the extent alone, the launches from the tensors of the call."""
    draws, counting = Draws(LAYERS[name], torch.int32, f"explain {name} {arch}", wide=False), Counting(arch)
    for _ in range(6):
        calls = draws.calls()
        attend, write = calls["attend"], calls["write"]
        keys = {operation: counting.keys(operation, call) for operation, call in calls.items()}
        latent = LAYERS[name].v_in_k is not None
        new = (attend.new[0], None) if latent and attend.new is not None else attend.new
        how: dict[str, Any] = {"new": new, "out": attend.out, "lse": False if attend.lse is None else attend.lse}
        how |= {
            **dict(zip("kv", as_given(write.k, write.v, write.cache))),
            "slots": write.given_slots,
            "platform": counting.platform,
        }
        how |= {"rope": write.rope, "positions": write.rope_positions}
        assert attend.q is not None
        for operation, parts in {"step": ("write", "attend", "audit"), "attend": ("attend", "audit"), "audit": ("audit",)}.items():
            said = quire.explain(attend.q, attend.cache, attend.batch, attend.options, operation=operation, **how)
            assert set(said.compiled) == set.union(*(keys[part] for part in parts)), operation
            assert len(said.compiled) == len(set(said.compiled))


if __name__ == "__main__":
    for name in LAYERS:
        print(f"{name:16}", *(f"{arch} {len(count(LAYERS[name], arch, torch.int32, LAYERS[name].batches)):2}" for arch in ARCHES))
