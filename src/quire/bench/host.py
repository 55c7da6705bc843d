"""The host overhead of a call on a CPU: `attend` and `step`, their kernels alone, and one small torch operator, in one run.

    python -m quire.bench.host

Each is timed in short bursts, in turn with the others. The fastest burst counts: slower ones include other work of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import quire
from quire.contract.call import Call
from quire.contract.check import enforce
from quire.kernels.native import attend, write
from quire.kernels.native.library import FILE, library
from quire.options import PLAIN

SIZES = (1, 256)
"""Sequences of the batches that are measured, one new token each."""
REPETITIONS = 60


class HostTiming(NamedTuple):
    """Microseconds of one operation over a batch of decodes."""

    operation: str
    """attend or step."""
    seqs: int
    kv_len: int
    total: float
    """The public function."""
    kernel: float
    """Its native kernels alone, called with prepared arguments."""
    checks: float
    """The contract checks of such a call, for a batch that was checked before."""
    first_checks: float
    """The same for a new batch."""
    launch: float
    """The native kernels, their arguments prepared from tensors included."""
    operator: float
    """One small torch operator: an addition of 16 numbers."""

    @property
    def overhead(self) -> float:
        """What the public function takes beyond its kernels."""
        return self.total - self.kernel

    @property
    def operators(self) -> float:
        """The public function, in small torch operators."""
        return self.total / self.operator


def measure_cpu_host(sizes: tuple[int, ...] = SIZES, kv_len: int = 16, repetitions: int = REPETITIONS) -> Iterator[HostTiming]:
    """A timing of `attend` and one of `step`, for each number of sequences. Needs the native kernels."""
    if not FILE.exists():
        raise quire.KernelError("the native kernels are not built here: there is no kernel to compare with")
    return (timing for seqs in sizes for timing in _measure(seqs, kv_len, repetitions))


def report(rows: list[HostTiming]) -> str:
    """The rows as a table. In brackets: as a multiple of one small torch operator."""
    lines = [f"{'microseconds':24}{'total':>18}{'kernel':>10}{'beyond it':>18}{'checks':>9}{'first':>9}{'launch':>9}"]
    for row in rows:
        name = f"{row.operation}, {row.seqs} x {row.kv_len} keys"
        total, beyond = f"{row.total:.1f} ({row.operators:.0f}x)", f"{row.overhead:.1f} ({row.overhead / row.operator:.0f}x)"
        rest = f"{row.checks:9.1f}{row.first_checks:9.1f}{row.launch - row.kernel:9.1f}"
        lines.append(f"{name:24}{total:>18}{row.kernel:10.1f}{beyond:>18}{rest}")
    operator = min((row.operator for row in rows), default=0.0)
    return "\n".join([*lines, f"one small torch operator: {operator:.2f} microseconds"])


def _measure(seqs: int, kv_len: int, repetitions: int) -> list[HostTiming]:
    pool = quire.PagePool(seqs * (kv_len // 16 + 2), 16)
    cache = quire.KVCache.allocate(pool, kv_heads=8, head_dim=128)
    owners = [pool.sequence() for _ in range(seqs)]
    torch.manual_seed(0)
    k, v = (torch.randn(seqs * (kv_len - 1), 8, 128, device="cpu").bfloat16() for _ in range(2))
    quire.write(k, v, cache, pool.step(dict.fromkeys(owners, kv_len - 1)))
    batch = pool.step(dict.fromkeys(owners, 1))
    q, k, v = torch.randn(seqs, 32, 128, device="cpu").bfloat16(), k[:seqs].clone(), v[:seqs].clone()
    out, number = torch.empty_like(q), torch.ones(16, device="cpu")

    def read() -> None:
        attend.launch(q, cache, batch, PLAIN, None, out, None)

    def store() -> None:
        write.launch(k, v, cache, batch, None)

    def forget() -> None:
        batch.validated = None

    def both(first: Callable[[], Any], second: Callable[[], Any]) -> None:
        first()
        second()

    def check_attend() -> None:
        enforce("attend", Call(cache, batch, q), "auto")

    def check_step() -> None:
        enforce("step", Call(cache, batch, q, k=k, v=v), "auto")

    bare_read, bare_store = _bare("attend", read), _bare("write", store)
    what: dict[str, Callable[[], Any]] = {
        "operator": lambda: number + number,
        "attend": lambda: quire.attend(q, cache, batch),
        "attend kernel": bare_read,
        "attend checks": check_attend,
        "attend first": lambda: both(forget, check_attend),
        "attend launch": read,
        "step": lambda: quire.step(q, k, v, cache, batch),
        "step kernel": lambda: both(bare_store, bare_read),
        "step checks": check_step,
        "step first": lambda: both(forget, check_step),
        "step launch": lambda: both(store, read),
    }
    found = _fastest(what, repetitions)
    rows = []
    for name in ("attend", "step"):
        kernel, checks, first, launch = (found[f"{name} {part}"] for part in ("kernel", "checks", "first", "launch"))
        rows.append(HostTiming(name, seqs, kv_len, found[name], kernel, checks, first, launch, found["operator"]))
    return rows


def _bare(name: str, launch: Callable[[], None]) -> Callable[[], Any]:
    """The library call of a launch, with its arguments already packed."""
    native = library()
    packed: list[bytes] = []
    setattr(native, name, packed.append)
    try:
        launch()
    finally:
        delattr(native, name)
    function = getattr(native.calls, f"quire_{name}")
    return lambda: function(packed[0])


def _fastest(what: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """The microseconds of each in its fastest burst. A burst is shorter than a time slice of the operating system."""
    best, calls = dict.fromkeys(what, float("inf")), {}
    for name, run in what.items():
        run()
        start = time.perf_counter()
        run()
        calls[name] = max(1, min(100, int(1e-3 / max(1e-7, time.perf_counter() - start))))
    for _ in range(repetitions):
        for name, run in what.items():
            run()  # all start with the same caches, whichever ran before
            start = time.perf_counter()
            for _ in range(calls[name]):
                run()
            best[name] = min(best[name], (time.perf_counter() - start) / calls[name] * 1e6)
    return best


if __name__ == "__main__":
    print(report(list(measure_cpu_host())))
