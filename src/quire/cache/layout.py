"""Memory layouts of pages. A layout is an order of axes for K and one for V.

The four axes are page, slot, head and dim. A layout may split slot or dim in two, `slot/ slot%` or `dim/ dim%`, where the
second part is `x` elements long: vLLM's key pages `[pages, kv_heads, head_dim/x, page_size, x]` are
`"page head dim/ slot dim%"`. A layout therefore only determines strides, and every layout has the same view:

    view [pages, kv_heads, slot/, slot%, dim/, dim%]      (an axis that is not split has length 1 in its first part)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.errors import ArgumentError, describe

_VIEW = ("page", "head", "slot/", "slot%", "dim/", "dim%")


@dataclass(frozen=True)
class Order:
    """The order in which one tensor of pages stores its axes."""

    axes: str

    @property
    def names(self) -> list[str]:
        return self.axes.split()

    @property
    def split(self) -> str | None:
        """The axis that is split in two, 'slot' or 'dim'."""
        return next((name[:-1] for name in self.names if name.endswith("/")), None)

    def shape(self, pages: int, page_size: int, heads: int, dim: int, x: int = 1) -> tuple[int, ...]:
        """The shape of the storage."""
        size = {"page": pages, "slot": page_size, "head": heads, "dim": dim}
        if self.split:
            whole = size.pop(self.split)
            if not isinstance(x, int) or x < 1 or whole % x:
                raise ArgumentError("x", x, f"a divisor of {self.split} = {whole}")
            size |= {f"{self.split}/": whole // x, f"{self.split}%": x}
        return tuple(size[name] for name in self.names)

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        """The storage as `[pages, kv_heads, slot/, slot%, dim/, dim%]`, without a copy."""
        if storage.dim() != len(self.names):
            raise ArgumentError("pages", describe(storage), f"{len(self.names)} axes: [{', '.join(self.names)}]")
        names = [f"{name}%" if name in ("slot", "dim") else name for name in self.names]
        for name in _VIEW:
            if name not in names:
                storage, names = storage.unsqueeze(-1), [*names, name]
        return storage.permute([names.index(name) for name in _VIEW])

    def pack(self, pages: torch.Tensor, x: int = 1) -> torch.Tensor:
        """`[pages, page_size, heads, dim]` in this order, contiguous."""
        count, page_size, heads, dim = pages.shape
        out = torch.empty(self.shape(count, page_size, heads, dim, x), dtype=pages.dtype, device=pages.device)
        view = self.view(out)
        view.copy_(pages.permute(0, 2, 1, 3).reshape(view.shape))
        return out

    def unpack(self, storage: torch.Tensor) -> torch.Tensor:
        """The inverse of `pack`: `[pages, page_size, heads, dim]`, contiguous."""
        return self.view(storage).flatten(4, 5).flatten(2, 3).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Layout:
    """How a cache arranges its pages: an order for K and one for V. `joint` keeps both in one tensor, K before V in dim."""

    name: str
    k: Order
    v: Order
    joint: bool = False

    def pack(self, k: torch.Tensor, v: torch.Tensor, x: int = 1) -> tuple[torch.Tensor, ...]:
        """`[pages, page_size, heads, dim]` K and V as this layout stores them: one tensor if joint, else two."""
        if self.joint:
            return (self.k.pack(torch.cat((k, v), -1), x),)
        return self.k.pack(k, x), self.v.pack(v, x)

    def unpack(self, *storage: torch.Tensor, head_dim: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The inverse of `pack`."""
        k, v = self.parts(*storage, head_dim=head_dim)
        return self.k.unpack(k), self.v.unpack(v)

    def parts(self, *storage: torch.Tensor, head_dim: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The K and the V storage; two views of one tensor if joint, split at `head_dim` (by default in the middle)."""
        if not self.joint:
            if len(storage) == 1 and storage[0].dim() == len(self.k.names) + 1:
                return self._stacked(storage[0])
            if len(storage) != 2:
                raise ArgumentError("v_pages", None, f"a tensor: layout {self.name!r} stores K and V in two tensors")
            return storage[0], storage[1]
        if len(storage) != 1:
            raise ArgumentError("v_pages", "a tensor", f"None: layout {self.name!r} stores K and V in one tensor")
        if storage[0].dim() != len(self.k.names):
            raise ArgumentError("k_pages", describe(storage[0]), f"{len(self.k.names)} axes: [{', '.join(self.k.names)}]")
        content = storage[0].shape[-1]
        if head_dim is None and content % 2:
            raise ArgumentError("head_dim", None, f"1 to {content - 1}: a joint page of {content} elements cannot be halved")
        cut = content // 2 if head_dim is None else head_dim
        if not 0 < cut < content:
            raise ArgumentError("head_dim", cut, f"1 to {content - 1}: K before V in a joint page of {content}")
        return storage[0][..., :cut], storage[0][..., cut:]

    def _stacked(self, storage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one tensor that has an axis of 2 more, before the pages or behind them: vLLM's, and FlashInfer's."""
        pairs = [axis for axis in (0, 1) if storage.shape[axis] == 2 and self.k.names == self.v.names]
        if len(pairs) != 1:
            first, *others = self.k.names
            stacked = f"K and V stacked as [2, {', '.join(self.k.names)}] or [{first}, 2, {', '.join(others)}], or "
            pointer = f"two tensors: wrap(pages[0], pages[1], layout={self.name!r})"
            raise ArgumentError("k_pages", describe(storage), stacked * (self.k.names == self.v.names) + pointer)
        k, v = storage.unbind(pairs[0])
        return k, v

    @property
    def splits(self) -> bool:
        return bool(self.k.split or self.v.split)

    def __str__(self) -> str:
        return self.name


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("nhd", Order("page slot head dim"), Order("page slot head dim")),
        Layout("hnd", Order("page head slot dim"), Order("page head slot dim")),
        # vLLM's layout for its ROCm and Triton decode kernels: x elements of a key are contiguous, values are transposed.
        Layout("vllm_x", Order("page head dim/ slot dim%"), Order("page head dim slot")),
        # vLLM's default since a layer's cache is one tensor: K and V of a slot are adjacent.
        Layout("vllm_joint", Order("page head slot dim"), Order("page head slot dim"), joint=True),
        # AITER's assembly kernels: keys as in vllm_x, x slots of a value element are contiguous.
        Layout("aiter", Order("page head dim/ slot dim%"), Order("page head slot/ dim slot%")),
    )
}


def layout_named(name: str) -> Layout:
    found = LAYOUTS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ArgumentError("layout", describe(name), ", ".join(LAYOUTS))
    return found
