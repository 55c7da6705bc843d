"""`python -m quire.conformance.matrix FILE`: docs/power.md, from what `quire conform --power --level standard --json` wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

SEEN, PASSED, CANNOT = "#", ".", " "

_HEAD = """# What the suite can see

Every fault of [the catalogue](faults.md) is planted in an honest kernel, in every case of `standard`: {faults} faults and {cases}
cases. Of the {can} pairs in which a fault can occur {seen} are exposed, and no fault goes unseen. Printed by

```console
quire conform --power --level standard --json > power.json
python -m quire.conformance.matrix power.json > docs/power.md
```

A row is a fault, a column a case: `#` the case fails, as it must; `.` it lets the fault pass, and says so (`conformance/blind.py`);
blank where the fault cannot occur. The number is how many cases expose it.

"""


def render(matrix: Sequence[Mapping[str, Any]], faults: Sequence[str]) -> str:
    """The page, from what each case exposed and let pass."""
    seen = sum(len(one["exposed"]) for one in matrix)
    can = seen + sum(len(one["passed"]) for one in matrix)
    width = max(map(len, faults))
    lines = ["```text"]
    numbers = [f"{n:3}" for n in range(1, len(matrix) + 1)]
    lines += [f"{'':{width + 4}}  {_grouped(''.join(number[digit] for number in numbers))}".rstrip() for digit in range(3)]
    for fault in faults:
        marks = "".join(SEEN if fault in one["exposed"] else PASSED if fault in one["passed"] else CANNOT for one in matrix)
        lines.append(f"{fault:{width}} {marks.count(SEEN):3}  {_grouped(marks)}".rstrip())
    lines += ["```", "", "## The cases", "", "| | case, as `--case` takes it | exposes | lets pass |", "|---|---|---|---|"]
    for n, one in enumerate(matrix, 1):
        lines.append(f"| {n} | `{one['case']}` | {len(one['exposed'])} | {', '.join(one['passed'])} |".replace("|  |", "| |"))
    return _HEAD.format(faults=len(faults), cases=len(matrix), seen=seen, can=can) + "\n".join(lines) + "\n"


def _grouped(text: str) -> str:
    return " ".join(text[n : n + 10] for n in range(0, len(text), 10))


def main(paths: list[str]) -> int:
    if len(paths) != 1:
        print("usage: python -m quire.conformance.matrix FILE", file=sys.stderr)
        return 2
    with open(paths[0], encoding="utf-8") as file:
        found = json.load(file)
    if found["errors"] or found["never_exposed"]:
        print(f"not a page to print: {found['errors'] or found['never_exposed']}", file=sys.stderr)
        return 1
    print(render(found["matrix"], found["faults"]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
