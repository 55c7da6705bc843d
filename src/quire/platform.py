"""The machine as a value: what the choice of a kernel depends on. Made from a device (`detect`) or by name (`named`)."""

from __future__ import annotations

import platform as host
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from quire.cache.format import FNUZ_FP8, OCP_FP8
from quire.errors import ArgumentError
from quire.keywords import suggestion


@dataclass(frozen=True)
class Platform:
    """A device and what it can do. It is hashable and has no tensors, so that the choice of a kernel can be explained for any
    machine on any machine.

    Example:
        >>> import quire
        >>> print(quire.Platform.named("gfx90a"))
        amd gfx90a: 64 KiB shared memory, warps of 64
    """

    name: str
    """The name of the device, or the name that was asked for."""
    vendor: str
    """nvidia, amd or cpu; 'other' for any other torch device."""
    arch: str
    """sm90, gfx942, x86-64, aarch64, ..."""
    family: str
    """The generation: gfx9, gfx11, gfx12, ... for AMD; elsewhere as `arch`."""
    shared_memory: int = 0
    """Bytes of shared memory of one multiprocessor; 0 on a CPU."""
    warp: int = 1
    """Threads of a warp (AMD: wavefront)."""
    fp8: str | None = None
    """The fp8 format that the hardware supports, None if it supports none."""
    cpu_features: tuple[str, ...] = ()
    """Instruction sets of a CPU, such as avx2 or amx_bf16."""
    multiprocessors: int | None = None
    """Number of multiprocessors (AMD: compute units); None where only the name is known."""

    @property
    def program_memory(self) -> int:
        """Bytes of shared memory that one program can have. NVIDIA's driver keeps 1 KiB of a multiprocessor's for itself."""
        return self.shared_memory - (1024 if self.vendor == "nvidia" else 0)

    @property
    def capability(self) -> int:
        """The compute capability of an NVIDIA GPU, 90 for sm90; 0 elsewhere."""
        return int(self.arch[2:]) if self.vendor == "nvidia" else 0

    @property
    def decodes_fp8(self) -> bool:
        """Whether one instruction converts OCP fp8 to fp16, as on NVIDIA GPUs since sm89."""
        return self.capability >= 89

    @property
    def encodes_fp8(self) -> bool:
        """Whether one instruction converts fp32 to OCP fp8, rounding once and saturating, as on NVIDIA GPUs since sm90. For sm89
        the compiler converts to fp16 first and rounds twice."""
        return self.capability >= 90

    @property
    def launches_dependents(self) -> bool:
        """Whether a kernel can be launched before the one it depends on has ended, as on NVIDIA GPUs since sm90."""
        return self.capability >= 90

    @property
    def compiler_target(self) -> tuple[str, int | str, int]:
        """Backend, architecture and warp width, as Triton's GPUTarget takes them."""
        return ("cuda", self.capability, self.warp) if self.vendor == "nvidia" else ("hip", self.arch, self.warp)

    @classmethod
    def detect(cls, device: torch.device | str | None = None) -> Platform:
        """The platform of a torch device; by default the GPU of this machine, or its CPU if it has none.

        Raises:
            ArgumentError: this machine has no such device.
        """
        wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if wanted.type == "cuda" and wanted.index is None and torch.cuda.is_available():
            wanted = torch.device("cuda", torch.cuda.current_device())
        return _detect(wanted)

    @classmethod
    def named(cls, name: str) -> Platform:
        """A platform by an architecture (sm90, gfx942, aarch64) or by a common name of a GPU (h100, MI300X, rtx-4090), also as
        drivers and tools print it (NVIDIA H100 80GB HBM3, gfx942:sramecc+). The machine need not have such a device.

        Raises:
            ArgumentError: the name is unknown; the message lists all names.
        """
        for word in _spellings(str(name)):
            arch = NICKNAMES.get(word, word)
            if arch in NAMED:
                return NAMED[arch]
        allowed = f"{', '.join(NAMED)}; or a GPU's name, such as {', '.join(_COMMON)}"
        raise ArgumentError("arch", repr(name), allowed + suggestion(str(name), (*NAMED, *NICKNAMES)))

    @property
    def is_only_named(self) -> bool:
        """Whether it is a GPU known by its name, not one that was detected here."""
        return self.vendor in ("nvidia", "amd") and self.multiprocessors is None

    def to_dict(self) -> dict[str, Any]:
        """The platform as JSON-compatible values."""
        return {**asdict(self), "cpu_features": list(self.cpu_features)}

    def __str__(self) -> str:
        facts = [
            f"{self.multiprocessors} multiprocessors" if self.multiprocessors else "",
            f"{self.shared_memory // 1024} KiB shared memory" if self.shared_memory else "",
            f"warps of {self.warp}" if self.warp > 1 else "",
            f"fp8 {self.fp8}" if self.fp8 else "",
            *self.cpu_features,
        ]
        names = " ".join(dict.fromkeys((self.vendor, self.arch, self.name)))
        return ": ".join(filter(None, (names, ", ".join(filter(None, facts)))))


_NOT_A_MODEL = re.compile(
    r"nvidia|amd|geforce|tesla|quadro|instinct|radeon|graphics|gpu|laptop|generation|blackwell|workstation|server|edition|max|q"
    r"|\d+gb|sxm\d?|hbm\d?e?|pcie|oam|nvl\d*"
)
"""Words of a GPU's name that do not tell its architecture: vendor, product line, memory and form factor."""


def _spellings(name: str) -> Iterator[str]:
    """What a name may mean, in lower case and without spaces: all of it, then its words that tell the architecture."""
    whole = name.lower().strip().split(":")[0]  # gfx942:sramecc+:xnack-
    yield re.sub(r"[\s_-]", "", whole).replace("x8664", "x86-64")
    words = [word for word in re.split(r"[\s_-]+", whole) if word and not _NOT_A_MODEL.fullmatch(word)]
    model = "".join(words)
    yield model
    yield "".join(word for word in words if word != "pro")
    yield re.sub(r"^(rtx\d+?)(ti)?(super)?$", r"\1", model)
    yield re.sub(r"^(sm\d+)[af]$", r"\1", model)


def _gpu(arch: str, shared_memory: int, name: str | None = None, multiprocessors: int | None = None) -> Platform:
    """The platform of a GPU, from the name of its architecture."""
    amd = re.fullmatch(r"gfx(\d+)[0-9a-f]{2}", arch)
    if amd:
        generation = int(amd[1])
        family, vendor, warp = f"gfx{generation}", "amd", 64 if generation < 10 else 32
        has_fp8 = arch[:5] in ("gfx94", "gfx95") or generation >= 12
    else:
        family, vendor, warp = arch, "nvidia", 32
        has_fp8 = int(arch.removeprefix("sm")) >= 89
    fp8 = (FNUZ_FP8 if arch.startswith("gfx94") else OCP_FP8).name if has_fp8 else None
    return Platform(name or arch, vendor, arch, family, shared_memory, warp, fp8, multiprocessors=multiprocessors)


_SHARED_MEMORY_KIB = {
    "sm75": 64,
    "sm80": 164,
    "sm86": 100,
    "sm87": 164,
    "sm89": 100,
    "sm90": 228,
    "sm100": 228,
    "sm103": 228,
    "sm120": 100,
    "sm121": 100,
    "gfx900": 64,
    "gfx906": 64,
    "gfx908": 64,
    "gfx90a": 64,
    "gfx942": 64,
    "gfx950": 160,
    "gfx1030": 64,
    "gfx1100": 64,
    "gfx1101": 64,
    "gfx1102": 64,
    "gfx1151": 64,
    "gfx1200": 64,
    "gfx1201": 64,
    "gfx1250": 320,
}

INTERPRETER = Platform("interpreter", "interpreter", "interpreter", "interpreter", multiprocessors=3)
"""Triton's interpreter, which runs kernels on the CPU: for tests."""

NAMED: dict[str, Platform] = {
    **{arch: _gpu(arch, kib * 1024) for arch, kib in _SHARED_MEMORY_KIB.items()},
    # CPUs by name have the baseline features of their architecture only; `detect` adds those of this CPU.
    "cpu": Platform("cpu", "cpu", "x86-64", "x86-64"),
    "x86-64": Platform("x86-64", "cpu", "x86-64", "x86-64"),
    "aarch64": Platform("aarch64", "cpu", "aarch64", "aarch64", cpu_features=("asimd",)),
}

_SOLD_AS = {
    "sm75": "t4 rtx2060 rtx2070 rtx2080 rtx2080ti",
    "sm80": "a100 a800 a30",
    "sm86": "a10 a10g a16 a2 a40 a4000 a5000 a6000 rtxa4000 rtxa5000 rtxa6000 rtx3050 rtx3060 rtx3070 rtx3080 rtx3090",
    "sm87": "orin",
    "sm89": "l4 l40 l40s l20 rtx4050 rtx4060 rtx4070 rtx4080 rtx4090 rtx4000ada rtx5000ada rtx6000ada",
    "sm90": "h100 h200 h800 h20 gh200",
    "sm100": "b200 gb200 b100",
    "sm103": "b300 gb300",
    "sm120": "rtx5050 rtx5060 rtx5070 rtx5080 rtx5090 rtxpro6000",
    "sm121": "gb10 dgxspark",
    "gfx906": "mi50 mi60 radeonvii",
    "gfx908": "mi100",
    "gfx90a": "mi200 mi210 mi250 mi250x",
    "gfx942": "mi300 mi300x mi300a mi308x mi325x",
    "gfx950": "mi350 mi350x mi355x",
    "gfx1030": "rx6800 rx6800xt rx6900xt w6800",
    "gfx1100": "rx7900xtx rx7900xt w7900",
    "gfx1101": "rx7800xt rx7700xt w7700",
    "gfx1102": "rx7600",
    "gfx1151": "strixhalo ryzenaimax395",
    "gfx1200": "rx9060xt",
    "gfx1201": "rx9070 rx9070xt r9700",
}
_COMMON = tuple("h100 h200 b200 a100 l4 l40s rtx4090 rtx5090 mi250 mi300x mi325x mi355x rx7900xtx rx9070xt".split())
_ARCH_OF = {name: arch for arch, names in _SOLD_AS.items() for name in names.split()}
NICKNAMES: dict[str, str] = {name: _ARCH_OF[name] for name in (*_COMMON, *_ARCH_OF)}
"""The architecture of a GPU by the name it is sold under, in lower case and without spaces, the most common first."""

_CPU_ARCHES = {"x86_64": "x86-64", "amd64": "x86-64", "arm64": "aarch64"}
_CPU_FEATURES = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)


def cpu_flags() -> frozenset[str]:
    """Every feature flag that the operating system reports; empty if there is no /proc/cpuinfo."""
    try:
        with open("/proc/cpuinfo") as file:
            text = file.read()
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


@cache
def _detect(device: torch.device) -> Platform:
    if device.type == "cpu":
        machine = host.machine().lower()
        arch, flags = _CPU_ARCHES.get(machine, machine), cpu_flags()
        return Platform("cpu", "cpu", arch, arch, cpu_features=tuple(name for name in _CPU_FEATURES if name in flags))
    if device.type != "cuda":
        return Platform(device.type, "other", device.type, device.type)
    if not torch.cuda.is_available():
        raise ArgumentError("device", repr(str(device)), "cpu: torch sees no CUDA or ROCm device here")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ArgumentError("device", repr(str(device)), f"cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    found = torch.cuda.get_device_properties(device)
    amd = torch.version.hip is not None
    arch = found.gcnArchName.split(":")[0] if amd else f"sm{found.major}{found.minor}"
    # torch does not report this for every ROCm device; AMD GPUs have had at least 64 KiB since gfx9.
    shared_memory = getattr(found, "shared_memory_per_multiprocessor", 1024 * _SHARED_MEMORY_KIB.get(arch, 64))
    return _gpu(arch, shared_memory, found.name, found.multi_processor_count)
