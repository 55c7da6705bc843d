"""`python -m quire.conformance.reporting.findings FILE ...` prints a table of findings from the JSON of `quire conform`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from quire.conformance.reporting.report import UNKNOWN, brief

MOST = 6
"""Unnamed findings that get a line each."""


def table(reports: Iterable[Mapping[str, Any]], today: str) -> str:
    """Markdown: a line for each target and fault, with the case line that reproduces it."""
    lines = [
        f"Run on {today}.",
        "",
        "| target | versions | correct or refused / wrong / raised / skipped | finding | in | to reproduce |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for report in reports:
        counts = report["counts"]
        versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items() if name != "quire")
        figures = f"{counts['correct'] + counts['refused']} / {counts['wrong']} / {counts['raised']} / {counts['skipped']}"
        head = f"| {report['target']} ({report['device']}) | {versions} | {figures} |"
        found = _each(report)
        if not found:
            lines.append(f"{head} nothing | | |")
        for finding in found:
            ways = [f"{way['with']} in {len(way['cases'])}" for way in finding.get("ways", ()) if way["with"]]
            given = "; ".join(ways[:MOST]) if len(ways) > 1 else brief(finding["parameters"])
            title = f"symptom: {finding['symptom']}" if finding.get("symptom") else finding["fault"]
            contrast = f"{finding['contrast']}; " if finding.get("contrast") else ""
            text = f"{title}{f' ({given})' if given else ''}: {contrast}{finding['summary']}".replace("|", "\\|")
            lines.append(f"{head} {text} | {len(finding['cases'])}: {', '.join(finding['cases'][:4])} | `{finding['reproduce']}` |")
            head = "| | | |"
    return "\n".join(lines) + "\n"


def _each(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The findings. Unnamed ones are listed case by case, unless there are too many."""
    found = [finding for finding in report["findings"] if finding["fault"] != UNKNOWN]
    unknown = [
        {**finding, "cases": [result["name"]]}
        for result in report["results"]
        for finding in result["findings"]
        if finding["fault"] == UNKNOWN
    ]
    return found + (unknown if len(unknown) <= MOST else [f for f in report["findings"] if f["fault"] == UNKNOWN])


def main(paths: list[str]) -> int:
    if not paths:
        print("usage: python -m quire.conformance.reporting.findings FILE ...", file=sys.stderr)
        return 2
    reports, without = [], []
    for path in paths:
        try:
            reports.append(_report(path))
        except (OSError, ValueError) as error:
            without.append(f"{path}: no result ({error})")
    print(table(reports, date.today().isoformat()), end="")
    print("".join(f"\n{line}" for line in without), file=sys.stderr, end="\n" if without else "")
    return 1 if without else 0


def _report(path: str) -> dict[str, Any]:
    """A report as `quire conform --json` writes it. The file of a run that was killed is empty or incomplete."""
    text = Path(path).read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError("the file is empty: the run ended before it wrote its report")
    report = json.loads(text)
    if not isinstance(report, dict) or not {"target", "device", "versions", "counts", "findings", "results"} <= set(report):
        raise ValueError("not a report of `quire conform --json`")
    return report


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
