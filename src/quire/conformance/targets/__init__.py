"""Peers under test, each in a file of its own."""

from __future__ import annotations

from quire.conformance.target import Target

TARGETS: dict[str, str] = {}
"""Name -> module; the module has `target(device) -> Target`."""


def load(name: str, device: str | None = None) -> Target:
    from importlib import import_module

    found: Target = import_module(TARGETS[name]).target(device)
    return found
