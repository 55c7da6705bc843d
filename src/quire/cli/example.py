"""`quire example`: lists the examples and runs one, from the source tree or from the installed package."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import click

import quire
from quire import interrupts
from quire.cli.command import Args, Argument, Command, OneOfNames, answer
from quire.errors import ArgumentError
from quire.keywords import suggestion

HELP = """Lists the examples, or runs one. What follows the name is given to the example, which runs in this folder."""
EXAMPLES = """\
examples:
  quire example                        all of them, and what each shows
  quire example 01_first_batch         run one; 01 or first_batch will do
  quire example rocm_story --json      with arguments of its own

exit status: that of the example; 0 for the list, 2 for a name that is no example
"""
_PACKAGE = Path(quire.__file__).parent
FOLDERS = (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples")
"""Where examples are: in an installed package, and beside the `src` of a source tree."""


def examples() -> dict[str, Path]:
    """Every example by its name: a file, or a folder with a `__main__.py`."""
    folder = next((folder for folder in FOLDERS if folder.is_dir()), None)
    if folder is None:
        return {}
    files = [path for path in folder.glob("*.py") if not path.name.startswith("_")]
    folders = [path.parent for path in folder.glob("*/__main__.py")]
    return {path.stem: path for path in sorted((*files, *folders))}


def summary_of(path: Path) -> str:
    """The first sentence of an example's docstring."""
    source = path / "__main__.py" if path.is_dir() else path
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def takes_arguments(path: Path) -> bool:
    """Whether an example reads its command line."""
    files = path.rglob("*.py") if path.is_dir() else (path,)
    return any(re.search(r"\b(argparse|sys\.argv|click)\b", file.read_text(encoding="utf-8")) for file in files)


def run(args: Args) -> int:
    found = examples()
    if args.name is None:
        listed = {name: summary_of(path) for name, path in found.items()}
        folder = str(next(iter(found.values())).parent) if found else None
        answer(args, {"examples": listed, "folder": folder}, lambda: _list(listed))
        return 0
    if args.json or args.output:
        raise ArgumentError("--json" if args.json else "--output", "before the name", "after the name, if the example has it")
    matching = [name for name in found if args.name in (name, *name.split("_", 1)) or args.name == found[name].name]
    if len(matching) != 1:
        allowed = ", ".join(found) or "none: this installation has no examples"
        raise ArgumentError("NAME", repr(args.name), allowed + suggestion(args.name, found))
    path = found[matching[0]]
    if args.arguments and not takes_arguments(path):
        raise ArgumentError("ARGUMENTS", repr(args.arguments[0]), f"none: {path.stem} takes no arguments")
    return _run(path, list(args.arguments))


def _list(listed: dict[str, str]) -> None:
    from quire.cli.sheet import write

    width = max(map(len, listed), default=0)
    lines = [f"{name:{width}}  {text}" for name, text in listed.items()] or ["this installation has no examples"]
    write("\n".join(lines), dict.fromkeys(listed, "bold"))


def _run(path: Path, arguments: list[str]) -> int:
    """Runs an example in this process, as `python path` would."""
    with interrupts.importing():
        import torch  # noqa: F401  # every example does
    before = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path if path.is_dir() else path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    finally:
        sys.argv, sys.path[:] = before
    return 0


PARAMETERS: list[click.Parameter] = [
    Argument("name", "an example; none for the list", required=False, metavar="[NAME]", type=OneOfNames(examples)),
    Argument("arguments", "given to the example", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS...]"),
]
# Options after the name belong to the example.
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
COMMAND = Command("example", run, HELP, PARAMETERS, EXAMPLES, torch=False, context_settings=SETTINGS)
