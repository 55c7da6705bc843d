"""Checks one kernel on this machine against the reference, with a small mixed batch: `quire doctor` runs it in a subprocess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import quire
from quire.cache.format import FORMATS, Format
from quire.cache.ledger import Ledger
from quire.cli.problem_options import own_fp8
from quire.contract.call import Call
from quire.dispatch.catalogue import CATALOGUE
from quire.launch import launcher_for
from quire.platform import Platform


def self_check(kernel: str, device: str) -> dict[str, list[dict[str, Any]]]:
    """Every operation of a kernel on a small mixed batch, against the reference, in three types. Unwritten slots hold NaN."""
    platform = Platform.detect(device)
    rows: dict[str, list[dict[str, Any]]] = {}
    for operation, measure in (("attend", _attend_error), ("write", _write_error), ("audit", _audit_error)):
        shares = [one.shares for one in CATALOGUE if one.name == kernel and one.operation == operation]
        if not shares:
            continue
        for name, q_dtype, format, allowed in (
            ("fp32", torch.float32, "fp32", 1e-5),
            ("bf16", torch.bfloat16, "bf16", 2e-2),
            ("fp8", torch.bfloat16, own_fp8(platform), 2e-2),
        ):
            row: dict[str, Any] = {
                "type": name,
                "error": None,
                "allowed": allowed if operation == "attend" else 0,
                "ok": None,
                "refused": None,
            }
            try:
                row["error"] = measure(kernel, CheckBatch(q_dtype, FORMATS[format], device, shares[0]))
                row["ok"] = row["error"] <= row["allowed"]
            except quire.KernelError as error:
                row["refused"] = str(error)
            rows.setdefault(operation, []).append(row)
    return rows


class CheckBatch:
    """A mixed batch of four sequences, the same in every run: a prefill, a chunk over a context, two decodes. For kernels that
    read shared prefixes once, all sequences begin with the same pages, so many that this saves at least `saved_keys` reads."""

    q_lens = (5, 1, 12, 1)
    page_size, q_heads, kv_heads, head_dim = 16, 8, 2, 64

    def __init__(self, q_dtype: torch.dtype, format: Format, device: str, saved_keys: int = 0):
        self.format, self.device, self.scale = format, device, 0.5 if format.quantised else None
        shared = -(-saved_keys // (len(self.q_lens) - 1) // self.page_size)  # columns of the table
        common = shared * self.page_size
        self.contexts = tuple(common + own for own in (0, 40, 21, 63))
        self.lens = [context + q_len for context, q_len in zip(self.contexts, self.q_lens)]
        self.pages = shared + 24
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device="cpu").to(device)

        self.q = normal(sum(self.q_lens), self.q_heads, self.head_dim).to(q_dtype)
        self.k, self.v = ([normal(n, self.kv_heads, self.head_dim).to(q_dtype) for n in self.lens] for _ in "kv")
        for part in (self.k, self.v):
            for x in part[1:]:
                x[:common] = part[0][:common]
        ids = torch.randperm(self.pages, generator=generator, device="cpu").to(device)
        own = ids[shared:].view(len(self.lens), -1)
        self.table = torch.cat((ids[:shared].expand(len(own), -1), own), 1)
        starts = torch.tensor((0, *self.q_lens), device=device).cumsum(0)
        everyone = range(len(self.lens))
        prefixes = quire.Prefixes([(everyone, 0, shared)], len(self.lens), device) if shared else None
        self.batch = quire.Batch(self.table, torch.tensor(self.lens, device=device), starts, prefixes=prefixes)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values as the cache holds them."""
        return self.format.encode(x.float() / (self.scale or 1.0))

    def cache(self, first: Sequence[int]) -> quire.KVCache:
        """A cache that holds each sequence from `first` on; everything else is NaN."""
        shape = (self.pages, self.page_size, self.kv_heads, self.head_dim)
        k, v = (torch.full(shape, torch.nan, device=self.device).to(self.format.dtype) for _ in "kv")
        cache = quire.KVCache.wrap(k, v, layout="nhd", format=self.format.name, k_scale=self.scale, v_scale=self.scale)
        for seq, (start, end) in enumerate(zip(first, self.lens)):
            at = torch.arange(start, end, device=self.device)
            slots = self.table[seq, at // self.page_size] * self.page_size + at % self.page_size
            for pages, x in ((cache.k_bytes, self.k[seq]), (cache.v_bytes, self.v[seq])):
                pages.view(-1, self.kv_heads, self.head_dim)[slots] = self.stored(x[start:]).view(pages.dtype)
        return cache


def _attend_error(kernel: str, sample: CheckBatch) -> float:
    """The largest distance from the reference."""
    out = quire.attend(sample.q, sample.cache([0] * len(sample.lens)), sample.batch, kernel=kernel)
    read = [[sample.stored(x).float() * (sample.scale or 1.0) for x in part] for part in (sample.k, sample.v)]
    want = [quire.reference.attention(q, k, v)[0] for q, k, v in zip(sample.q.split(sample.q_lens), *read)]
    error = (out.double() - torch.cat(want)).abs().max()
    return float(error.nan_to_num(torch.inf))


def _write_error(kernel: str, sample: CheckBatch) -> int:
    """How many bytes of the cache differ from what they should be."""
    cache, want = sample.cache(sample.lens), sample.cache(sample.contexts)
    k, v = (torch.cat([x[-n:] for x, n in zip(part, sample.q_lens)]) for part in (sample.k, sample.v))
    quire.write(k, v, cache, sample.batch, kernel=kernel)
    pairs = ((cache.k, want.k), (cache.v, want.v))
    return sum(int((got.view(torch.uint8) != wanted.view(torch.uint8)).sum()) for got, wanted in pairs)


def _audit_error(kernel: str, sample: CheckBatch) -> int:
    """The difference between the missing tokens that the audit counts and the one that the ledger does not have."""
    cache = sample.cache([0] * len(sample.lens))
    cache.ledger = Ledger(cache.pages, cache.page_size, cache.device)
    for seq, length in enumerate(sample.lens):
        at = torch.arange(1 if seq == 2 else 0, length, device=sample.device)
        cache.ledger.record(sample.table[seq, at // cache.page_size] * cache.page_size + at % cache.page_size, at)
    call = Call(cache, sample.batch, sample.q)
    launcher_for("audit", call, kernel)(call)
    report = cache.ledger.report()
    return 1 if report is None else abs(report.missing - 1)
