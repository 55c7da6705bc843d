"""`quire warm`: compiles every kernel that a layer can need, before the first call."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from quire.cli.explain import add_problem_arguments, platform_of, problem_of
from quire.prepare import INDICES, prepare

HELP = "compile every kernel of a layer beforehand, so that no call compiles"
EXAMPLES = """\
examples:
  quire warm                                             32/8 heads x 128, bf16, for this machine's GPU
  quire warm --arch sm90 --kv-dtype fp8 --lse            another machine's, with kernels that give an LSE
  quire warm --arch gfx942 --directory kernels/          into a folder: set TRITON_CACHE_DIR to it in the container that runs them

A folder has the layout of TRITON_CACHE_DIR. It serves the same versions of Quire and Triton and the same architecture.

exit status: 0 compiled, 1 this machine has no kernel that is compiled, 2 the question is wrong
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem_arguments(parser)
    add = parser.add_argument_group("what is compiled").add_argument
    add("--index", nargs="+", choices=INDICES, default=["int32"], help="types of the index tensors (int32)")
    add("--directory", type=Path, metavar="DIR", help="where compiled kernels go; by default Triton's own cache")
    add("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    platform = platform_of(args)
    problem = problem_of(args, platform)
    prepared = prepare(
        problem,
        index=args.index,
        platform=platform,
        directory=args.directory,
        progress=False if args.json else None,
    )
    if args.json:
        print(json.dumps({**prepared._asdict(), "arch": platform.arch, "problem": problem.to_dict()}, indent=2))
    elif prepared.kernels:
        print(f"{problem}\non {platform}\n{prepared}")
    else:
        print(f"{problem}\non {platform}\nnothing to compile: the kernels of this platform are not compiled at run time")
    return 0 if prepared.kernels else 1
