"""A transaction on the state of a pool: all writes are planned first, then applied together or undone."""

from __future__ import annotations

from typing import Any

import numpy


class Transaction:
    """A list of planned writes with the values they overwrite. `apply` and `undo` are idempotent, so that either can be repeated
    after an interrupt."""

    __slots__ = ("_added", "_cells", "_lasting", "_removed", "_values", "is_rolled_back")

    def __init__(self) -> None:
        self.is_rolled_back = False
        """Whether `undo` leaves the lasting writes."""
        self._lasting: Transaction | None = None
        self._cells: list[tuple[Any, str, Any, Any, Any]] = []
        self._values: list[tuple[Any, str, Any, Any]] = []
        self._added: list[tuple[Any, str, dict[Any, Any]]] = []
        self._removed: list[tuple[Any, str, dict[Any, Any]]] = []

    def set_cells(self, owner: Any, name: str, index: Any, new: Any, old: Any = None) -> None:
        """Plans a write to elements of the array `owner.name`. The array is looked up when it is written: it may have grown by
        then."""
        if old is None:
            old = numpy.array(getattr(owner, name)[index])
        self._cells.append((owner, name, index, new, old))

    def set_attribute(self, owner: Any, name: str, new: Any) -> None:
        """Plans an assignment to the attribute `owner.name`."""
        self._values.append((owner, name, new, getattr(owner, name)))

    def add_entries(self, owner: Any, name: str, entries: dict[Any, Any]) -> None:
        """Plans new entries of the dict `owner.name`."""
        self._added.append((owner, name, entries))

    def remove_entries(self, owner: Any, name: str, entries: dict[Any, Any]) -> None:
        """Plans the removal of entries of the dict `owner.name`."""
        self._removed.append((owner, name, entries))

    @property
    def lasting(self) -> Transaction:
        """Writes that are applied before the others, and that a rollback does not undo: it cannot restore what the keys and values
        of a step have overwritten. An interrupted operation undoes them."""
        if self._lasting is None:
            self._lasting = Transaction()
        return self._lasting

    def apply(self) -> None:
        if self._lasting is not None:
            self._lasting.apply()
        for owner, name, index, new, _ in self._cells:
            getattr(owner, name)[index] = new
        for owner, name, new, _ in self._values:
            setattr(owner, name, new)
        for owner, name, entries in self._added:
            getattr(owner, name).update(entries)
        for owner, name, entries in self._removed:
            _pop(getattr(owner, name), entries)

    def undo(self) -> None:
        for owner, name, index, _, old in self._cells:
            getattr(owner, name)[index] = old
        for owner, name, _, old in self._values:
            setattr(owner, name, old)
        for owner, name, entries in self._removed:
            getattr(owner, name).update(entries)
        for owner, name, entries in self._added:
            _pop(getattr(owner, name), entries)
        if self._lasting is not None and not self.is_rolled_back:
            self._lasting.undo()


def _pop(known: dict[Any, Any], entries: dict[Any, Any]) -> None:
    for key in entries:
        known.pop(key, None)
