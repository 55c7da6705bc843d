"""A rule of the contract, and what it says when it is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.contract.call import Call


@dataclass(frozen=True)
class Violation:
    """One place where a call breaks one rule: which argument, what was given there, what is allowed, and a picture."""

    rule: str
    """The rule's id."""
    argument: str
    """The argument, with the index of the offending entry if there is one."""
    given: str
    allowed: str
    seq: int | None = None
    """The sequence (row of the batch), if the violation has one."""
    token: int | None = None
    """The position in that sequence, or the row of q, k or slots."""
    page: int | None = None
    slot: int | None = None
    picture: str = ""
    harmless: bool = False
    """Reported, but the call runs: a low hint costs speed only, and a NaN token affects only the rows that see it."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"[{self.rule}] {self.argument}", f"  given    {self.given}", f"  allowed  {self.allowed}"]
        return "\n".join([*lines, self.picture] if self.picture else lines)


Check = Callable[["Call"], Iterator[Violation]]


@dataclass(frozen=True)
class Rule:
    """One clause. `static` checks read shapes, types and devices, and always run. `values` checks read index tensors, scales and
    the ledger: always for tensors in host memory, elsewhere on request. A clause that binds the kernels has no check of a
    call; `proof` names the tests that keep it."""

    id: str
    says: str
    binds: str
    """Who can break it: 'caller', 'kernel' or both."""
    static: tuple[Check, ...] = ()
    values: tuple[Check, ...] = ()
    proof: str = ""
