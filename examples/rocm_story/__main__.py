"""Reproduces a failure of vLLM's attention test on ROCm (November 2025) on a CPU, and explains it.

It takes about 20 seconds and 3 GB of memory.

python examples/rocm_story           the investigation, step by step
python examples/rocm_story --json    its results as JSON

exit status: 0 if every step gave the reported result, 1 if not
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder that holds the package rocm_story

from quire.conformance.reporting.terminal import printer
from rocm_story.investigation import investigate
from rocm_story.printing import print_investigation


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "rocm_story", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    as_json = parser.parse_args(argv).json
    found = investigate(show_progress)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps({"schema": 1, "command": "example", "interrupted": False, **found.to_dict()}, indent=2))
    else:
        print_investigation(found, printer())
    return 0 if found.reproduced else 1


def show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text} ...", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
