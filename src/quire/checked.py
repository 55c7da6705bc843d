"""Debugging: every operation checks its whole call first and, if asked to, its result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.contract.check import Watch, recording, watched_by
from quire.errors import ArgumentError, describe


@contextmanager
def checked(*, results: bool = False) -> Iterator[None]:
    """Within it every operation of this thread or task checks its whole call first, on any device, and raises at the first bad one.
    A hint that is too low counts as bad here.

    With `results` what each `attend` and `step` gave is compared with the exact computation too, and a wrong result raises, with
    the fault's name: slow, and for debugging."""
    if not isinstance(results, bool):
        raise ArgumentError("results", describe(results), "True or False")
    recorder = recording()
    if results:
        # Loaded only when it is asked for: `import quire` stays light.
        from quire.conformance.watch import Judge

        recorder = Judge(recorder)
    with watched_by(Watch(True, recorder)):
        yield
