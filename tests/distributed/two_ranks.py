"""Checks that run on two ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import quire
from distributed.call_checks import CALL_CHECKS, refused
from distributed.cases import LAYERS
from distributed.faults import FAULTS, replaced
from distributed.layer import Layer, error, kernel_call, slopes
from quire.conformance.oracle.budget import SAFETY_FACTOR, least_loss, truth
from quire.distributed import ContextParallel, RankFailed, RankMismatch, TensorParallel, context_call
from quire.distributed import context_parallel as module

TIMEOUT = 60.0


def tensor_parallel() -> dict[str, float]:
    """Every layer, with 2 KV heads for 2 ranks and with one for both."""
    tp = TensorParallel(q_heads=8, kv_heads=2, timeout=TIMEOUT)
    found = {name: layer.on_ranks(tp, None) for name, layer in LAYERS.items()}
    shared = Layer(kv_heads=1, options={"alibi": True, "sinks": True}, seed=20)
    tp = TensorParallel(q_heads=8, kv_heads=1, timeout=TIMEOUT)
    assert (tp.q_heads, tp.kv_heads, tp.replicas) == (4, 1, 2)
    return found | {"one KV head": shared.on_ranks(tp, None)}


def gathered() -> dict[str, float]:
    """Every layer with keys on two ranks. The interleave is less than a page, a page, and so much that rank 1 has no key."""
    found = {}
    for interleave in (3, 16, 128):
        cp = ContextParallel(interleave=interleave, timeout=TIMEOUT)
        found |= {f"{name}, interleave {interleave}": layer.on_ranks(None, cp) for name, layer in LAYERS.items()}
    return found


def divided() -> dict[str, float]:
    """The exchange of large results."""
    cp = ContextParallel(interleave=4, timeout=TIMEOUT)
    module.DIVIDED_FROM, kept = 0, module.DIVIDED_FROM
    try:
        return {name: layer.on_ranks(None, cp) for name, layer in LAYERS.items()}
    finally:
        module.DIVIDED_FROM = kept


def split_heads() -> dict[str, float]:
    """Query heads and keys divided over the same ranks."""
    cp = ContextParallel(interleave=4, split_heads=True, timeout=TIMEOUT)
    whole = TensorParallel(q_heads=8, kv_heads=1, timeout=TIMEOUT)
    found = {}
    for name in ("alibi", "sinks", "fp8-tensor", "all", "fp8-queries"):
        layer = replace(LAYERS[name], kv_heads=1)
        found[name] = layer.on_ranks(None, cp, split=whole)
    return found


def as_on_a_device() -> dict[str, float]:
    """The code for devices, whose values are not read, with tensors in host memory."""
    found = {}
    with replaced(module, "is_on_host", lambda tensor: False), replaced(context_call, "is_on_host", lambda tensor: False):
        for heads in (False, True):
            cp = ContextParallel(interleave=4, split_heads=heads, chunks=2, timeout=TIMEOUT)
            whole = TensorParallel(q_heads=8, kv_heads=1, timeout=TIMEOUT) if heads else None
            for name in ("plain", "padding", "all", "fp8-queries", "tree"):
                layer = replace(LAYERS[name], kv_heads=1) if heads else LAYERS[name]
                found[f"{name}, {heads}"] = layer.on_ranks(None, cp, split=whole, buffers=True)
            assert cp._agreed and len(cp._headers) == len(cp._agreed)
    return found


def rounded_parts() -> dict[str, float]:
    """Partial results that are exchanged in bf16 are rounded once."""
    cp = ContextParallel(interleave=4, dtype=torch.bfloat16, timeout=TIMEOUT)
    return {
        name: LAYERS[name].on_ranks(None, cp, rounding=torch.finfo(torch.bfloat16).eps / 2) for name in ("plain", "bf16", "all")
    }


def same_bits() -> None:
    """All exchanges give the same bits; with batch_invariant, so do any chunks."""
    pool = quire.PagePool(pages=32, page_size=8, shard=ContextParallel(interleave=4, timeout=TIMEOUT).shard)
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=16, dtype=torch.float32)
    batch = pool.step({pool.sequence(): 37, pool.sequence(): 1, pool.sequence(): 12})
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(50, 12, 16, generator=generator).split((8, 2, 2), dim=1)
    quire.write(k, v, cache, batch)
    options = quire.Options(batch_invariant=True, sinks=torch.ones(8))
    results = []
    for limit in (0, 1 << 40):
        module.DIVIDED_FROM, kept = limit, module.DIVIDED_FROM
        for chunks in (1, 2, 7):
            cp = ContextParallel(interleave=4, chunks=chunks, timeout=TIMEOUT)
            results.append(cp.attend(q, cache, batch, options, lse=True))
        module.DIVIDED_FROM = kept
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))
    # Every rank has the same bits.
    both = [torch.empty_like(results[0][0]) for _ in range(2)]
    dist.all_gather(both, results[0][0])
    assert torch.equal(*both)


def shared_prefix() -> dict[str, float]:
    """Sequences that share a prefix, write to a shared page (copy-on-write), are trimmed and continue."""
    found = {}
    cp = ContextParallel(interleave=3, timeout=TIMEOUT)
    whole, mine = quire.PagePool(pages=32, page_size=4), quire.PagePool(pages=32, page_size=4, shard=cp.shard)
    caches = [quire.KVCache.allocate(pool, kv_heads=2, head_dim=16, dtype=torch.float32, ledger=True) for pool in (whole, mine)]
    prefixes = [pool.sequence() for pool in (whole, mine)]
    forks: list[list[Any]] = [[], []]

    def run(name: str, counts: tuple[int, ...]) -> None:
        tokens = torch.randn(sum(counts), 12, 16, generator=torch.Generator().manual_seed(len(found)))
        q, k, v = tokens.split((8, 2, 2), dim=1)
        batches = [pool.step(dict(zip(forks[i] or [prefixes[i]], counts))) for i, pool in enumerate((whole, mine))]
        quire.write(k, v, caches[0], batches[0])
        want = truth(kernel_call(q, caches[0], batches[0], quire.Options()))
        out, lse = cp.step(q, k, v, caches[1], batches[1], lse=True)
        found[name] = error(out, lse, want, len(q), slice(None))
        if name == "forked":
            # Of the 22 keys rank 0 has 12, in full pages, and rank 1 has 10: it alone writes to a shared page.
            assert batches[0].copies and bool(batches[1].copies) == (cp.rank == 1)

    run("prefix", (22,))
    forks = [[pool.fork(prefix), pool.fork(prefix)] for pool, prefix in zip((whole, mine), prefixes)]
    run("forked", (4, 1))
    for pool, (first, _) in zip((whole, mine), forks):
        pool.trim(first, 23)
    run("trimmed", (1, 6))
    return found


def chunks() -> dict[str, float]:
    """Rows in parts, whose exchange overlaps the next part."""
    cp = ContextParallel(interleave=4, chunks=3, timeout=TIMEOUT)
    return {name: layer.on_ranks(None, cp) for name, layer in LAYERS.items()}


def buffers() -> None:
    """Results go to the caller's buffers; padding rows of `out` keep their content."""
    cp = ContextParallel(interleave=4, timeout=TIMEOUT)
    pool = quire.PagePool(pages=32, page_size=8, shard=cp.shard)
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=16, dtype=torch.float32)
    batch = pool.step({pool.sequence(): 9})
    q, k, v = torch.randn(11, 8, 16, generator=torch.Generator().manual_seed(1)).split((4, 2, 2), dim=1)
    quire.write(k, v, cache, batch)
    want, want_lse = cp.attend(q, cache, batch, lse=True)
    out, lse = torch.full((11, 4, 16), 7.0).transpose(0, 1).contiguous().transpose(0, 1), torch.full((11, 4), 7.0)
    got = cp.attend(q, cache, batch, out=out, lse=lse)
    assert got[0] is out and got[1] is lse and torch.equal(out[:9], want[:9]) and torch.equal(lse, want_lse)
    assert (out[9:] == 7).all() and not want[9:].any() and not lse[9:].any()
    nothing = quire.Batch(*(torch.zeros(size, dtype=torch.int32) for size in ((0, 1), 0, 1)), shard=cp.shard)
    own = ContextParallel(interleave=4, split_heads=True, timeout=TIMEOUT)
    assert cp.attend(q[:0], cache, nothing).shape == own.attend(q[:0], cache, nothing).shape == (0, 4, 16)


def projection() -> None:
    """The output projection is the whole model's, in one part and in several."""
    tp = TensorParallel(q_heads=8, kv_heads=2, timeout=TIMEOUT)
    generator = torch.Generator().manual_seed(2)
    out, weight = torch.randn(5, 8, 16, generator=generator), torch.randn(24, 128, generator=generator)
    rows, sizes = out.flatten(1).double(), out.flatten(1).double().abs()
    # Each of the 128 products and sums rounds once, and so does the sum over the ranks.
    bound = 129 * 2.0**-24 * (sizes @ weight.double().abs().T)
    for given, parts in ((weight, 1), (tp.q(weight, dim=1), 1), (weight, 3)):
        got = tp.project(tp.q(out), given, chunks=parts)
        assert ((got.double() - rows @ weight.double().T).abs() <= bound).all()
    assert tp.reduce(torch.full((2,), float(tp.rank + 1))).tolist() == [3.0, 3.0]


def mismatches() -> dict[str, str]:
    """Arguments that differ between ranks are named."""
    rank = dist.get_rank()
    cp = ContextParallel(interleave=4, timeout=TIMEOUT)
    own = ContextParallel(interleave=4, split_heads=True, timeout=TIMEOUT)
    pool = quire.PagePool(pages=32, page_size=8, shard=cp.shard)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=16, dtype=torch.float32)
    sequence = pool.sequence()
    batch = pool.step({sequence: 9})
    q, k, v = torch.ones(3, 9, 1, 16)
    other = quire.Batch(batch.page_table, batch.kv_lens - rank, batch.q_starts - rank * torch.tensor([0, 1], dtype=torch.int32),
                        shard=cp.shard)  # fmt: skip
    given = {
        "window": lambda: cp.attend(q, cache, batch, quire.Options(window=4 + rank)),
        "sinks": lambda: cp.attend(q, cache, batch, quire.Options(sinks=torch.tensor([float(rank)]))),
        "out_scale": lambda: own.attend(q, cache, batch, quire.Options(out_scale=1.0 + rank)),
        "kv_lens": lambda: cp.attend(q, cache, other),
        "tokens": lambda: cp.attend(q[rank:], cache, batch),
        "tokens of own heads": lambda: own.attend(q[rank:], cache, batch),
        "type": lambda: cp.attend(q, cache, batch, out=torch.empty(9, 1, 16, dtype=(torch.float32, torch.bfloat16)[rank])),
        "interleave": lambda: ContextParallel(interleave=4 + rank, timeout=TIMEOUT),
        "kv_heads": lambda: TensorParallel(q_heads=8, kv_heads=1 + rank, timeout=TIMEOUT),
        "function": lambda: ContextParallel(timeout=TIMEOUT) if rank else TensorParallel(q_heads=8, kv_heads=1, timeout=TIMEOUT),
    }
    quire.write(k, v, cache, batch)
    return {name: refused(RankMismatch, call) for name, call in given.items()}


def local_errors() -> dict[str, Any]:
    """An error on one rank makes the others fail at once, and the group can be used further. With three chunks of three rows, a
    fault in the first page is found in the first, and one in the last page in the last."""
    rank, found = dist.get_rank(), {}
    for heads, chunks, column in ((False, 1, 0), (True, 1, 0), (False, 3, 0), (False, 3, -1), (True, 3, -1)):
        cp = ContextParallel(interleave=1, split_heads=heads, chunks=chunks, timeout=TIMEOUT)
        pool = quire.PagePool(pages=32, page_size=1, shard=cp.shard)
        cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=16, dtype=torch.float32)
        batch = pool.step({pool.sequence(): 10}).clone()
        q, k, v = torch.ones(3, 10, 1, 16)
        for failing in (0, 1):
            page = int(batch.page_table[0, column])
            if rank == failing:
                batch.page_table[0, column] = 99
            kind = quire.ContractError if rank == failing else RankFailed
            for call in (partial(cp.attend, q, cache, batch), partial(cp.step, q, k, v, cache, batch)):
                found[f"{heads} {chunks} {column} {failing}"] = refused(kind, call)
            batch.page_table[0, column] = page
            kind, shard = (quire.ArgumentError, None) if rank == failing else (RankFailed, cp.shard)
            other = quire.Batch(batch.page_table, batch.kv_lens, batch.q_starts, shard=shard)
            refused(kind, partial(cp.attend, q, cache, other))
            assert torch.isfinite(cp.step(q, k, v, cache, batch)).all()
    return found


def arguments() -> dict[str, str]:
    """What one rank can refuse by itself."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "cp"))
    alone = dist.new_group([0])
    tp = TensorParallel(mesh["cp"], q_heads=8, kv_heads=2, timeout=TIMEOUT)
    cp = ContextParallel(mesh["cp"], interleave=4, timeout=TIMEOUT)
    pool = quire.PagePool(pages=8, page_size=8)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=16, dtype=torch.float32)
    plain = pool.step({pool.sequence(): 2})
    batch = quire.Batch(plain.page_table, plain.kv_lens, plain.q_starts, shard=cp.shard)
    q = torch.ones(2, 4, 16)
    calls = {
        "heads": lambda: TensorParallel(q_heads=9, kv_heads=3, timeout=TIMEOUT),
        "group of heads": lambda: TensorParallel(q_heads=8, kv_heads=3, timeout=TIMEOUT),
        "slopes": lambda: tp.options(quire.Options(alibi=torch.ones(4))),
        "scales": lambda: tp.scale(torch.ones(1)),
        "axis": lambda: tp.q(torch.ones(2, 5, 16)),
        "mesh": lambda: ContextParallel(mesh),
        "foreign mesh": lambda: ContextParallel(DeviceMesh("cpu", [1 - dist.get_rank()], _init_backend=False)),
        "group": lambda: ContextParallel("cp"),
        "timeout": lambda: ContextParallel(timeout=0),
        "interleave": lambda: ContextParallel(interleave=0),
        "dtype": lambda: ContextParallel(dtype=torch.int8),
        "chunks": lambda: ContextParallel(chunks=0),
        "no shard": lambda: cp.attend(q, cache, plain),
        "other shard": lambda: cp.attend(q, cache, quire.Batch(*batch._tensors().values(), shard=(0, 4, 4))),
        "out": lambda: cp.attend(q, cache, batch, out=torch.empty(2, 4, 8)),
        "fp8 out": lambda: cp.attend(q, cache, batch, out=torch.empty(2, 4, 16, dtype=torch.float8_e4m3fn)),
        "lse": lambda: cp.attend(q, cache, batch, lse=torch.empty(2, 4, dtype=torch.float64)),
        "context form": lambda: cp.attend(q, cache, batch, new=(q, q)),
        "device": lambda: cp.attend(q.to("meta"), cache, batch),
        "weight": lambda: tp.project(torch.ones(2, 4, 16), torch.ones(5, 7)),
        "no weight": lambda: tp.project(torch.ones(2, 4, 16), None),
        "no out": lambda: tp.project(None, None),
        "type of weight": lambda: tp.project(torch.ones(2, 4, 16), torch.ones(5, 64, dtype=torch.bfloat16)),
        "no options": lambda: tp.options(None),
        "no tensor": lambda: tp.reduce([1]),
        "scale": lambda: tp.scale("x"),
    }
    if dist.get_rank() == 1:
        calls["foreign group"] = lambda: ContextParallel(alone)
    return {name: refused(quire.ArgumentError, call) for name, call in calls.items()}


def page() -> None:
    """The Python code of docs/integrations/distributed.md runs, and gives what a single process gives."""
    text = (Path(__file__).parents[2] / "docs" / "integrations" / "distributed.md").read_text()
    generator = torch.Generator().manual_seed(3)
    sizes = {"w_q": (8 * 64, 32), "w_k": (2 * 64, 32), "w_v": (2 * 64, 32), "w_out": (32, 8 * 64), "x": (21, 32)}
    given = {name: torch.randn(*size, generator=generator) * size[1] ** -0.5 for name, size in sizes.items()}
    given |= {"slopes": slopes(8), "sinks": torch.ones(8), "device": torch.device("cpu"), "quire": quire}
    session: dict[str, Any] = {**given, "heads": lambda rows: rows.unflatten(1, (-1, 64))}
    parts = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(parts) == 3
    exec(compile(parts[0], "page", "exec"), session)
    want = session["out"]
    exec(compile(parts[1], "page", "exec"), session)
    assert session["batch"].shard is not None
    # Both are within the budget of their own attention, whose outputs are at most the largest value, and the projection rounds each
    # of 512 products and sums.
    q, k, v = (session[name].double() for name in ("q", "k", "v"))
    top = float((q.norm(dim=-1).max() * k.norm(dim=-1).max()) * 64**-0.5 + slopes(8).max() * len(q))
    lost = 2 * SAFETY_FACTOR * least_loss(top, 0.0) + 2 * 512 * 2.0**-24
    bound = lost * v.abs().max() * given["w_out"].double().abs().sum(1)
    assert ((session["out"].double() - want.double()).abs() <= bound).all()
    exec(compile(parts[2], "page", "exec"), session)
    assert session["cp"].split_heads and session["every"].q_heads == 4 and session["pair"].q_heads == 8


def faults() -> dict[str, float]:
    """The error of each fault that is planted: the checks must see it."""
    return {name: fault() for name, fault in FAULTS.items()}


CHECKS = {
    check.__name__: check
    for check in (
        tensor_parallel, gathered, divided, split_heads, as_on_a_device, rounded_parts, same_bits, shared_prefix, chunks, buffers,
        projection, mismatches, local_errors, *CALL_CHECKS, arguments, page, faults,
    )
}  # fmt: skip
