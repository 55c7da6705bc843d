"""How many kernels Triton compiles, counted while something runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Compilations:
    """The count so far. `count` is None without Triton, and where this version of Triton has no hook."""

    def __init__(self) -> None:
        self.count: int | None = None
        self.loaded = 0
        """Kernels that came from the compile cache on disk."""

    def take(self) -> int | None:
        """Returns the count and resets it."""
        count, self.count = self.count, None if self.count is None else 0
        return count


@contextmanager
def counted() -> Iterator[Compilations]:
    """Counts the compilations within. Hooks that were there before are called as well."""
    counter = Compilations()
    try:
        import triton
    except ImportError:
        yield counter
        return
    knobs = getattr(triton, "knobs", None)
    compilation, runtime = getattr(knobs, "compilation", None), getattr(knobs, "runtime", None)
    # The listener hears of every call of `triton.compile`; the hook of older versions only of those that a launch makes.
    if hasattr(compilation, "listener"):
        holder, name = compilation, "listener"
    elif hasattr(runtime, "jit_post_compile_hook"):
        holder, name = runtime, "jit_post_compile_hook"
    else:
        yield counter
        return
    before, counter.count = getattr(holder, name), 0

    def hook(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cache_hit"):
            counter.loaded += 1
        else:
            assert counter.count is not None
            counter.count += 1
        return before(*args, **kwargs) if before is not None else None

    setattr(holder, name, hook)
    try:
        yield counter
    finally:
        setattr(holder, name, before)
