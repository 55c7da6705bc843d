"""The ranks that work together: a process group of torch.distributed with its timeout, and collectives whose errors have a name."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from quire.distributed.errors import CommunicationError
from quire.errors import ArgumentError, describe

Group = dist.ProcessGroup | DeviceMesh | None
"""A process group, a DeviceMesh of one dimension, or None for all ranks."""
TIMEOUT = 120.0
"""Seconds. Ranks compute the same layer of the same step, so they wait for each other for much less; the first call may compile."""


_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name since torch 2.13, and the one before."""


class PendingCollective:
    """A collective under way. `wait` returns its result."""

    def __init__(self, group: RankGroup, name: str, work: Any, result: torch.Tensor, kept: torch.Tensor):
        self._group, self._name, self._work, self._result = group, name, work, result
        # torch.distributed reads what is sent until the collective is done.
        self._kept: torch.Tensor | None = kept
        self._begin = time.perf_counter()

    def wait(self) -> torch.Tensor:
        """The result. With NCCL the host does not wait: the current stream does.

        Raises:
            CommunicationError: The collective failed or timed out.
        """
        if self._work is not None:
            self._group.guarded(self._name, self._work.wait, self._begin)
            self._work = self._kept = None
        return self._result


class RankGroup:
    """A group of ranks. Every collective takes and gives contiguous tensors, and is started before it is waited for."""

    def __init__(self, group: Group):
        self._group = self.process_group = process_group(group)
        self.name = mesh_name(group) or self._group.group_name
        """The dimension of the mesh, or torch's name of the group."""
        self.rank: int = dist.get_rank(self._group)
        """This rank within the group."""
        self.size: int = dist.get_world_size(self._group)
        """Number of ranks."""
        self.global_ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(self._group))
        """The numbers of its ranks among all ranks, by their number in the group. Messages have these."""
        self.timeout: float | None = None
        self._failed: CommunicationError | None = None

    def set_timeout(self, timeout: float | None) -> None:
        """Sets the timeout of all later collectives of the group, in seconds; None leaves it."""
        if timeout is not None:
            if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 10**9:
                raise ArgumentError("timeout", describe(timeout), "seconds above 0, or None to leave the group's own timeout")
            # Not a timeout of our own for each wait: after that gloo's thread would keep the process from ending.
            self._group.set_timeout(timedelta(seconds=timeout))
        self.timeout = timeout

    @property
    def device(self) -> torch.device:
        """Where the backend expects tensors: the host for gloo, the current GPU for NCCL."""
        if "cpu:" in dist.get_backend_config(self._group):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def check_device(self, name: str, tensor: torch.Tensor) -> None:
        """Raises unless the backend has collectives on the device of the tensor."""
        kinds = dist.get_backend_config(self._group)
        if f"{tensor.device.type}:" not in kinds:
            raise ArgumentError(name, describe(tensor), f"a tensor on a device of the group's backend, {kinds}")

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.global_ranks))
        return f"'{self.name}' of ranks {ranks} (this is rank {dist.get_rank()}, backend {dist.get_backend(self._group)})"

    def all_gather(self, message: torch.Tensor) -> PendingCollective:
        """The messages of all ranks, `[ranks, *message]`, in the order of the ranks."""
        result = message.new_empty((self.size, *message.shape))
        flat = as_bytes(result), as_bytes(message)
        return self._start("all_gather", partial(_ALL_GATHER, *flat, group=self._group, async_op=True), result, message)

    def all_to_all(self, messages: torch.Tensor) -> PendingCollective:
        """`messages[i]` goes to rank i; the result has the message of rank i for this rank at i."""
        result = torch.empty_like(messages)
        flat = as_bytes(result), as_bytes(messages)
        scatter = partial(dist.all_to_all_single, *flat, group=self._group, async_op=True)
        return self._start("all_to_all", scatter, result, messages)

    def all_reduce(self, x: torch.Tensor) -> PendingCollective:
        """The sum over all ranks, in place."""
        return self._start("all_reduce", partial(dist.all_reduce, x, group=self._group, async_op=True), x, x)

    def _start(self, name: str, call: Callable[[], Any], result: torch.Tensor, kept: torch.Tensor) -> PendingCollective:
        if self._failed is not None:
            raise self._failed
        if not result.numel():  # on every rank
            return PendingCollective(self, name, None, result, kept)
        return PendingCollective(self, name, self.guarded(name, call, time.perf_counter()), result, kept)

    def guarded(self, name: str, call: Callable[[], Any], begin: float) -> Any:
        """Calls torch.distributed. An error of it becomes a `CommunicationError`, now and in every later collective."""
        try:
            return call()
        except RuntimeError as error:
            seconds = time.perf_counter() - begin
            self._failed = CommunicationError(name, str(self), self.timeout, seconds, str(error).partition("GLHF")[0].strip())
            raise self._failed from error


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as bytes: backends do not know every type."""
    return tensor.view(-1).view(torch.uint8)


def mesh_name(group: Group) -> str | None:
    """The name of the dimension of a mesh, if it has one."""
    names = group.mesh_dim_names if isinstance(group, DeviceMesh) else None
    return names[0] if names else None


def process_group(group: Group) -> dist.ProcessGroup:
    """The process group that was given, or the one of a mesh."""
    if not dist.is_initialized():
        raise ArgumentError("group", "no process group: torch.distributed is not initialized", "init_process_group called before")
    if group is None:
        found = dist.group.WORLD
        assert found is not None
        return found
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = " or ".join(f'mesh["{name}"]' for name in group.mesh_dim_names or ()) or "a mesh of one dimension"
            raise ArgumentError(
                "group", f"a DeviceMesh of shape {tuple(group.mesh.shape)}", f"one dimension of it{names and ': ' + names}"
            )
        if group.get_coordinate() is None:
            raise ArgumentError("group", f"a DeviceMesh without this rank, {dist.get_rank()}", "a mesh that this rank belongs to")
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]  # an int
        raise ArgumentError("group", f"a process group without this rank, {dist.get_rank()}", "a group that this rank belongs to")
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError("group", describe(group), "a torch.distributed.ProcessGroup, a DeviceMesh of one dimension, or None")
    return group
