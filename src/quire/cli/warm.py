"""`quire warm`: compiles every kernel that a layer can need, before the first call."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from quire.cli.command import INTERRUPTED, Args, ChoiceOf, Command, Option, answer, is_quiet
from quire.cli.problem_options import platform_of, problem_of, problem_options
from quire.cli.progress import progress
from quire.errors import ArgumentError
from quire.prepare import INDICES, prepare

HELP = """Compiles every kernel that some batch of a layer can need, in parallel, so that no call has to compile. It needs Triton
and no GPU."""
EXAMPLES = """\
examples:
  quire warm                                             32/8 heads x 128, bf16, for this machine's GPU
  quire warm --arch h100 --kv-dtype fp8 --lse            another machine's, with kernels that return an LSE
  quire warm --arch mi300x --directory kernels/          into a folder: set TRITON_CACHE_DIR to it in the container that runs them

A folder has the layout of TRITON_CACHE_DIR. It serves the same versions of Quire and Triton and the same architecture.

exit status: 0 compiled, 1 this machine has no kernel that is compiled, 2 an argument is wrong, 130 interrupted: kernels that were
compiled until then are kept
"""
_COMPILED = "what is compiled"
PARAMETERS: list[click.Parameter] = [
    *problem_options(),
    Option(
        "--index",
        type=ChoiceOf(INDICES),
        multiple=True,
        default=("int32",),
        group=_COMPILED,
        help="a type of the index tensors; may be given twice (int32)",
    ),
    Option(
        "--directory",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        group=_COMPILED,
        help="where compiled kernels go (Triton's own cache)",
    ),
]


def run(args: Args) -> int:
    platform = platform_of(args)
    problem = problem_of(args, platform)
    if platform.vendor != "cpu" and find_spec("triton") is None:
        raise click.UsageError("Triton is not installed: it compiles the kernels of GPUs", click.get_current_context(silent=True))
    found: dict[str, Any] = {"arch": platform.arch, "problem": problem.to_dict(), "interrupted": False}
    head, count = f"{problem}\non {platform}", CompileCount(quiet=is_quiet(args))
    how: dict[str, Any] = {"index": list(args.index), "platform": platform, "directory": args.directory}
    try:
        with count.shown:
            prepared = prepare(problem, **how, progress=count)
    except KeyboardInterrupt:
        kept = "interrupted before the first kernel was compiled"
        if count.done:
            where = args.directory or "the compile cache"
            kept = f"interrupted: {count.done} of {count.total} kernels are compiled, and kept in {where}"
        answer(args, found | {"interrupted": True, "compiled": count.done, "total": count.total}, f"{head}\n{kept}")
        return INTERRUPTED
    except ArgumentError as error:
        raise ArgumentError(f"--{error.argument}", error.given, error.allowed) from None
    said = str(prepared) if prepared.kernels else "nothing to compile: the kernels of this platform are not compiled at run time"
    count_of = {"compiled": len(prepared.kernels), "total": len(prepared.kernels)}
    answer(args, found | prepared._asdict() | count_of, f"{head}\n{said}")
    return 0 if prepared.kernels else 1


class CompileCount:
    """How many kernels are compiled, shown on standard error."""

    def __init__(self, quiet: bool):
        self.quiet, self.done = quiet, 0
        self.total: int | None = None
        self.shown = ExitStack()

    def __call__(self, done: int, total: int) -> None:
        if self.total is None:
            self.tell = self.shown.enter_context(progress(total, quiet=self.quiet))
        else:
            self.tell("kernels compiled")
        self.done, self.total = done, total


COMMAND = Command("warm", run, HELP, PARAMETERS, EXAMPLES)
