"""Exceptions. Every message names the argument, what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.contract.rule import Violation
    from quire.dispatch.decision import Decision


class QuireError(Exception):
    """The base class of all errors that Quire raises. All of them can be pickled, so a worker process can raise them.

    Example:
        >>> import quire
        >>> issubclass(quire.OutOfPages, quire.QuireError)
        True
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


class ArgumentError(QuireError, ValueError):
    """An argument has a type or value that is not allowed. Nothing was changed or written.

    Attributes:
        argument: The name of the argument.
        given: What was given.
        allowed: What is allowed, in words.

    Example:
        >>> import quire
        >>> quire.PagePool(pages=0, page_size=16)
        Traceback (most recent call last):
        quire.errors.ArgumentError: pages: given 0; allowed: an int of 1 or more
    """

    def __init__(self, argument: str, given: Any, allowed: str):
        self.argument, self.given, self.allowed = argument, given, allowed
        missing = given is None or (isinstance(given, str) and given == "None")
        super().__init__(f"{argument}: given {'nothing (None)' if missing else given}; allowed: {allowed}")

    def __reduce__(self) -> tuple[Any, ...]:
        # The given value may be an object that cannot be pickled: its text replaces it.
        given = self.given if isinstance(self.given, (str, int, float, type(None))) else str(self.given)
        return _restored, (type(self), self.args, {**self.__dict__, "given": given})


class UnknownArgumentError(ArgumentError, TypeError):
    """A function has no argument of this name. The message points to the argument that was probably meant."""


class ContractError(QuireError, ValueError):
    """A call violates the contract (docs/contract.md). Nothing was written.

    Attributes:
        operation: The operation: attend, write or step.
        violations: All violations, as `quire.Violation`.

    Example:
        >>> import torch, quire
        >>> pool = quire.PagePool(pages=4, page_size=4)
        >>> cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8)
        >>> batch = pool.step({pool.sequence(): 3})
        >>> try:
        ...     quire.attend(torch.zeros(3, 1, 16, dtype=torch.bfloat16), cache, batch)
        ... except quire.ContractError as error:
        ...     print(error.violations[0])
        [shapes] q
          given    head_dim 16
          allowed  8, as the cache has
    """

    def __init__(self, operation: str, violations: Sequence[Violation]):
        self.operation, self.violations = operation, tuple(violations)
        count = len(self.violations)
        shown = [str(violation) for violation in self.violations[:8]]
        if count > len(shown):
            shown.append(f"... and {count - len(shown)} more: see `violations` of this error")
        head = f"quire.{operation}: {count} violation{'s' if count > 1 else ''} of the contract; nothing was written"
        super().__init__("\n\n".join([head, *shown]))


class KernelError(QuireError, ValueError):
    """No kernel can run the call on this platform, or the kernel requested with `kernel=` cannot.

    Attributes:
        decision: The `quire.Decision` with every kernel and why it was refused; None if no kernel has the requested name.

    Example:
        >>> import torch, quire
        >>> pool = quire.PagePool(pages=4, page_size=4)
        >>> cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8)
        >>> batch = pool.step({pool.sequence(): 3})
        >>> quire.attend(torch.zeros(3, 1, 8, dtype=torch.bfloat16), cache, batch, kernel="cuda")
        Traceback (most recent call last):
        quire.errors.KernelError: kernel: given 'cuda'; allowed for attend: ...
    """

    def __init__(self, message: str, decision: Decision | None = None):
        self.decision = decision
        super().__init__(message if decision is None else f"{message}\n\n{decision}")


class OutOfPages(QuireError):
    """The pool has too few free pages for a step. The pool is unchanged.

    Attributes:
        needed: Pages that the step needs.
        free: Free pages of the pool.
        pages: All pages of the pool.

    Example:
        >>> import quire
        >>> pool = quire.PagePool(pages=2, page_size=4)
        >>> pool.step({pool.sequence(): 9})
        Traceback (most recent call last):
        quire.errors.OutOfPages: pages: the request needs 3 more, 2 of 2 are free; nothing was changed. ...
    """

    def __init__(self, needed: int, free: int, pages: int):
        self.needed, self.free, self.pages = needed, free, pages
        super().__init__(
            f"pages: the request needs {needed} more, {free} of {pages} are free; nothing was changed. "
            "Free or trim a sequence, or make a larger PagePool."
        )


class StaleBatch(QuireError):
    """A batch aliases the page table of a pool that has changed since the batch was made. Nothing was written.

    Attributes:
        number: The state of the pool that the batch was made for.
        now: The state of the pool now.

    Example:
        >>> import quire
        >>> pool = quire.PagePool(pages=4, page_size=4)
        >>> sequence = pool.sequence()
        >>> batch, later = pool.step({sequence: 3}), pool.step({sequence: 1})
        >>> batch.check_current()
        Traceback (most recent call last):
        quire.errors.StaleBatch: batch: given the batch of state 1 of its pool, which is in state 2 by now; ...
    """

    def __init__(self, number: int, now: int):
        self.number, self.now = number, now
        super().__init__(
            f"batch: given the batch of state {number} of its pool, which is in state {now} by now; allowed: the batch of the "
            "latest step, or a batch.clone() that was made before the pool changed. Nothing was written."
        )


class QuantisationWarning(UserWarning):
    """A write to a quantised cache lost more than a rounding. The message begins with the loss: `saturation` or `underflow`. Only
    within `quire.checked(quantisation=True)`."""


def _restored(kind: type[QuireError], args: tuple[Any, ...], fields: dict[str, Any]) -> QuireError:
    """Unpickles an error without calling its constructor, whose parameters differ from `args`."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


def describe(value: Any) -> str:
    """A value as a message shows it: a tensor as 'int64[3, 7] on cpu', a NumPy array likewise, anything else as the
    beginning of its repr."""
    import torch

    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided else f"a {str(value.layout).removeprefix('torch.')} tensor "
        return f"{layout}{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    if type(value).__module__ == "numpy" and hasattr(value, "shape"):
        return f"a numpy {type(value).__name__} {value.dtype}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:160]}... ({len(text)} characters)"
