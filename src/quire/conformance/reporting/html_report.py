"""A run of the suite as one HTML file: what is wrong, where, and which faults explain it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quire.conformance.reporting.error_map import error_map
from quire.conformance.reporting.report import BUDGETS, UNKNOWN, Finding, Picture, Report, Result, brief
from quire.html import render

MOST_MAPS = 12
"""Findings that get an error map; the rest are described in words."""
MOST_CASES = 12
"""Names of cases in a finding."""
TABLE_SEQUENCES, TABLE_COLUMNS = 24, 32
"""The part of a page table that is shown, around the cell of the faulty key."""
ORDER = {"wrong": 0, "raised": 1, "correct": 2, "refused": 3, "skipped": 4}
"""The order of the cases in the table, by status."""


def html_report(report: Report) -> str:
    """The whole file."""
    found = report.findings
    by_name = {result.case.name: result for result in report.results}
    cards = []
    for number, (finding, names) in enumerate(found):
        results = [by_name[name] for name in names if name in by_name]
        shown = clearest_result(results, finding) if number < MOST_MAPS else None
        cards.append(_card(report, finding, names, shown))
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    level = f"level {report.level}, " if report.level else ""
    return render(
        "conformance",
        title=f"quire conform {report.target}",
        target=report.target,
        verdict=_verdict(report),
        contrast=report.contrast,
        unit=BUDGETS,
        circumstances=f"{level}on {report.device}, {report.seconds:.1f} s. {versions}",
        counts=[{"name": name, "count": count, "tone": _tone(name, count)} for name, count in report.counts().items()],
        findings=cards,
        cases=[_case(result) for result in sorted(report.results, key=lambda result: ORDER.get(result.status, len(ORDER)))],
    )


def _verdict(report: Report) -> str:
    failed = [result for result in report.results if result.failed]
    ran = [result for result in report.results if result.status != "skipped"]
    known = sum(bool(result.known) for result in failed)
    if not ran:
        return "Nothing was computed: every case was refused or skipped."
    if not failed:
        return f"Correct in all {len(ran)} cases that were run."
    expected = f", {known} of them known" if known else ""
    return f"Wrong in {len(failed)} of {len(ran)} cases{expected}. Found: {', '.join(f.title for f, _ in report.findings)}."


def _tone(status: str, count: int) -> str:
    return "bad" if status in ("wrong", "raised") and count else "good" if status == "correct" else ""


def clearest_result(results: Sequence[Result], finding: Finding) -> Result | None:
    """The case whose error map is shown: one with both correct and wrong elements, of about 32 tokens. The map of a result is of
    the run that its first finding describes, so it is shown with no other finding."""
    mine = [result for result in results if _shows_errors(result) and result.findings[0].kind == finding.kind]
    return min(mine, key=_plainness, default=None)


def _verdicts(result: Result) -> set[bool]:
    """Whether elements of the output are correct: both values, one, or none without a map."""
    return set() if result.picture is None else {0 <= off <= 1 for row in result.picture.ratio for off in row}


def _shows_errors(result: Result) -> bool:
    """Whether an error map shows an error. It does not where the LSE alone is wrong."""
    return bool(result.findings) and False in _verdicts(result)


def _plainness(result: Result) -> tuple[bool, float]:
    """How little an error map shows: less is better."""
    assert result.picture is not None
    return True not in _verdicts(result), abs(math.log(len(result.picture.ratio) / 32))


def _card(report: Report, finding: Finding, cases: Sequence[str], shown: Result | None) -> dict[str, Any]:
    """A finding. With an error map, its parameters, place and values are those of the case of the map."""
    several = len(report.ways(finding)) > 1
    if shown is not None:
        finding = shown.findings[0]
    line = finding.reproduce or (str(shown.case) if shown else "")
    picture = None if shown is None else shown.picture
    number = "" if finding.expected is None or finding.actual is None else "{:.6g}"
    return {
        "title": finding.title,
        "unnamed": finding.fault == UNKNOWN or bool(finding.symptom),
        "contrast": finding.contrast,
        "summary": finding.summary,
        "place": str(finding.where),
        "expected": number.format(finding.expected),
        "actual": number.format(finding.actual),
        "text": _text(finding, cases, several),
        "evidence": finding.evidence,
        "seen_keys": finding.picture,
        "map": None
        if shown is None or picture is None
        else error_map(picture, finding) | {"case": shown.case.name, "wrong": shown.wrong},
        "ranking": _ranking(finding),
        "pages": None if picture is None else _page_table(picture, finding),
        "command": f"quire conform {report.target} --case '{line}'" if line else "",
    }


def _text(finding: Finding, cases: Sequence[str], several: bool) -> str:
    """The parameters of a finding, its equivalent faults, and the cases that show it."""
    sentences = []
    if finding.parameters:
        differ = "; other cases show it with other parameters" if several else ""
        sentences.append(f"Parameters: {brief(finding.parameters)}{differ}.")
    others = [name for name in finding.equivalent_faults if name != finding.fault]
    if others:
        sentences.append(f"Indistinguishable in this case: {', '.join(others)}.")
    more = f" and {len(cases) - MOST_CASES} more" if len(cases) > MOST_CASES else ""
    sentences.append(f"Found in {len(cases)} case{'s' if len(cases) != 1 else ''}: {', '.join(cases[:MOST_CASES])}{more}.")
    if finding.undiagnosed:
        sentences.append(f"{finding.undiagnosed} failing cases were not diagnosed: they may have this fault or others.")
    return " ".join(sentences)


def _ranking(finding: Finding) -> list[dict[str, Any]]:
    """How far each prediction is from the result, on a logarithmic scale of budgets."""
    bars = []
    for name, off in finding.ranking:
        finite = math.isfinite(off)
        width = 100.0 if not finite else max(1.0, min(100.0, 100 * math.log10(1 + off) / 9))
        bars.append({"name": name, "match": off <= 1, "width": f"{width:.1f}", "text": f"{off:.3g}" if finite else "infinite"})
    return bars


def _page_table(picture: Picture, finding: Finding) -> dict[str, Any] | None:
    """A part of the page table: pages in use, cells beyond the end of a sequence, and the cell of the faulty key."""
    seqs, width = len(picture.page_table), max(map(len, picture.page_table), default=0)
    if not seqs or not width:
        return None
    bad = picture.bad_cell
    top = 0 if bad is None else max(0, min(bad[0] - TABLE_SEQUENCES // 2, seqs - TABLE_SEQUENCES))
    left = 0 if bad is None else max(0, min(bad[1] - TABLE_COLUMNS // 2, width - TABLE_COLUMNS))
    columns = range(left, min(width, left + TABLE_COLUMNS))
    lines = []
    for seq in range(top, min(seqs, top + TABLE_SEQUENCES)):
        used = -(-picture.kv_lens[seq] // picture.page_size)
        kinds = ["bad" if (seq, column) == bad else "free" if column >= used else "" for column in columns]
        cells = [{"page": picture.page_table[seq][column], "kind": kind} for column, kind in zip(columns, kinds)]
        lines.append({"name": f"{seq} ({picture.kv_lens[seq]})", "cells": cells})
    sentences = [
        "Each row is a sequence, with its length in parentheses. The header of a column is the first position of its page."
    ]
    sentences.append("Gray cells are beyond the end of the sequence.")
    place = finding.where
    if bad is not None and place.key is not None:
        offset = "" if place.offset is None else f", offset {place.offset}"
        sentences.append(f"The faulty key is at position {place.key} of sequence {bad[0]}: page {place.page}{offset}.")
    if seqs > TABLE_SEQUENCES or width > TABLE_COLUMNS:
        sentences.append(f"A part of {seqs} sequences and {width} columns or more.")
    return {"text": " ".join(sentences), "positions": [column * picture.page_size for column in columns], "sequences": lines}


def _case(result: Result) -> dict[str, Any]:
    """A row of the table of all cases."""
    text = ", ".join(finding.title for finding in result.findings) or result.reason
    return {
        "status": result.status,
        "name": result.case.name,
        "text": f"{text} (known: {result.known})" if result.known else text,
        "error": f"{result.error:.3g}" if result.status in ("correct", "wrong") else "",
        "wrong": result.wrong or "",
        "line": str(result.case),
    }
