"""`python -m quire.conformance.findings FILE ...`: the table of what was found, from what `quire conform --json` wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from datetime import date
from typing import Any

from quire.conformance.report import brief


def table(reports: Iterable[Mapping[str, Any]], today: str) -> str:
    """Markdown: a row for each target and fault, with the line that shows it."""
    lines = [
        f"Run on {today}.",
        "",
        "| target | versions | cases right / wrong / raised / not asked | found | in | to see it again |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for report in reports:
        counts = report["counts"]
        versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items() if name != "quire")
        figures = f"{counts['right'] + counts['refused']} / {counts['wrong']} / {counts['raised']} / {counts['unsupported']}"
        head = f"| {report['target']} ({report['device']}) | {versions} | {figures} |"
        for finding in report["findings"] or [None]:
            if finding is None:
                lines.append(f"{head} nothing | | |")
                continue
            given = brief(finding["parameters"])
            said = f"{finding['fault']}{f' ({given})' if given else ''}: {finding['summary']}".replace("|", "\\|")
            lines.append(f"{head} {said} | {len(finding['cases'])}: {', '.join(finding['cases'][:4])} | `{finding['reproduce']}` |")
            head = "| | | |"
    return "\n".join(lines) + "\n"


def main(paths: list[str]) -> int:
    if not paths:
        print("usage: python -m quire.conformance.findings FILE ...", file=sys.stderr)
        return 2
    reports = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            reports.append(json.load(file))
    print(table(reports, date.today().isoformat()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
