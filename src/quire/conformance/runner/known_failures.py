"""Failures that are known: a plain file, a line each, of a target, a case, and why. A known failure that passes is reported.

# target                 case          why
vllm.unified_attention   far-pages     offsets in 32 bits, upstream issue 50427
*                        tree-window   not promised by anybody
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from quire.conformance.cases.suite import cases
from quire.errors import ArgumentError


def read(path: str | os.PathLike[str], target: str) -> dict[str, str]:
    """The cases that are known to fail for a target, and why."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ArgumentError("known", f"{path} ({error.strerror})", "a file that exists") from None
    found = {}
    for number, line in enumerate(lines, 1):
        words = line.split(None, 2)
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 3:
            raise ArgumentError("known", f"{path}:{number}: {line.strip()}", "a target or *, a case, and why")
        if words[0] == "*" or _same(words[0], target):
            found[words[1]] = words[2].strip()
    return found


def _same(named: str, target: str) -> bool:
    """A file is the same however the way to it is spelt."""
    if named == target:
        return True
    (file, _, function), (of, _, called) = named.rpartition(":"), target.rpartition(":")
    return bool(file and of) and function == called and Path(file).resolve() == Path(of).resolve()


def unmatched(known: Iterable[str]) -> tuple[str, ...]:
    """Those names that no case of any level has: misspelt, or of a case that is gone."""
    names = {case.name for case in cases("full")}
    return tuple(name for name in known if name not in names)
