"""What every command is made of: options in groups, values that are checked, `--json` and `--output`."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click.shell_completion import CompletionItem

from quire import interrupts
from quire.errors import ArgumentError
from quire.interrupts import INTERRUPTED as INTERRUPTED

SCHEMA = 1
"""The version of the format of every JSON object that a command writes. It changes when a key changes its meaning or goes."""
LARGEST = 2**31 - 1
"""The largest whole number that an option takes: larger ones do not fit the tensors that they describe."""
Args = SimpleNamespace
"""The values of a command's arguments and options, by name."""


class Option(click.Option):
    """An option of a group of the help."""

    def __init__(self, *names: str, group: str = "options", **attributes: Any):
        super().__init__(list(names), **attributes)
        self.group = group


class Argument(click.Argument):
    """An argument that the help explains."""

    group = "arguments"

    def __init__(self, name: str, meaning: str, **attributes: Any):
        super().__init__([name], **attributes)
        self.meaning = meaning

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self.meaning


def flag(name: str, help: str, group: str = "options", **attributes: Any) -> Option:
    return Option(name, is_flag=True, help=help, group=group, **attributes)


class Command(click.Command):
    """A command whose `run(args)` returns the exit status. Every one but `help` and `completion` has `--json` and `--output`.
    `torch`: whether it computes."""

    def __init__(
        self,
        name: str,
        run: Callable[[Args], int],
        help: str,
        parameters: Iterable[click.Parameter],
        examples: str,
        *,
        json: bool = True,
        torch: bool = True,
        **attributes: Any,
    ):
        output: list[click.Parameter] = [
            flag("--json", "print one JSON object to standard output, and nothing else", "output"),
            Option("--output", metavar="FILE", type=Writable(), help="write the JSON object to a file", group="output"),
        ]
        both = [*parameters, *(output if json else ())]
        super().__init__(name, params=both, help=help, callback=self._call, **attributes)
        self.run, self.examples, self.torch = run, examples, torch

    def _call(self, **values: Any) -> int:
        if self.torch:
            import torch  # noqa: F401  # before interrupts are allowed: it cannot be imported twice
        interrupts.allow()
        return self.run(Args(command=self.name, **values))

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        arguments = [p.make_metavar(ctx) for p in self.params if isinstance(p, click.Argument)]
        formatter.write(f"usage: {' '.join((ctx.command_path, *arguments, '[OPTIONS]'))}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "output"), []).append(record)
        # What every command has comes last.
        for title, records in sorted(groups.items(), key=lambda item: item[0] == "output"):
            with formatter.section(title):
                formatter.write_dl(records, col_max=34)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n{wrapped_help(self.examples, formatter.width)}")


class Whole(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A whole number from `low` to `high`, and never above LARGEST."""

    name = "N"

    def __init__(self, low: int | None = None, high: int | None = None):
        self.low, self.high = low, high

    @property
    def allowed(self) -> str:
        if self.high is not None:
            return f"a whole number, {self.low} to {self.high}"
        return "a whole number" if self.low is None else f"a whole number of {self.low} or more"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"given {value}; allowed: {self.allowed}", param, ctx)
        if (self.low is not None and number < self.low) or (self.high is not None and number > self.high):
            self.fail(f"given {value}; allowed: {self.allowed}", param, ctx)
        if abs(number) > LARGEST:
            self.fail(f"given {value}; allowed: {self.allowed}, at most {LARGEST}", param, ctx)
        return number


Count = Whole(1)


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A number; with `above`, one that is larger."""

    name = "NUMBER"

    def __init__(self, above: float | None = None, what: str = "a number"):
        self.above, self.what = above, what

    @property
    def allowed(self) -> str:
        return self.what if self.above is None else f"{self.what} above {self.above:g}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"given {value!r}; allowed: {self.what}", param, ctx)
        if self.above is not None and not number > self.above:
            self.fail(f"given {number:g}; allowed: {self.allowed}", param, ctx)
        return number


class ChoiceOf(click.Choice[str]):
    """A few words, as an error names them all; upper case is as good as lower case."""

    def __init__(self, choices: Iterable[str]):
        super().__init__(tuple(choices), case_sensitive=False)

    @property
    def allowed(self) -> str:
        return ", ".join(self.choices)

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"given {value!r}; allowed: {self.allowed}"


class Readable(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A file; a shell completes its name."""

    name = "FILE"
    allowed = "a file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if Path(value).is_dir():
            self.fail(f"given {value}, which is a folder; allowed: a file", param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class Writable(Readable):
    """A file that can be written: what a long run finds must not be lost at its end."""

    allowed = "a file in a folder that exists"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = Path(value).absolute()
        if not path.parent.is_dir() or path.is_dir():
            self.fail(f"given {value}; allowed: {self.allowed}", param, ctx)
        is_new = not path.exists()
        try:
            with path.open("a"):
                pass
            if is_new:
                path.unlink()
        except OSError as error:
            self.fail(f"given {value}; allowed: a file that can be written ({error.strerror})", param, ctx)
        return str(value)


class OneOfNames(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A name that the command checks itself; a shell completes it. The names are a function's: they may have to be imported."""

    def __init__(self, names: Callable[[], Iterable[str]], name: str = "NAME", files: bool = False):
        self.names, self.name, self.files = names, name, files

    @property
    def allowed(self) -> str:
        return ", ".join(self.names())

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in self.names() if name.lower().startswith(incomplete.lower())]
        return found or ([CompletionItem(incomplete, type="file")] if self.files else [])


def explained(error: click.ClickException, root: click.Group, line: Sequence[str]) -> str:
    """An error of click in the words of the others: the option, what was given, what is allowed."""
    parameter = getattr(error, "param", None)
    if isinstance(error, click.BadOptionUsage) and "requires" in error.message:
        command = root.get_command(click.Context(root), line[0])
        parameter = next((one for one in command.params if error.option_name in one.opts), None) if command else None
        return error.message if parameter is None else f"{error.option_name}: given nothing; allowed: {_allowed(parameter)}"
    if parameter is None or not isinstance(error, click.BadParameter):
        return error.format_message()
    name = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name.strip("[]")
    if isinstance(error, click.MissingParameter):
        return f"{name}: given nothing; allowed: {_allowed(parameter)}"
    return f"{name}: {error.message}"


def _allowed(parameter: click.Parameter) -> str:
    """What a parameter takes, in words."""
    if isinstance(parameter, Argument) and not isinstance(parameter.type, click.Choice):
        return parameter.meaning
    return getattr(parameter.type, "allowed", "") or f"a value: {parameter.metavar or 'a word'}"


def wrapped_help(text: str, width: int) -> str:
    """The text below a list of options, for a terminal of this width. Paragraphs are filled. A line of a list is kept; a long one
    has its explanation below it."""
    found: list[str] = []
    for paragraph in text.strip("\n").split("\n\n"):
        lines = paragraph.splitlines()
        listed = [line for line in lines if line.startswith("  ")]
        head = " ".join(line for line in lines if not line.startswith("  "))
        found += textwrap.wrap(head, width, break_long_words=False, break_on_hyphens=False)
        for line in listed:
            found += _list_line(line, width)
        found.append("")
    return "\n".join(found).rstrip("\n") + "\n"


def _list_line(line: str, width: int) -> list[str]:
    """One line of a list, a command or a number and what it means, in at most so many columns."""
    if len(line) <= width:
        return [line]
    begin, _, meaning = re.sub(r" {2,}", "\0", line.strip()).partition("\0")
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    if len(begin) <= 4 and meaning:
        return textwrap.wrap(meaning, width, initial_indent=f"  {begin:5}", subsequent_indent=" " * 7, **how)
    if line.startswith("    "):  # the meaning of the line above
        return textwrap.wrap(line.strip(), width, initial_indent=" " * 6, subsequent_indent=" " * 6, **how)
    parts = textwrap.wrap(begin, width - 2, initial_indent="  ", subsequent_indent=" " * 6, **how)
    command = [f"{part} \\" for part in parts[:-1]] + parts[-1:]  # so that it can be copied
    return [*command, *textwrap.wrap(meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6, **how)]


def is_quiet(args: Args) -> bool:
    """Whether standard output is for a program: no text and no progress."""
    return bool(args.json)


Answer = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""A result for programs, or a function that makes it if it is asked for."""


def answer(args: Args, found: Answer, text: str | Callable[[], object]) -> None:
    """Gives the result: as JSON if it was asked for, else as text (printed, or by a function that prints); `--output` has JSON."""
    save(args, found)
    if args.json:
        text = _json(args, found)
        interrupts.ignore()
        print(text)
    elif isinstance(text, str):
        print(text)
    else:
        text()


def save(args: Args, found: Answer) -> None:
    """Writes `--output`; a long run does it again and again, so that a run that is cut short leaves what it found."""
    if args.output is not None:
        try:
            Path(args.output).write_text(_json(args, found) + "\n", encoding="utf-8")
        except OSError as error:
            raise ArgumentError("--output", args.output, f"a file that can be written ({error})") from None


def _json(args: Args, found: Answer) -> str:
    found = found() if callable(found) else found
    return json.dumps({"schema": SCHEMA, "command": args.command, "interrupted": False, **found}, indent=2)
