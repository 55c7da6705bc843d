"""What can go wrong, as types. Every message names the argument, what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.contract.rule import Violation
    from quire.dispatch.decision import Decision


class QuireError(Exception):
    """The base of every error that Quire raises on purpose. All of them can be pickled: a worker process can raise them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


class ArgumentError(QuireError, ValueError):
    """One argument of a constructor is not allowed."""

    def __init__(self, argument: str, given: Any, allowed: str):
        self.argument, self.given, self.allowed = argument, given, allowed
        super().__init__(f"{argument}: given {given}; allowed: {allowed}")

    def __reduce__(self) -> tuple[Any, ...]:
        # What was given can be anything, also what no other process can hold: its text crosses.
        given = self.given if isinstance(self.given, (str, int, float, type(None))) else str(self.given)
        return _restored, (type(self), self.args, {**self.__dict__, "given": given})


class ContractError(QuireError, ValueError):
    """A call breaks the contract. Nothing was written."""

    def __init__(self, operation: str, violations: Sequence[Violation]):
        self.operation, self.violations = operation, tuple(violations)
        count = len(self.violations)
        shown = [str(violation) for violation in self.violations[:8]]
        if count > len(shown):
            shown.append(f"... and {count - len(shown)} more: see `violations` of this error")
        head = f"quire.{operation}: {count} violation{'s' if count > 1 else ''} of the contract; nothing was written"
        super().__init__("\n\n".join([head, *shown]))


class KernelError(QuireError, ValueError):
    """No kernel, or not the one asked for by name, can run this problem on this platform."""

    def __init__(self, message: str, decision: Decision | None = None):
        self.decision = decision
        super().__init__(message if decision is None else f"{message}\n\n{decision}")


class OutOfPages(QuireError):
    """The pool has too few free pages for a request. The pool is as it was before the request."""

    def __init__(self, needed: int, free: int, pages: int):
        self.needed, self.free, self.pages = needed, free, pages
        super().__init__(
            f"pages: the request needs {needed} more, {free} of {pages} are free; nothing was changed. "
            "Free or trim a sequence, or make a larger PagePool."
        )


class StaleBatch(QuireError):
    """A batch aliases the page table of a pool that has changed since. Nothing was written."""

    def __init__(self, number: int, now: int):
        self.number, self.now = number, now
        super().__init__(
            f"batch: given the batch of state {number} of its pool, which is in state {now} by now; allowed: the batch of the "
            "latest step, or a batch.clone() that was made before the pool changed. Nothing was written."
        )


def _restored(kind: type[QuireError], args: tuple[Any, ...], fields: dict[str, Any]) -> QuireError:
    """An error that was pickled, without a call of its constructor, whose arguments are not its `args`."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


def describe(value: Any) -> str:
    """A tensor as 'int64[3, 7] on cpu', an array of NumPy likewise, anything else as the beginning of its repr: for messages."""
    import torch

    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided else f"a {str(value.layout).removeprefix('torch.')} tensor "
        return f"{layout}{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    if type(value).__module__ == "numpy" and hasattr(value, "shape"):
        return f"a numpy {type(value).__name__} {value.dtype}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:160]}... ({len(text)} characters)"
