"""Sample calls to compile for, for documents and tests. Their tensors have no memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.cache.format import FORMATS
from quire.kernels.triton.host.audit import AuditLauncher
from quire.kernels.triton.host.launcher import AttendLauncher, Launcher
from quire.kernels.triton.host.program import as_bytes
from quire.kernels.triton.host.recipe import Recipe
from quire.kernels.triton.host.shared import SharedLauncher
from quire.kernels.triton.host.specimen import specimen
from quire.kernels.triton.host.tuning import AUDIT, SMALL, SMALL_GLUON, SMALLEST, WRITE
from quire.kernels.triton.host.write import WriteLauncher
from quire.platform import Platform
from quire.problem import Extent, Problem


@dataclass(frozen=True)
class KernelSample:
    """A call of one kernel. Every member goes to JSON and back.

    >>> print(KernelSample("decode", head_dim=64, format="fp16"))
    decode of head_dim 64, fp16
    """

    kernel: str
    """decode, mixed, shared, gluon, write, or audit."""
    head_dim: int = 128
    format: str = "bf16"
    """The cache's."""
    q_dtype: str = "bf16"
    out_dtype: str = "bf16"
    q_heads: int = 32
    kv_heads: int = 8
    page_size: int = 16
    seqs: int = 64
    max_kv_len: int = 4096
    index: str = "int32"
    scales: str = "tensor"
    """tensor, head or token, if the format has them."""
    new: bool = False
    """Whether new keys and values are passed as arguments."""
    lse: bool = False
    small: bool = False
    """Whether it is compiled with the smallest tiles."""
    problem: dict[str, Any] = field(default_factory=dict)
    """Further fields of `Problem`."""

    def launcher(self, platform: Platform) -> Launcher:
        """What launches such calls."""
        problem = self.as_problem()
        if self.kernel == "write":
            return WriteLauncher(problem, platform, SMALLEST if self.small else WRITE)
        if self.kernel == "audit":
            return AuditLauncher(problem, platform, SMALLEST if self.small else AUDIT)
        if self.kernel == "gluon":
            from quire.kernels.gluon.launcher import HopperLauncher

            return HopperLauncher(problem, platform, *((SMALL_GLUON, SMALL) if self.small else ()))
        if self.kernel == "shared":
            return SharedLauncher(problem, platform, SMALL if self.small else None)
        return AttendLauncher(self.kernel, problem, platform, SMALL if self.small else None)

    def as_problem(self) -> Problem:
        fields: dict[str, Any] = {
            "q_heads": self.q_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "page_size": self.page_size,
            "format": self.format,
            "q_dtype": self.q_dtype,
            "out_dtype": self.out_dtype,
            "scales": self.scales if FORMATS[self.format].scaled else "none",
            "form": "context" if self.new else "full",
            "index": self.index,
            "lse": self.lse,
            "device": "cuda:0",
            "prefixes": self.kernel == "shared",
        }
        return Problem(**fields | self.problem)

    @property
    def extent(self) -> Extent:
        tokens = self.seqs if self.kernel in ("decode", "shared") else 8192
        return Extent(self.seqs, tokens, tokens // self.seqs, self.max_kv_len)

    def recipes(self, arch: str) -> list[Recipe]:
        """What is compiled for such a call on a GPU, in the order of its launches."""
        launcher, extent = self.launcher(Platform.named(arch)), self.extent
        launches = launcher.launches(specimen(launcher.problem, extent), extent, as_bytes)
        programs = {program: arguments for program, _, arguments, _ in launches}
        return [program.recipe(arguments) for program, arguments in programs.items()]

    def __str__(self) -> str:
        facts = [f"head_dim {self.head_dim}", self.format]
        return f"{self.kernel} of {', '.join(facts)}"
