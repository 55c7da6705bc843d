"""The launcher of calls with spans or a selection whose tensors are strided or misaligned: what the kernel for aligned memory
cannot read is copied first. A layer whose pages are aligned then needs no second compiled kernel for such calls."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from quire.kernels.triton.host.launcher import At, AttendLauncher, Launch
from quire.platform import Platform
from quire.problem import Extent, Problem, is_aligned

OF_A_BATCH = ("shard", "spans", "select", "prefixes")


class CopyingLauncher(AttendLauncher):
    """Launches the kernel of the same problem in aligned memory on copies of tensors that are not aligned."""

    def __init__(self, kernel: str, problem: Problem, platform: Platform):
        super().__init__(kernel, problem.replace(memory="aligned"), platform)

    def launches(self, call: Any, extent: Extent, at: At) -> Iterator[Launch]:
        if not extent.tokens or not extent.seqs:
            yield from super().launches(call, extent, at)
            return
        assert self.units is not None
        k_unit, v_unit = self.units
        q, new, out, batch = copied(call.q, k_unit), call.new, call.out, call.batch
        if new is not None:
            new = copied(new[0], k_unit), copied(new[1], v_unit)
        if not is_aligned(out, v_unit):
            # Rows of padding keep what the caller's hold.
            out = torch.empty_like(out, memory_format=torch.contiguous_format) if call.zero_padding else packed(out)
        indices = {name: getattr(batch, name).contiguous() for name in ("page_table", "kv_lens", "q_starts")}
        batch = SimpleNamespace(**indices, **{name: getattr(batch, name) for name in OF_A_BATCH})
        names = ("cache", "options", "lse", "zero_padding")
        ready = SimpleNamespace(q=q, new=new, out=out, batch=batch, **{name: getattr(call, name) for name in names})
        yield from super().launches(ready, extent, at)
        if out is not call.out:
            call.out.copy_(out)


def copied(tensor: torch.Tensor, unit: int) -> torch.Tensor:
    """The tensor, or an aligned copy if it is not aligned."""
    return tensor if is_aligned(tensor, unit) else packed(tensor)


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy."""
    return tensor.clone(memory_format=torch.contiguous_format)
