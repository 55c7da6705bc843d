"""The peers of the GPU kernels. One file each; its `load()` imports the peer and returns an implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.bench.case import BenchCase
from quire.bench.implementations import BoundImplementation, Implementation
from quire.errors import ArgumentError

if TYPE_CHECKING:
    from quire.bench.stream.implementations import StreamImplementation

PEERS = ("vllm_chunked", "vllm_unified", "fa3", "flashinfer")
STREAM_PEERS = ("fa3", "flashinfer", "vllm_unified")
"""Those that replay streams on a GPU."""


def load(names: Sequence[str] | None = None) -> tuple[dict[str, Implementation], dict[str, str]]:
    """The peers of these names, which must all be importable; without names, all that are. And why the others are not."""
    return _found(names, PEERS, lambda module: _of_bytes(module.load()))


def _of_bytes(implementation: Implementation) -> Implementation:
    """The implementation, which takes no cache with less than a byte for an element, with another format for V than for K, or with
    transformed keys."""

    def bind(case: BenchCase) -> BoundImplementation | None:
        cache = case.cache
        if cache.k_format is not cache.v_format or cache.k_format.pack > 1 or cache.hadamard:
            return None
        return implementation(case)

    return bind


def load_streams(names: Sequence[str] | None = None) -> tuple[dict[str, StreamImplementation], dict[str, str]]:
    """The same for the peers that replay streams."""
    return _found(names, STREAM_PEERS, lambda module: module.stream())


def _found(names: Sequence[str] | None, known: Sequence[str], make: Callable[[Any], Any]) -> tuple[dict[str, Any], dict[str, str]]:
    for name in names or ():
        if name not in known:
            raise ArgumentError("--peers", repr(name), ", ".join(known))
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name in known if names is None else dict.fromkeys(names):
        try:
            found[name] = make(import_module(f"quire.bench.peers.{name}"))
        # An installed but broken package may raise any exception.
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
            if names is not None:
                raise ArgumentError("--peers", f"{name}, which cannot be imported ({missing[name]})", "peers that can") from error
    return found, missing
