"""Known failures: a text file with a target, a case and a reason on each line. A known failure that passes is reported.

# target                 case          why
vllm.unified_attention   far-pages     offsets in 32 bits, upstream issue 50427
*                        tree-window   not supported
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from quire.conformance.cases.suite import all_cases
from quire.errors import ArgumentError


def read(path: str | os.PathLike[str], target: str) -> dict[str, str]:
    """The cases that are known to fail for a target, with the reasons."""
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
    """Whether two names are of the same target: files are compared by their resolved paths."""
    if named == target:
        return True
    (file, _, function), (of, _, called) = named.rpartition(":"), target.rpartition(":")
    return bool(file and of) and function == called and Path(file).resolve() == Path(of).resolve()


def unmatched(known: Iterable[str]) -> tuple[str, ...]:
    """The names that no case of any level has: misspelt, or of a case that was removed."""
    names = {case.name for case in all_cases()}
    return tuple(name for name in known if name not in names)
