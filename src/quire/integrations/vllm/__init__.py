"""Quire as an attention backend of vllm."""

from __future__ import annotations


def register() -> None:
    """Called by the engine, in every process."""
