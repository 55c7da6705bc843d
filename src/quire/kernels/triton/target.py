"""The card a kernel is compiled for, as a value: looked up for a device, or made by name without one."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Target(NamedTuple):
    """What tuning asks about a card."""

    arch: str
    """sm90, gfx942, ...; 'interpreter' where kernels run in Triton's interpreter."""
    multiprocessors: int

    @property
    def hardware_e4m3fn(self) -> bool:
        """Whether it converts e4m3fn to fp16 in one instruction, as NVIDIA's do since sm89."""
        return self.arch.startswith("sm") and int(self.arch[2:]) >= 89

    @property
    def hardware_encodes(self) -> bool:
        """Whether it converts fp32 to e4m3fn and e5m2 in one instruction that rounds once and saturates, as NVIDIA's do since sm90.
        For sm89 the compiler goes by way of fp16, and rounds twice."""
        return self.arch.startswith("sm") and int(self.arch[2:]) >= 90

    @property
    def launches_early(self) -> bool:
        """Whether a kernel can be launched before the one it depends on has ended, as on NVIDIA's since sm90."""
        return self.arch.startswith("sm") and int(self.arch[2:]) >= 90


@cache
def target_of(device: torch.device) -> Target:
    if device.type != "cuda":
        return Target("interpreter", 3)
    found = torch.cuda.get_device_properties(device)
    arch = found.gcnArchName.split(":")[0] if torch.version.hip else f"sm{found.major}{found.minor}"
    return Target(arch, found.multi_processor_count)
