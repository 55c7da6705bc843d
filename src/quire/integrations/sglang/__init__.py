"""Quire as an attention backend of sglang."""

from __future__ import annotations


def register() -> None:
    """Called by the engine, in every process."""
