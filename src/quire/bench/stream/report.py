"""All figures of a stream as one dict, which is what `--json` writes, and as the cells of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from quire.bench.stream.result import EXCESS, StreamResult
from quire.bench.stream.setup import Spec, StreamModel
from quire.platform import Platform

LEAST_RATIO = 0.9
"""The least speed on a stream, in multiples of the best peer's."""


def report(
    device: str,
    platform: Platform,
    spec: Spec,
    results: Sequence[StreamResult],
    *,
    software: Mapping[str, str],
    missing: Mapping[str, str] | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """Everything that was measured, and where."""
    trace = spec.trace()
    rows = [result.to_dict() for result in results]
    best = min((row["total"] for row in rows if not row["own"] and row["total"]), default=None)
    for row in rows:
        row["ratio"] = best / row["total"] if row["own"] and row["total"] and best else None
    return {
        "kind": "stream",
        "device": device,
        "platform": platform.to_dict(),
        "threads": threads,
        "software": dict(software),
        "model": asdict(spec.model),
        "trace": trace.summary(),
        "trace_steps": [[len(step.sequences), step.tokens, int(step.decode_only)] for step in trace.steps],
        "rows": rows,
        "missing": dict(missing or {}),
        "acceptance": acceptance(rows),
    }


def acceptance(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each goal with what was measured. `passed` is None where there is nothing to compare."""
    own = [row for row in rows if row["own"] and row["total"] and row["implementation"] != "quire torch"]
    peers = [row for row in rows if not row["own"] and row["total"]]
    lines: list[dict[str, Any]] = []
    for row in own:
        lines.append(
            {
                "goal": f"{row['implementation']}: no step exceeds its attention time by more than {EXCESS * 1e3:g} ms",
                "given": f"{row['excess'] * 1e3:.2f} ms",
                "passed": row["excess"] <= EXCESS,
            }
        )
    mine, theirs = (min(group, key=lambda row: row["total"], default=None) for group in (own, peers))
    ratio = None if mine is None or theirs is None else theirs["total"] / mine["total"]
    lines.append(
        {
            "goal": f"total time at least {LEAST_RATIO:g} x the best peer",
            "given": "no peer to compare with" if ratio is None or theirs is None else f"{ratio:.2f} x {theirs['implementation']}",
            "passed": None if ratio is None else ratio >= LEAST_RATIO,
        }
    )
    return lines


def verdict(report: Mapping[str, Any]) -> int:
    """The exit status: 1 if one of Quire's own replays was wrong or failed. A missed goal is printed and changes nothing."""
    return 0 if all(row["right"] and row["total"] for row in report["rows"] if row["own"]) else 1


def title(report: Mapping[str, Any]) -> str:
    trace, model = report["trace"], StreamModel(**report["model"])
    scale = trace["engine"]["scale"]
    scaled = f", lengths x {scale:g}" if scale != 1 else ""
    count = report.get("threads")
    threads = f", {count} thread{'' if count == 1 else 's'}" if count else ""
    return (
        f"stream {trace['stream']}, seed {trace['seed']}: {trace['steps']} steps ({trace['decode_only_steps']} decode only), "
        f"{trace['requests']} requests, {trace['tokens']} tokens ({trace['prefill_tokens']} of prompts, {trace['rejected_tokens']} "
        f"rejected drafts, {trace['forks']} forks){scaled}; {model}; {report['platform']['name']}{threads}"
    )


HEAD = ("stream", "implementation", "total s", "attention s", "host s", "p50 ms", "p99 ms", "max ms", "excess ms", "compiled", "error / allowed", "x peer")  # fmt: skip  # noqa: E501


def table(report: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head, and a line for each implementation."""
    return HEAD, [
        (
            report["trace"]["stream"],
            row["implementation"],
            _number(row["total"], 1.0, ".3f") or ("wrong" if row["note"].startswith("wrong") else "failed"),
            _number(row["attention"], 1.0, ".3f"),
            _number(row["host"], 1.0, ".3f"),
            *(_number(row[name], 1e3, ".2f") for name in ("p50", "p99", "max", "excess")),
            "" if row["compilations"] is None else str(row["compilations"]),
            ""
            if row["budget"] is None
            else f"{'-' if row['error'] is None else format(row['error'], '.1e')} / {row['budget']:.1e}",
            _number(row["ratio"], 1.0, ".2f"),
        )
        for row in report["rows"]
    ]


def notes(report: Mapping[str, Any]) -> list[str]:
    """The goals, and why figures are missing, a line each."""
    words = {True: "pass", False: "FAIL", None: "open"}
    goals = [f"{words[line['passed']]}  {line['goal']}: {line['given']}" for line in report["acceptance"]]
    of_rows = [f"{row['implementation']}: {row['note']}" for row in report["rows"] if row["note"]]
    return goals + of_rows + [f"not measured: {name} ({reason})" for name, reason in report["missing"].items()]


def _number(value: float | None, factor: float, form: str) -> str:
    return "" if value is None else format(value * factor, form)
