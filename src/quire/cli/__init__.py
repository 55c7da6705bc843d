"""The command line: one file a verb. Each has `HELP`, `EXAMPLES`, `add_arguments(parser)` and `run(args) -> exit code`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

import quire
from quire.errors import ArgumentError

VERBS = ("doctor", "demo", "explain", "warm", "check", "conform", "diagnose", "bench", "tune")

EXAMPLES = """\
examples:
  quire doctor                      is this machine fine?
  quire demo                        watch a small decoder use a paged cache
  quire explain --arch gfx942       which kernel would an MI300X run, and why?
"""


def main(argv: Sequence[str] | None = None) -> int:
    """0: fine. 1: the answer is no. 2: the question was wrong."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        "quire",
        description="Paged attention that explains itself.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quire {quire.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    # Only the verb that was asked for is imported; to list them all, all are.
    asked = tuple(verb for verb in VERBS if argv and argv[0] == verb)
    for verb in asked or VERBS:
        module = import_module(f"quire.cli.{verb}")
        one = verbs.add_parser(
            verb,
            usage=f"quire {verb} [options]",
            help=module.HELP,
            description=module.HELP,
            epilog=getattr(module, "EXAMPLES", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(one)
        one.set_defaults(run=module.run, parser=one)
    args = parser.parse_args(argv)
    if args.verb is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except ArgumentError as error:
        args.parser.error(str(error))
    except BrokenPipeError:
        # The reader has seen enough (`| head`): no verdict was asked for, and the interpreter must not try to flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def version(package: str) -> str:
    """The installed version of a package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
