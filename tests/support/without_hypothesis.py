"""Where hypothesis is missing: the tests that it would feed are collected and skipped, others in the same files run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


class Anything:
    """A strategy, or whatever makes one: nobody will draw from it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Anything:
        return self

    def __or__(self, other: Any) -> Anything:
        return self

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def given(*args: Any, **kwargs: Any) -> pytest.MarkDecorator:
    return pytest.mark.skip(reason="hypothesis is not installed")


def settings(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda test: test


def install() -> None:
    stand_in = ModuleType("hypothesis")
    stand_in.given, stand_in.settings, stand_in.strategies = given, settings, Anything()  # type: ignore[attr-defined]
    sys.modules["hypothesis"] = stand_in
