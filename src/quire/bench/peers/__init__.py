"""Whom the GPU kernels are measured with. One file each; its `load()` imports the peer and returns a contestant."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from quire.bench.contestants import Contestant
from quire.errors import ArgumentError

PEERS = ("vllm_chunked", "vllm_unified", "fa3", "flashinfer")


def load(names: Sequence[str] | None = None) -> tuple[dict[str, Contestant], dict[str, str]]:
    """The peers of these names, all of which must be here; without names, every peer that is here. And, of the others, why not."""
    for name in names or ():
        if name not in PEERS:
            raise ArgumentError("--peers", repr(name), ", ".join(PEERS))
    found: dict[str, Contestant] = {}
    missing: dict[str, str] = {}
    for name in PEERS if names is None else dict.fromkeys(names):
        try:
            found[name] = import_module(f"quire.bench.peers.{name}").load()
        # A package that is there but broken raises whatever it likes.
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
            if names is not None:
                raise ArgumentError("--peers", f"{name}, which cannot be imported ({missing[name]})", "peers that can") from error
    return found, missing
