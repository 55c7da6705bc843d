"""The command line: one file for each command. Only the command that is used is imported, so `quire --help` and shell
completion import neither torch nor a kernel."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

import quire
from quire import interrupts
from quire.cli.command import INTERRUPTED, SCHEMA, Command, explained, wrapped_help
from quire.errors import QuireError
from quire.keywords import suggestion

COMMANDS = {
    "doctor": "show the machine and its kernels, and check each kernel against the reference",
    "demo": "run a small decoder on a paged cache, and verify its results",
    "example": "list the examples, or run one",
    "explain": "show which kernel would run a call, why, and what would be faster",
    "warm": "compile every kernel of a layer in advance, so that no call compiles",
    "check": "show which rules of the contract a recorded call violates, and where",
    "conform": "test any paged-attention function, and name its faults",
    "diagnose": "run a recorded call again, and name what is wrong with it",
    "bench": "measure the kernels against other libraries; each result is checked before it is timed",
    "plan": "predict the cost of attention on some GPUs, and find the best parallel split",
    "tune": "search for the best tile sizes of the Triton kernels on this GPU",
    "completion": "print the script that completes commands and options in a shell",
    "help": "show the help of a command",
}
"""Every command and what it does, in the order in which the help lists them."""

WIDTH = 110
"""The most columns of a line of help."""
EPILOG = """\
examples:
  quire doctor                      check the kernels of this machine
  quire demo                        watch a small decoder use a paged cache
  quire explain --arch mi300x       which kernel would an MI300X run, and why?
  quire example                     the examples that come with the package
  eval "$(quire completion bash)"   complete commands and options in this shell

output: text for people. --json prints one JSON object to standard output and nothing else; --output FILE writes the same object to
a file, in addition to the text. It has the keys "schema" (1, the version of its format), "command" and "interrupted". Progress goes
to standard error. Colors need a terminal; NO_COLOR turns them off.

exit status, of every command:
  0    success: results are correct, a kernel can run, the contract holds
  1    a result is wrong, no kernel can run, or the contract is violated
  2    an argument is wrong, or the machine lacks what the command needs; nothing was run
  3    conform: nothing was computed, because every case was refused or skipped
  130  interrupted (Ctrl-C): results until then are reported
  141  the reader of standard output closed it (`| head`)
"""


class Commands(click.Group):
    """The commands, each imported when it is used."""

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write("usage: quire COMMAND [OPTIONS]\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("options"):
            formatter.write_dl([record for one in self.get_params(ctx) if (record := one.get_help_record(ctx)) is not None])
        self.format_commands(ctx, formatter)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS:
            raise click.UsageError(unknown_command(args[0]), ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: Command = import_module(f"quire.cli.{name}").COMMAND
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n{wrapped_help(EPILOG, formatter.width)}")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in COMMANDS if name.startswith(incomplete)]
        items = [CompletionItem(name, help=COMMANDS[name]) for name in names]
        return items if not incomplete.startswith("-") else super().shell_complete(ctx, incomplete)


def commands() -> Commands:
    """The command line as click knows it."""
    made = Commands(
        "quire", invoke_without_command=True, help="Paged attention for mixed batches, with a dispatcher that explains its choice."
    )
    made.params.append(
        click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_version, help="print the version")
    )
    width = None if sys.stdout.isatty() else WIDTH
    made.context_settings = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH, "terminal_width": width}
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status (`quire help` lists them). A wrong argument raises SystemExit(2)."""
    _open_closed_streams()
    line, root = list(sys.argv[1:] if argv is None else argv), commands()
    if argv is None:
        root._main_shell_completion({}, "quire", "_QUIRE_COMPLETE")  # ends the process if the shell requested completions
    try:
        with root.make_context("quire", line) as context:
            if not line:
                print(context.get_help(), file=sys.stderr)
                return 2
            code = int(root.invoke(context) or 0)
        sys.stdout.flush()
        interrupts.ignore()
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.ClickException as error:
        _refuse(_place(error, line), explained(error, root, line))
    except QuireError as error:
        _refuse(f"quire {line[0]}", _with_option_name(error, root, line))
    except KeyboardInterrupt:
        return _interrupted(line)
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        # Most often standard output: a full disk. The machine lacks what the command needs.
        _discard_output()
        _refuse(f"quire {line[0]}", f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    return code


def unknown_command(given: str) -> str:
    """The error about a name that is no command."""
    return f"COMMAND: given {given!r}; allowed: {', '.join(COMMANDS)}{suggestion(given, COMMANDS)}"


def version(package: str) -> str:
    """The installed version of a package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _version(ctx: click.Context, parameter: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        print(f"quire {quire.__version__}")
        ctx.exit()


def _open_closed_streams() -> None:
    """Replaces standard streams that are closed (`>&-`) with the null device: no other file may get their numbers."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", encoding="utf-8"))


def _discard_output() -> None:
    """Leaves nothing for the interpreter to flush when it ends: that would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupted(line: Sequence[str]) -> int:
    """The end of a command that an interrupt cut before it had a result."""
    interrupts.ignore()
    print(f"\nquire {line[0]}: interrupted", file=sys.stderr)
    if "--json" in line:
        print(json.dumps({"schema": SCHEMA, "command": line[0], "interrupted": True}))
    sys.stdout.flush()
    return INTERRUPTED


def _place(error: click.ClickException, line: Sequence[str]) -> str:
    """The command that an error is about. Click's parser does not always know it."""
    if isinstance(error, click.UsageError) and error.ctx:
        return error.ctx.command_path
    return f"quire {line[0]}" if line and line[0] in COMMANDS else "quire"


def _with_option_name(error: QuireError, root: Commands, line: Sequence[str]) -> str:
    """The message of an error. An argument of a function that is an option of the command gets the name of the option."""
    command = root.get_command(click.Context(root), line[0])
    options = {name for parameter in command.params for name in parameter.opts} if command else set()
    name = getattr(error, "argument", "")
    option = f"--{name.replace('_', '-')}"
    return str(error).replace(name, option, 1) if name and option in options else str(error)


def _refuse(where: str, message: str) -> NoReturn:
    command = where.removeprefix("quire").strip()
    print(f"{where}: error: {message}\nusage: see `quire help{f' {command}' if command else ''}`", file=sys.stderr)
    raise SystemExit(2)
