"""A debugging context in which every operation checks its call in full and, on request, its result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.contract.check import Watch, recording, watched_by
from quire.errors import ArgumentError, describe


@contextmanager
def checked(*, results: bool = False, quantisation: bool = False) -> Iterator[None]:
    """A context in which every operation of this thread or task checks its call in full first, on any device. Hints that are too
    low are errors here.

    Args:
        results: Whether to also compare the result of every `attend` and `step` with an exact computation. This is slow.
        quantisation: Whether every `write` and `step` into a quantised cache warns (`quire.errors.QuantisationWarning`) of
            `saturation`, elements beyond the largest number of the format times the scale, and of `underflow`, keys or values of
            a token that are all stored as 0. It reads the new tokens, which synchronizes with a GPU.

    Raises:
        ContractError: A call violates the contract, or a hint is too low.
        QuireError: With `results`: a result is wrong; the message names the fault if it can be identified.
        ArgumentError: An argument is not a bool.

    Example:
        >>> import torch, quire
        >>> pool = quire.PagePool(pages=8, page_size=16)
        >>> cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64, ledger=True)
        >>> batch = pool.step({pool.sequence(): 5})
        >>> q, k, v = torch.randn(5, 12, 64, dtype=torch.bfloat16).split((8, 2, 2), dim=1)
        >>> with quire.checked():
        ...     out = quire.step(q, k, v, cache, batch)
    """
    for name, value in (("results", results), ("quantisation", quantisation)):
        if not isinstance(value, bool):
            raise ArgumentError(name, describe(value), "True or False")
    recorder = recording()
    if results:
        # Imported on demand, so that `import quire` stays light.
        from quire.conformance.recording.result_checks import Judge

        recorder = Judge(recorder)
    with watched_by(Watch(True, recorder, quantisation)):
        yield
