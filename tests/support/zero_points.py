"""int4_zp by its definition: codes from 0 to 15, and scales whose last four bits are the code of 0."""

from __future__ import annotations

from typing import NamedTuple

import torch

NAME = "int4_zp"


class WithZeros(NamedTuple):
    """Stored elements."""

    codes: torch.Tensor
    """One in each entry, `[.., dim]`."""
    zero: torch.Tensor
    """The code of 0, `[.., 1]`."""

    def double(self) -> torch.Tensor:
        """What they stand for in units of their scale."""
        return self.codes.double() - self.zero.double()


def scales_of(rows: torch.Tensor) -> torch.Tensor:
    """Scales of rows `[.., dim]` with codes for all of their numbers and for 0."""
    low, high = rows.float().amin(-1).clamp(max=0), rows.float().amax(-1).clamp(min=0)
    size = factors((high - low) / 15)
    size[size == 0] = 1
    zero = (-low / size).round().clamp(max=15)
    return torch.from_numpy((size.numpy().view("uint32") + zero.numpy().astype("uint32")).view("float32"))


def factors(scale: torch.Tensor) -> torch.Tensor:
    """What elements are multiplied by."""
    return torch.from_numpy((scale.numpy().view("uint32") // 16 * 16).view("float32"))


def zeros(scale: torch.Tensor) -> torch.Tensor:
    """The codes of 0."""
    return torch.from_numpy((scale.numpy().view("uint32") % 16).astype("float32"))


def encoded(content: torch.Tensor, scale: torch.Tensor) -> WithZeros:
    """Rows with the scales of their tokens; a NaN is code 11."""
    zero = zeros(scale).unsqueeze(-1)
    x = (content.float() / factors(scale).unsqueeze(-1)).round()
    return WithZeros(torch.where(x.isnan(), 11.0, (x + zero).clamp(0, 15)).to(torch.int8), zero)
