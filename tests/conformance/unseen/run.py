"""Measures the kit with the unseen faults: which are detected, named, or described by contrast.

    python tests/conformance/unseen/run.py [--writes] [--jobs N] [--level standard] [--quick] [--json FILE] [--markdown FILE] [NAME]

Every kernel goes through the suite as `quire conform tests/conformance/unseen/unseen_kernels.py:NAME --in-process` does; with
`--writes` those of writes.py. A name
is true if it is one of the kernel's own, and false otherwise; `unknown` and symptoms are no names. A contrast describes a fault
if it states a condition under which that kernel fails (`words`). With `--quick` correct results are not computed a second time,
which only finds nondeterminism: the kernel that has it is measured in full.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
# These kernels make many small calls: a pool of threads would take longer than they do.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from unseen_kernels import KERNELS  # noqa: E402
from writes import WRITES  # noqa: E402

from quire.conformance.cases.suite import cases  # noqa: E402
from quire.conformance.reporting.report import UNKNOWN, Report  # noqa: E402
from quire.conformance.runner.find_target import adapter  # noqa: E402
from quire.conformance.runner.run import conform  # noqa: E402

OBSERVED = ("raises", "crashes", "hangs")
"""Names of what happened in a case: a kernel that raises because of its fault has them rightly."""
MARKERS = {
    "writes": "<!-- Everything up to the next heading is written by tests/conformance/unseen/run.py --writes --markdown. -->",
    "attention": "<!-- Everything below is written by tests/conformance/unseen/run.py --markdown. -->",
}
MARKER = MARKERS["attention"]


@dataclass
class Measured:
    """What the kit said about one kernel."""

    kernel: str
    failing: int
    names: list[str]
    false: list[str]
    named: bool
    described: bool
    contrast: str
    symptoms: list[str]
    seconds: float

    @property
    def line(self) -> str:
        verdict = "MISSED" if not self.failing else "FALSE" if self.false else "named" if self.named else ""
        verdict = verdict or ("described" if self.described else "detected")
        said = ", ".join([*self.names, *(f"symptom: {one}" for one in self.symptoms)]) or "-"
        return f"{self.kernel:28} {verdict:10} {self.failing:4} failing, {self.seconds:4.0f} s  {said} | {self.contrast}"


def judge(name: str, report: Report) -> Measured:
    """Compares a report with what is true of the kernel."""
    kernel = WRITES[name] if name in WRITES else KERNELS[name]
    found = [finding for finding, _ in report.findings]
    names = list(dict.fromkeys(finding.fault for finding in found if finding.fault != UNKNOWN))
    said = [report.contrast, *(finding.contrast for finding in found)]
    said += [finding.symptom for finding in found] if name in WRITES else []
    return Measured(
        name,
        sum(result.failed for result in report.results),
        names,
        [one for one in names if one not in kernel.names and one not in OBSERVED],
        any(one in kernel.names for one in names),
        any(word in text for word in kernel.words for text in said),
        report.contrast or next((text for text in said if text), ""),
        list(dict.fromkeys(finding.symptom for finding in found if finding.symptom)),
        round(report.seconds, 1),
    )


def measure(name: str, level: str = "standard", quick: bool = False) -> Measured:
    """One kernel through the cases of a level."""
    if name in WRITES:
        return judge(name, conform(adapter(f"{HERE / 'writes.py'}:{name}"), cases(level, "write"), level))
    target = adapter(f"{HERE / 'unseen_kernels.py'}:{name}")
    if quick and "two-runs-differ" not in KERNELS[name].names:
        with patch("quire.conformance.runner.run.check_repetition", lambda *_: None):
            return judge(name, conform(target, cases(level), level))
    return judge(name, conform(target, cases(level), level))


def summary(found: list[Measured], level: str) -> dict[str, Any]:
    """The figures that docs/power.md has."""
    return {
        "level": level,
        "kernels": len(found),
        "detected": sum(one.failing > 0 for one in found),
        "named": sum(one.named for one in found),
        "named_or_described": sum(one.named or one.described for one in found),
        "false_names": sum(bool(one.false) for one in found),
        "results": [asdict(one) for one in found],
    }


def table(figures: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = ["| kernel | cases that fail | named | contrast, or symptom |", "|---|---|---|---|"]
    for one in figures["results"]:
        verdict = ", ".join(f"{name} (false)" if name in one["false"] else name for name in one["names"]) or "-"
        said = one["contrast"] or "; ".join(one["symptoms"]) or "-"
        lines.append(f"| `{one['kernel']}` | {one['failing']} | {verdict} | {said} |")
    return "\n".join(lines) + "\n"


def write_document(file: Path, figures: dict[str, Any], of: str, every: int) -> None:
    """Replaces what follows the marker in docs/power.md, up to the next heading, by these figures."""
    head, _, rest = file.read_text(encoding="utf-8").partition(MARKERS[of])
    _, heading, tail = rest.partition("\n## ")
    counts = {key: figures[key] for key in ("kernels", "detected", "named", "named_or_described", "false_names")}
    words = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in counts.items())
    words = words.replace("kernels ", f"{every} kernels, measured ", 1)
    made = f"{MARKERS[of]}\n\nLevel `{figures['level']}`: {words}.\n\n{table(figures)}"
    file.write_text(f"{head}{made}{heading}{tail}", encoding="utf-8")


def _measure(job: tuple[str, str, bool]) -> Measured:
    return measure(*job)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="kernels to measure (default: all)")
    parser.add_argument("--writes", action="store_true", help="measure the writes")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--level", default="standard")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to a file")
    parser.add_argument("--quick", action="store_true", help="do not repeat calls whose result is correct")
    parser.add_argument("--markdown", metavar="FILE", help="also write the figures into docs/power.md")
    args = parser.parse_args()
    every = WRITES if args.writes else KERNELS
    names = args.names or list(every)
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        found = []
        for one in pool.imap(_measure, [(name, args.level, args.quick) for name in names]):
            print(one.line, flush=True)
            found.append(one)
    figures = summary(found, args.level)
    counts = {key: value for key, value in figures.items() if key != "results"}
    print(f"{counts} in {time.perf_counter() - start:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    if args.markdown:
        write_document(Path(args.markdown), figures, "writes" if args.writes else "attention", len(every))
    return 0


if __name__ == "__main__":
    sys.exit(main())
