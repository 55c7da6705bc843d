"""Tensor parallelism: each rank has some of the heads, with their slopes, sinks, scales and weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from quire.distributed.agreement import Facts, agree, facts_of
from quire.distributed.chunks import row_ranges
from quire.distributed.group import TIMEOUT, Group, RankGroup
from quire.distributed.heads import split
from quire.errors import ArgumentError, describe
from quire.options import PER_HEAD, Options

Scale = TypeVar("Scale", float, torch.Tensor, None)


class TensorParallel:
    """The heads of this rank. Attention needs no communication: each rank calls `quire.step` with its own heads. The output
    projection is summed over the ranks.

    Heads are divided contiguously. If there are fewer KV heads than ranks, each KV head is on `replicas` neighbouring ranks, which
    divide its query heads.

    All ranks of the group make the value together: the constructor compares its arguments between the ranks.

    Args:
        group: A `ProcessGroup`, one dimension of a `DeviceMesh` such as `mesh["tp"]`, or None for all ranks.
        q_heads, kv_heads: The heads of the whole model.
        timeout: Seconds after which a collective fails; it is set on the group, for all its later collectives. None leaves the
            group's own (torch's default is 30 minutes for gloo, 10 for NCCL).

    Raises:
        ArgumentError: The heads cannot be divided by the ranks, or the group is none.
        RankMismatch: Ranks have different arguments.
        CommunicationError: A rank did not answer within the timeout.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from quire import Options
        >>> from quire.distributed import TensorParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> tp = TensorParallel(q_heads=8, kv_heads=2)
        >>> tp
        TensorParallel(rank 0 of 1: q_heads 0-7 of 8, kv_heads 0-1 of 2)
        >>> options = tp.options(Options(sinks=torch.zeros(8)))  # this rank's sinks
        >>> tp.project(torch.ones(3, tp.q_heads, 16), torch.ones(32, 8 * 16)).shape
        torch.Size([3, 32])
        >>> dist.destroy_process_group()
    """

    def __init__(self, group: Group = None, *, q_heads: int, kv_heads: int, timeout: float | None = TIMEOUT):
        self._group = RankGroup(group)
        self._whole = {"q_heads": q_heads, "kv_heads": kv_heads}
        agree("TensorParallel", partial(self._own_facts, timeout), self._group)
        self._split = split(q_heads, kv_heads, self._group.size, self._group.rank)
        self._options: WeakKeyDictionary[Options, Options] = WeakKeyDictionary()

    def _own_facts(self, timeout: float | None) -> Facts:
        """What all ranks must have in common."""
        self._group.set_timeout(timeout)
        return facts_of(ranks=self._group.size, **self._whole)

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self._group.rank

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._group.size

    @property
    def q_heads(self) -> int:
        """Query heads of this rank."""
        return self._split.q.stop - self._split.q.start

    @property
    def kv_heads(self) -> int:
        """KV heads of this rank: those of its cache."""
        return self._split.kv.stop - self._split.kv.start

    @property
    def replicas(self) -> int:
        """How many ranks hold a copy of each KV head of this rank; 1 if there are at least as many KV heads as ranks."""
        return self._split.replicas

    def q(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's query heads of a tensor of the whole model, as a view.

        Args:
            tensor: Queries `[tokens, q_heads, head_dim]`, or weights with an axis of `q_heads * head_dim`.
            dim: The axis with the heads. For weights as of `torch.nn.Linear`: 0 for the query projection, 1 for the output
                projection.

        Raises:
            ArgumentError: The axis is no multiple of the model's q_heads.
        """
        return self._heads_of(tensor, dim, "q_heads", self._split.q)

    def kv(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's KV heads of a tensor of the whole model: keys, values, or the weights of their projections. As `q`."""
        return self._heads_of(tensor, dim, "kv_heads", self._split.kv)

    def options(self, options: Options) -> Options:
        """The options of a layer with the slopes and sinks of this rank's heads. Everything else stays.

        Args:
            options: The options of the whole model: `alibi` and `sinks` have an entry for every query head of the model. Slopes are
                not those that a model with this rank's number of heads would have.

        Raises:
            ArgumentError: `alibi` or `sinks` has another number of heads.
        """
        if not isinstance(options, Options):
            raise ArgumentError("options", describe(options), "the Options of the whole model")
        if options not in self._options:
            given = {name: getattr(options, name) for name in PER_HEAD if getattr(options, name) is not None}
            for name, value in given.items():
                if value.shape[0] != self._whole["q_heads"]:
                    allowed = f"[{self._whole['q_heads']}], one entry for each query head of the whole model"
                    raise ArgumentError(f"options.{name}", describe(value), allowed)
            self._options[options] = replace(options, **{name: value[self._split.q] for name, value in given.items()})
        return self._options[options]

    def scale(self, scale: Scale) -> Scale:
        """The scales of this rank's cache, `k_scale` or `v_scale` of `KVCache`.

        Args:
            scale: A number or a tensor `[]`, which all heads share; or a tensor of the whole model, `[kv_heads]` or
                `[pages, page_size, kv_heads]`.

        Raises:
            ArgumentError: The last axis does not have the model's kv_heads.
        """
        if scale is None or (isinstance(scale, (int, float)) and not isinstance(scale, bool)):
            return scale
        if isinstance(scale, torch.Tensor) and scale.dim() == 0:
            return scale
        if not isinstance(scale, torch.Tensor) or scale.shape[-1] != self._whole["kv_heads"] or scale.dim() not in (1, 3):
            heads = self._whole["kv_heads"]
            raise ArgumentError(
                "scale", describe(scale), f"a number, [], [{heads}] or [pages, page_size, {heads}]: the whole model's"
            )
        return scale[..., self._split.kv]

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over all ranks, in place, in the type of `x`: what follows a row-parallel projection.

        Raises:
            ArgumentError: `x` is no tensor on a device of the group.
            CommunicationError: The collective failed or timed out.
        """
        if not isinstance(x, torch.Tensor):
            raise ArgumentError("x", describe(x), "a tensor")
        self._group.check_device("x", x)
        return self._group.all_reduce(x).wait()

    def project(self, out: torch.Tensor, weight: torch.Tensor, *, chunks: int = 1) -> torch.Tensor:
        """The output projection of the whole model: each rank multiplies its own heads, and the products are summed.

        Args:
            out: The output of attention of this rank's heads, `[tokens, q_heads, v_head_dim]`.
            weight: The weight of the whole model, `[width, q_heads * v_head_dim]` with all heads, or this rank's columns of it,
                `tp.q(weight, dim=1)`.
            chunks: The rows are multiplied in this many parts, and one part is summed over the ranks while the next is multiplied.
                Products of other shapes may round differently.

        Returns:
            `[tokens, width]`, the same on every rank.

        Raises:
            ArgumentError: The shapes do not fit.
            CommunicationError: A collective failed or timed out.
        """
        for name, value in (("out", out), ("weight", weight)):
            if not isinstance(value, torch.Tensor) or value.dtype != getattr(out, "dtype", None) or value.dim() < 2:
                raise ArgumentError(name, describe(value), "a tensor: out [tokens, q_heads, v_head_dim], weight of the same type")
        rows = out.flatten(1)
        if weight.dim() == 2 and weight.shape[1] == rows.shape[1] * self.ranks:
            weight = self.q(weight, dim=1)
        if out.dim() != 3 or out.shape[1] != self.q_heads or weight.dim() != 2 or weight.shape[1] != rows.shape[1]:
            raise ArgumentError(
                "weight", f"{describe(weight)} for out {describe(out)}", f"[width, q_heads * v_head_dim] for {self}"
            )
        self._group.check_device("out", out)
        under_way = [self._group.all_reduce(rows[part] @ weight.T) for part in row_ranges(rows.shape[0], chunks)]
        parts = [each.wait() for each in under_way]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _heads_of(self, tensor: torch.Tensor, dim: int, name: str, heads: slice) -> torch.Tensor:
        whole = self._whole[name]
        if not isinstance(tensor, torch.Tensor) or not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] % whole:
            raise ArgumentError(
                "tensor", f"{describe(tensor)}, dim={dim}", f"an axis of {whole} {name}, or a multiple: the whole model's"
            )
        width = tensor.shape[dim] // whole
        return tensor.narrow(dim, heads.start * width, (heads.stop - heads.start) * width)

    def __repr__(self) -> str:
        q, kv, whole = self._split.q, self._split.kv, self._whole
        copies = f", {self.replicas} copies" if self.replicas > 1 else ""
        return (
            f"TensorParallel(rank {self.rank} of {self.ranks}: q_heads {q.start}-{q.stop - 1} of {whole['q_heads']}, "
            f"kv_heads {kv.start}-{kv.stop - 1} of {whole['kv_heads']}{copies})"
        )
