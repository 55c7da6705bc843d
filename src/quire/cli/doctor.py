"""`quire doctor`: the machine, the versions, which kernels can run here, and whether they are right."""

from __future__ import annotations

import argparse
import json
import platform as host
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch

import quire
from quire.cache.format import FORMATS, Format
from quire.cache.ledger import Ledger
from quire.cli import version
from quire.contract.call import Call
from quire.dispatch.catalogue import CATALOGUE
from quire.dispatch.choose import OPERATIONS, choose
from quire.dispatch.kernel import BUILD
from quire.kernels.native import library
from quire.launch import launcher_for
from quire.platform import Platform, cpu_flags
from quire.problem import Extent, Problem

HELP = "show the machine and its kernels, and check each kernel against the reference"
EXAMPLES = """\
examples:
  quire doctor           for people
  quire doctor --json    for programs and bug reports

exit status: 0 if every kernel that can run here is right, 1 otherwise
"""

PACKAGES = ("torch", "triton", "numpy")
AMX_NOTE = (
    "this CPU advertises AMX under a hypervisor: where the hypervisor hides AMX's palette, torch's own bf16 matmul dies with "
    "SIGILL. Quire's kernels do not call it; for other torch code set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before Python starts."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--check", nargs=2, metavar=("KERNEL", "DEVICE"), help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if args.check:
        print(json.dumps(self_check(*args.check)))
        return 0
    report = examine()
    print(json.dumps(report, indent=2) if args.json else _text(report))
    return 0 if report["healthy"] else 1


def examine() -> dict[str, Any]:
    """Everything the doctor knows, ready for JSON."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    kernels = [row for device in devices for row in _kernels(device)]
    return {
        "versions": {"python": host.python_version(), "quire": quire.__version__, **{name: version(name) for name in PACKAGES}},
        "machine": {device: Platform.detect(device).to_dict() for device in devices},
        "notes": [_native(), _compile_cache(), *([AMX_NOTE] if {"amx_bf16", "hypervisor"} <= cpu_flags() else [])],
        "kernels": kernels,
        "healthy": not any(row["fault"] or any(check["ok"] is False for check in row["checks"]) for row in kernels),
    }


def _native() -> str:
    """Which instruction set the native kernels use here, or why there are none and what would help."""
    if not library.FILE.exists():
        return f"the native CPU kernels are not built, so torch's operators run on this CPU; to get them: {BUILD}"
    try:
        found = library.library()
    except quire.KernelError as error:
        return str(error)
    *others, best = found.levels
    return f"the native CPU kernels use {best}" + (f"; this CPU also runs {', '.join(others)}" if others else "")


def _compile_cache() -> str:
    """Where compiled GPU kernels are kept."""
    if find_spec("triton") is None:
        return "Triton is not installed, so there is no compile cache"
    from triton import knobs

    return f"compiled GPU kernels are kept in {knobs.cache.dir}"


def _kernels(device: str) -> Iterator[dict[str, Any]]:
    """Every kernel of the catalogue on a device: why it cannot run there, or what its check says."""
    platform = Platform.detect(device)
    problem = Problem(q_heads=8, kv_heads=2, head_dim=64, page_size=16, device=device)
    extent = Extent(seqs=4, tokens=19, max_q_len=16, max_kv_len=64)
    answers: dict[str, tuple[dict[str, list[dict[str, Any]]], str | None]] = {}
    for operation in OPERATIONS:
        for kernel, findings in choose(problem, extent, platform, operation=operation).candidates:
            refusals = [str(finding) for finding in findings if not finding.holds]
            if not refusals and kernel.name not in answers:
                answers[kernel.name] = ask((sys.executable, "-m", "quire", "doctor", "--check", kernel.name, device))
            checks, fault = ({}, None) if refusals else answers[kernel.name]
            row = {"operation": operation, "kernel": kernel.name, "device": device, "summary": kernel.summary}
            yield {**row, "refusals": refusals, "checks": checks.get(operation, []), "fault": fault}


def ask(command: Sequence[str], patience: float = 600) -> tuple[dict[str, list[dict[str, Any]]], str | None]:
    """The checks that a child process prints, and what went wrong with it. A child, because a kernel at fault may take its
    process with it."""
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return {}, f"gave no answer in {patience:g} s"
    if child.returncode < 0:
        return {}, f"died with {signal.Signals(-child.returncode).name}"
    if child.returncode:
        return {}, (child.stderr.strip().splitlines() or [f"ended with status {child.returncode}"])[-1]
    return json.loads(child.stdout), None


def self_check(kernel: str, device: str) -> dict[str, list[dict[str, Any]]]:
    """Every operation of a kernel on a small mixed batch, against the reference, in three types. Unwritten slots hold NaN."""
    platform = Platform.detect(device)
    rows: dict[str, list[dict[str, Any]]] = {}
    for operation, measure in (("attend", _attend_error), ("write", _write_error), ("audit", _audit_error)):
        if not any(k.name == kernel and k.operation == operation for k in CATALOGUE):
            continue
        for name, q_dtype, format, allowed in (
            ("fp32", torch.float32, "fp32", 1e-5),
            ("bf16", torch.bfloat16, "bf16", 2e-2),
            ("fp8", torch.bfloat16, platform.fp8 or "e4m3fn", 2e-2),
        ):
            row: dict[str, Any] = {
                "type": name,
                "error": None,
                "allowed": allowed if operation == "attend" else 0,
                "ok": None,
                "refused": None,
            }
            try:
                row["error"] = measure(kernel, Sample(q_dtype, FORMATS[format], device))
                row["ok"] = row["error"] <= row["allowed"]
            except quire.KernelError as error:
                row["refused"] = str(error)
            rows.setdefault(operation, []).append(row)
    return rows


class Sample:
    """A mixed batch of four sequences, the same in every run: a prefill, a chunk over a context, two decodes."""

    q_lens, contexts = (5, 1, 12, 1), (0, 40, 21, 63)
    page_size, pages, q_heads, kv_heads, head_dim = 16, 24, 8, 2, 64

    def __init__(self, q_dtype: torch.dtype, format: Format, device: str):
        self.format, self.device, self.scale = format, device, 0.5 if format.quantised else None
        self.lens = [context + q_len for context, q_len in zip(self.contexts, self.q_lens)]
        chance = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=chance, device="cpu").to(device)

        self.q = normal(sum(self.q_lens), self.q_heads, self.head_dim).to(q_dtype)
        self.k, self.v = ([normal(n, self.kv_heads, self.head_dim).to(q_dtype) for n in self.lens] for _ in "kv")
        self.table = torch.randperm(self.pages, generator=chance, device="cpu").view(len(self.lens), -1).to(device)
        starts = torch.tensor((0, *self.q_lens), device=device).cumsum(0)
        self.batch = quire.Batch(self.table, torch.tensor(self.lens, device=device), starts)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values as the cache holds them."""
        return self.format.encode(x.float() / (self.scale or 1.0))

    def cache(self, first: Sequence[int]) -> quire.KVCache:
        """A cache that holds each sequence from `first` on; everything else is NaN."""
        shape = (self.pages, self.page_size, self.kv_heads, self.head_dim)
        k, v = (torch.full(shape, torch.nan, device=self.device).to(self.format.dtype) for _ in "kv")
        cache = quire.KVCache.wrap(k, v, layout="nhd", format=self.format.name, k_scale=self.scale, v_scale=self.scale)
        for row, (start, end) in enumerate(zip(first, self.lens)):
            at = torch.arange(start, end, device=self.device)
            slots = self.table[row, at // self.page_size] * self.page_size + at % self.page_size
            for pages, x in ((cache.k_bytes, self.k[row]), (cache.v_bytes, self.v[row])):
                pages.view(-1, self.kv_heads, self.head_dim)[slots] = self.stored(x[start:]).view(pages.dtype)
        return cache


def _attend_error(kernel: str, sample: Sample) -> float:
    """The largest distance from the reference."""
    out = quire.attend(sample.q, sample.cache([0] * len(sample.lens)), sample.batch, kernel=kernel)
    read = [[sample.stored(x).float() * (sample.scale or 1.0) for x in part] for part in (sample.k, sample.v)]
    want = [quire.reference.attention(q, k, v)[0] for q, k, v in zip(sample.q.split(sample.q_lens), *read)]
    error = (out.double() - torch.cat(want)).abs().max()
    return float(error.nan_to_num(torch.inf))


def _write_error(kernel: str, sample: Sample) -> int:
    """How many bytes of the cache differ from what they should be."""
    cache, want = sample.cache(sample.lens), sample.cache(sample.contexts)
    k, v = (torch.cat([x[-n:] for x, n in zip(part, sample.q_lens)]) for part in (sample.k, sample.v))
    quire.write(k, v, cache, sample.batch, kernel=kernel)
    pairs = ((cache.k, want.k), (cache.v, want.v))
    return sum(int((got.view(torch.uint8) != wanted.view(torch.uint8)).sum()) for got, wanted in pairs)


def _audit_error(kernel: str, sample: Sample) -> int:
    """How far the check of the ledger is from counting the one token that it was not told of."""
    cache = sample.cache([0] * len(sample.lens))
    cache.ledger = Ledger(cache.pages, cache.page_size, cache.device)
    for row, length in enumerate(sample.lens):
        at = torch.arange(1 if row == 2 else 0, length, device=sample.device)
        cache.ledger.record(sample.table[row, at // cache.page_size] * cache.page_size + at % cache.page_size, at)
    call = Call(cache, sample.batch, sample.q)
    launcher_for("audit", call, kernel)(call)
    report = cache.ledger.report()
    return 1 if report is None else abs(report.missing - 1)


def _text(report: dict[str, Any]) -> str:
    lines = ["versions", "  " + ", ".join(f"{name} {number}" for name, number in report["versions"].items()), "machine"]
    lines += [f"  {Platform.detect(device)}" for device in report["machine"]]
    lines += [f"  note: {note}" for note in report["notes"]]
    lines.append("kernels")
    for row in report["kernels"]:
        lines.append(f"  {row['operation']:6} {row['kernel']} on {row['device']}: {_verdict(row)}")
    healthy = "every kernel that can run here is right" if report["healthy"] else "a kernel that says it runs here is wrong"
    return "\n".join((*lines, f"verdict: {healthy}"))


def _verdict(row: dict[str, Any]) -> str:
    if row["refusals"]:
        return f"cannot run here ({'; '.join(row['refusals'])})"
    if row["fault"]:
        return f"WRONG: {row['fault']}"
    words = {
        True: "right in {type} (error {error:.2g})",
        False: "WRONG in {type} (error {error:.2g}, allowed {allowed:g})",
        None: "no {type}",
    }
    return ", ".join(words[check["ok"]].format(**check) for check in row["checks"])
