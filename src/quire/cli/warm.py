"""`quire warm`: compiles every kernel that a layer can need, before the first call."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from quire.cli.command import INTERRUPTED, Args, ChoiceOf, Command, Option, answer, flag, is_quiet
from quire.cli.known_layers import layers_of, like_option, options_of
from quire.cli.problem_options import platform_of, problem_of, problem_options, rope_of
from quire.cli.progress import progress
from quire.errors import ArgumentError
from quire.platform import Platform
from quire.prepare import INDICES, prepare

HELP = """Compiles every kernel that some batch of a layer can need, in parallel, so that no call has to compile. It needs Triton
and no GPU."""
EXAMPLES = """\
examples:
  quire warm                                             32/8 heads x 128, bf16, for this machine's GPU
  quire warm --arch h100 --kv-dtype fp8 --lse            another machine's, with kernels that return an LSE
  quire warm --arch mi300x --directory kernels/          into a folder: set TRITON_CACHE_DIR to it in the container that runs them
  quire warm --arch h100 --prefixes --rope --qk-norm bf16
                                                         also what reads shared prefixes once; writes normalise and rotate
  quire warm --arch h100 --like deepseek-v3 --select positions
                                                         the layers of a known model, by kind, with sparse attention

A folder has the layout of TRITON_CACHE_DIR. It serves the same versions of Quire and Triton and the same architecture.

exit status: 0 compiled, 1 this machine has no kernel that is compiled, 2 an argument is wrong, 130 interrupted: kernels that were
compiled until then are kept
"""
_COMPILED = "what is compiled"
PARAMETERS: list[click.Parameter] = [
    like_option(),
    *problem_options(),
    flag("--prefixes", "some batches have prefixes that sequences share", _COMPILED),
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
    if platform.vendor != "cpu" and find_spec("triton") is None:
        raise click.UsageError("Triton is not installed: it compiles the kernels of GPUs", click.get_current_context(silent=True))
    if args.like is None:
        status, found, text = _compiled(args, platform)
        answer(args, found, text)
        return status
    model, kinds = layers_of(args)
    statuses, answers, texts = [], [], []
    for kind, layer in zip(kinds, options_of(args, kinds)):
        status, found, text = _compiled(layer, platform)
        statuses.append(status)
        answers.append({"layers": kind.layers, **found})
        texts.append(f"{model}: {kind}\n{text}")
        if found["interrupted"]:
            break
    answer(args, {"like": model, "kinds": answers}, "\n\n".join(texts))
    return max(statuses)


def _compiled(args: Args, platform: Platform) -> tuple[int, dict[str, Any], str]:
    """Compiles the kernels of the layer that the options describe: the exit status, and the answer for programs and for people."""
    rope, problem = rope_of(args), problem_of(args, platform).replace(prefixes=args.prefixes)
    found: dict[str, Any] = {"arch": platform.arch, "problem": problem.to_dict(), "interrupted": False}
    found["rope"] = None if rope is None else rope.traits(True)._asdict()
    head, count = f"{problem}\non {platform}", CompileCount(quiet=is_quiet(args))
    how: dict[str, Any] = {"index": list(args.index), "rope": rope, "platform": platform, "directory": args.directory}
    try:
        with count.shown:
            prepared = prepare(problem, **how, progress=count)
    except KeyboardInterrupt:
        kept = "interrupted before the first kernel was compiled"
        if count.done:
            where = args.directory or "the compile cache"
            kept = f"interrupted: {count.done} of {count.total} kernels are compiled, and kept in {where}"
        found |= {"interrupted": True, "compiled": count.done, "total": count.total}
        return INTERRUPTED, found, f"{head}\n{kept}"
    except ArgumentError as error:
        raise ArgumentError(f"--{error.argument}", error.given, error.allowed) from None
    said = str(prepared) if prepared.kernels else "nothing to compile: the kernels of this platform are not compiled at run time"
    found |= prepared._asdict() | {"compiled": len(prepared.kernels), "total": len(prepared.kernels)}
    return 0 if prepared.kernels else 1, found, f"{head}\n{said}"


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
