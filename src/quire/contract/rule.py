"""The classes `Rule` (one rule of the contract) and `Violation` (one place where a call violates a rule)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.contract.call import Call


@dataclass(frozen=True)
class Violation:
    """One place where a call violates one rule of the contract.

    `quire.check` returns violations; `quire.ContractError` carries them. `str(violation)` is the message, with a picture of the
    invalid entry. `to_dict()` is for programs.

    Example:
        >>> import torch, quire
        >>> pool = quire.PagePool(pages=4, page_size=4)
        >>> cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8)
        >>> batch = pool.step({pool.sequence(): 6})
        >>> batch.page_table[0, 1] = 900
        >>> (violation,) = quire.check(torch.zeros(6, 1, 8, dtype=torch.bfloat16), cache, batch)
        >>> violation.rule, violation.argument, violation.given
        ('table', 'page_table[0, 1]', '900')
        >>> print(violation)
        [table] page_table[0, 1]
          given    900
          allowed  a page id in [0, 4)
          page_table[0]      0  [900]
                                ^^^^^  kv_len 6, pages of 4
    """

    rule: str
    """The rule's id."""
    argument: str
    """The argument, with the index of the offending entry if there is one."""
    given: str
    """What was given, in words."""
    allowed: str
    """What is allowed, in words."""
    seq: int | None = None
    """The index of the sequence in the batch, if the violation concerns one."""
    token: int | None = None
    """The position of the token in that sequence, or its index in q, k or slots."""
    page: int | None = None
    """The page, if the violation concerns one."""
    slot: int | None = None
    """The slot, if the violation concerns one."""
    picture: str = ""
    """The invalid entry in its row of the page table, as lines of text; may be empty."""
    harmless: bool = False
    """True if the call runs anyway: a hint that is too low only costs speed, and a token with a NaN only affects queries that see
    it."""

    def to_dict(self) -> dict[str, Any]:
        """The violation as JSON-compatible values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"[{self.rule}] {self.argument}", f"  given    {self.given}", f"  allowed  {self.allowed}"]
        return "\n".join([*lines, self.picture] if self.picture else lines)


Check = Callable[["Call"], Iterator[Violation]]


@dataclass(frozen=True)
class Rule:
    """One rule of the contract. `static` checks read shapes, types and devices, and run in every call. `values` checks read index
    tensors, scales and the ledger: always for tensors in host memory, otherwise on request. For a rule that binds the kernels,
    `proof` names the tests that enforce it."""

    id: str
    says: str
    binds: str
    """Who must satisfy it: 'caller', 'kernel' or both."""
    static: tuple[Check, ...] = ()
    values: tuple[Check, ...] = ()
    proof: str = ""
