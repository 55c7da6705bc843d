"""Whether all ranks were called with the same arguments. A header of facts, one number
each, is exchanged before anything else, in a message of a fixed size: messages of different sizes would end the process (gloo) or
hang (NCCL). The header also says whether its rank raised an error, so that the others do not wait for it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from quire.distributed.call_order import Place
from quire.distributed.errors import RankFailed, RankMismatch
from quire.distributed.group import RankGroup
from quire.errors import describe
from quire.options import Options

HEADER = 32
"""Numbers of a header, int64."""
STATUS = HEADER - 1
"""Where a header says whether its rank raised an error."""
DETAILS = slice(STATUS - 3, STATUS)
"""Where it has numbers about the error, which are not compared."""
FAILED, REFUSED = 1, 2
"""The rank raised an error while it computed; it refused its arguments, so that the header has no facts."""
NO_PLACE = Place()


class CommonFact(NamedTuple):
    """One argument that all ranks must have in common."""

    number: int
    value: Any

    @classmethod
    def of(cls, value: Any) -> CommonFact:
        return cls(number_of(value), value)


Facts = Mapping[str, CommonFact]


def facts_of(**values: Any) -> dict[str, CommonFact]:
    """Facts by name."""
    return {name: CommonFact.of(value) for name, value in values.items()}


def option_facts(options: Options) -> dict[str, CommonFact]:
    """The facts of every option."""
    return {f"options.{spec.name}": CommonFact.of(getattr(options, spec.name)) for spec in fields(options)}


def header_of(caller: str, facts: Facts, place: Place = NO_PLACE) -> torch.Tensor:
    """The name of the function, the place of the call and its facts as int64 `[HEADER]`."""
    numbers = [number_of(caller), *place, *numbers_of(facts)]
    assert len(numbers) <= DETAILS.start
    return torch.tensor([*numbers, *[0] * (HEADER - len(numbers))], dtype=torch.int64, device="cpu")


def numbers_of(facts: Facts) -> tuple[int, ...]:
    """The numbers of the facts: equal for equal arguments."""
    return tuple(fact.number for fact in facts.values())


def number_of(value: Any) -> int:
    """An int that is not negative and has 63 bits itself; a checksum, which is negative, of anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return value
    if isinstance(value, torch.Tensor):
        data = f"{value.dtype}{list(value.shape)}".encode()
        if value.device.type == "cpu":  # values on a device are not read: that would wait for it
            # An empty tensor may have strides with which torch cannot view it as bytes.
            data += value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    else:
        data = repr(value).encode()
    return -1 - zlib.crc32(data)


def refusal(caller: str, place: Place = NO_PLACE) -> torch.Tensor:
    """The header of a rank that refused its arguments."""
    header = header_of(caller, {}, place)
    header[STATUS] = REFUSED
    return header


def compare(
    caller: str, facts: Facts, place: Place, headers: torch.Tensor, group: RankGroup, error: Exception | None = None
) -> None:
    """Raises `RankMismatch` if the headers of the ranks, int64 `[ranks, HEADER]`, are not equal; then the error of this rank, if
    there is one; then `RankFailed` if another rank has one. Ranks have their numbers in the world."""
    rows = dict(zip(group.global_ranks, headers.tolist()))
    mine, begin = rows[group.global_ranks[group.rank]], 1 + len(place)
    refused = any(row[STATUS] == REFUSED for row in rows.values())
    _compare_places(caller, place, rows, refused, group, error)
    for i, name in enumerate(() if refused else facts, begin):
        others = {rank: shown(row[i]) for rank, row in rows.items() if row[i] != mine[i]}
        if others:
            raise RankMismatch(caller, name, describe(facts[name].value), others, str(group)) from error
    if error is not None:
        raise error
    failed = tuple(rank for rank, row in rows.items() if row[STATUS])
    if failed:
        raise RankFailed(caller, failed, str(group))


def _compare_places(
    caller: str, place: Place, rows: dict[int, list[int]], refused: bool, group: RankGroup, error: Exception | None
) -> None:
    """Raises `RankMismatch` for ranks that are at another call. A rank that refused its arguments did not number its cache."""
    mine, compared = rows[group.global_ranks[group.rank]], len(place) if refused else 1 + len(place)
    others = {rank: "another function" for rank, row in rows.items() if row[0] != mine[0]}
    if others:
        raise RankMismatch(caller, "the function", caller, others, str(group)) from error
    for rank, row in rows.items():
        if row[1:compared] != mine[1:compared]:
            others[rank] = f"another call ({Place(*row[1 : 1 + len(place)])})"
    if others:
        raise RankMismatch(caller, "the call", str(place), others, str(group)) from error


def shown(number: int) -> str:
    """A fact of another rank: ints are known, of anything else only that it differs."""
    return str(number) if number >= 0 else "another value"


def agree(caller: str, facts: Callable[[], Facts], group: RankGroup) -> None:
    """Compares facts in a collective of their own. If they cannot be made the other ranks are told first."""
    try:
        own = facts()
    except Exception:
        group.all_gather(refusal(caller).to(group.device)).wait()
        raise
    compare(caller, own, NO_PLACE, group.all_gather(header_of(caller, own).to(group.device)).wait(), group)
