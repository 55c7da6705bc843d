"""`quire diagnose`: what is wrong with a recorded call, or the story of the seeds."""

from __future__ import annotations

import argparse
import json
import sys

from quire.conformance.paper import paper
from quire.errors import ArgumentError

HELP = "say what is wrong with a recorded call, or tell the story of the seeds"
EXAMPLES = """\
examples:
  quire diagnose --story seeds      five documents about 8192 wrong numbers, solved: 15 seconds
  quire diagnose call.safetensors   run a recorded call again, compare with the reference, name the fault
  quire diagnose call.safetensors --kernel triton-mixed
                                    the same on another kernel of this machine

exit status: 0 if nothing is wrong (or the story holds), 1 if something is, 2 the question is wrong
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE", help="a call that quire.record saved")
    parser.add_argument("--kernel", metavar="NAME", help="the kernel to run it with; by default the one that fits this machine")
    parser.add_argument("--call", type=int, default=0, metavar="N", help="which call of the file, from 0 (0)")
    parser.add_argument("--story", choices=("seeds",), help="rebuild a failure of the field and solve it")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    if (args.file is None) == (args.story is None):
        raise ArgumentError("FILE", "both FILE and --story" if args.story else None, "either a recorded call or --story seeds")
    return _story(args)


def _story(args: argparse.Namespace) -> int:
    from quire.conformance.story import seeds
    from quire.conformance.telling import tell

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text} ...", end="", file=sys.stderr, flush=True)

    story = seeds(progress)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps(story.to_dict(), indent=2))
    else:
        tell(story, paper())
    return 0 if story.holds else 1
