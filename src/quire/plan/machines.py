"""Published limits of GPUs, and what `--gpus` means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from quire.errors import ArgumentError
from quire.keywords import suggestion


@dataclass(frozen=True)
class Machine:
    """One kind of GPU as its data sheet describes it: dense rates without sparsity, per GPU."""

    name: str
    platform: str
    """Its name in `quire.Platform.named`."""
    multiprocessors: int
    bandwidth: float
    """Bytes per second of its memory."""
    flops: float
    """16-bit floating-point operations per second."""
    fp8_flops: float
    """8-bit ones; 0 if the hardware has none."""
    memory: float
    """Bytes."""
    link: float
    """Bytes per second and direction to the other GPUs of a node."""
    link_name: str
    per_node: int = 8
    network: float = 50e9
    """Bytes per second, direction and GPU to other nodes."""


_T, _G = 1e12, 1e9
_TABLE = (
    # name, platform, multiprocessors, bandwidth, 16-bit and 8-bit FLOP/s, memory, link
    Machine("H200", "h200", 132, 4.8 * _T, 989 * _T, 1979 * _T, 141 * _G, 450 * _G, "NVLink 4"),
    Machine("H100", "h100", 132, 3.35 * _T, 989 * _T, 1979 * _T, 80 * _G, 450 * _G, "NVLink 4"),
    Machine("H100-PCIe", "h100", 114, 2.0 * _T, 756 * _T, 1513 * _T, 80 * _G, 64 * _G, "PCIe 5"),
    Machine("A100", "a100", 108, 2.039 * _T, 312 * _T, 0.0, 80 * _G, 300 * _G, "NVLink 3", network=25 * _G),
    Machine("A100-40GB", "a100", 108, 1.555 * _T, 312 * _T, 0.0, 40 * _G, 300 * _G, "NVLink 3", network=25 * _G),
    Machine("B200", "b200", 148, 8.0 * _T, 2250 * _T, 4500 * _T, 180 * _G, 900 * _G, "NVLink 5"),
    Machine("L40S", "l40s", 142, 0.864 * _T, 362 * _T, 733 * _T, 48 * _G, 32 * _G, "PCIe 4", network=25 * _G),
    Machine("L4", "l4", 58, 0.3 * _T, 121 * _T, 242 * _T, 24 * _G, 32 * _G, "PCIe 4", network=12.5 * _G),
    Machine("MI300X", "mi300x", 304, 5.3 * _T, 1307 * _T, 2615 * _T, 192 * _G, 448 * _G, "Infinity Fabric"),
    Machine("MI325X", "mi325x", 304, 6.0 * _T, 1307 * _T, 2615 * _T, 256 * _G, 448 * _G, "Infinity Fabric"),
    Machine("MI355X", "mi355x", 256, 8.0 * _T, 2516 * _T, 5033 * _T, 288 * _G, 537.6 * _G, "Infinity Fabric"),
)
MACHINES: dict[str, Machine] = {machine.name.lower(): machine for machine in _TABLE}
MOST_GPUS = 4096
"""The most GPUs of a cluster."""
MEASURED = "H200"
"""The GPU that the times of the model were measured on."""


class Cluster(NamedTuple):
    """So many GPUs of one kind, in nodes of `machine.per_node`."""

    machine: Machine
    gpus: int

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.machine.per_node)

    def __str__(self) -> str:
        nodes = f" in {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.gpus} x {self.machine.name}{nodes}"


def cluster_of(given: str) -> Cluster:
    """`8xH200`, `H100`, `16 x MI300X`: the number of GPUs (1 if left out) and their kind.

    Raises:
        ArgumentError: the number or the name is not allowed; the message lists the names and suggests one.
    """
    found = re.fullmatch(r"\s*(?:(\d+)\s*[x*]\s*)?(\S.*?)\s*", given, re.IGNORECASE)
    names = ", ".join(machine.name for machine in MACHINES.values())
    if found is None:
        raise ArgumentError("--gpus", repr(given), f"a number and a GPU, such as 8xH200; GPUs: {names}")
    count, word = int(found[1] or 1), re.sub(r"[\s_]+", "-", found[2].lower())
    machine = MACHINES.get(word) or MACHINES.get(re.sub(r"^(nvidia|amd|instinct)-|-(sxm\d?|oam|80gb|hbm3e?)$", "", word))
    if machine is None:
        raise ArgumentError("--gpus", repr(given), f"a number and a GPU, such as 8xH200; GPUs: {names}{suggestion(word, MACHINES)}")
    if not 1 <= count <= MOST_GPUS:
        raise ArgumentError("--gpus", repr(given), f"1 to {MOST_GPUS} GPUs")
    if count not in allowed_counts(machine):
        raise ArgumentError(
            "--gpus", repr(given), f"whole nodes: at most {machine.per_node} GPUs, or a multiple of {machine.per_node}"
        )
    return Cluster(machine, count)


def allowed_counts(machine: Machine) -> list[int]:
    """The numbers of GPUs that a cluster can have, in ascending order: those within a node, then whole nodes."""
    return [*range(1, machine.per_node), *range(machine.per_node, MOST_GPUS + 1, machine.per_node)]
