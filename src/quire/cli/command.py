"""What every command is made of: options in groups, values that are checked, `--json` and `--output`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from quire.errors import ArgumentError

SCHEMA = 1
"""The version of the format of every JSON object that a command writes. It changes when a key changes its meaning or goes."""
Args = SimpleNamespace
"""The values of a command's arguments and options, by name."""
INTERRUPTED = 130
"""The exit status after Ctrl-C: 128 and the number of SIGINT."""


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
    """A command whose `run(args)` returns the exit status. Every one but `help` and `completion` has `--json` and `--output`."""

    def __init__(
        self,
        name: str,
        run: Callable[[Args], int],
        help: str,
        parameters: Iterable[click.Parameter],
        examples: str,
        *,
        json: bool = True,
        **attributes: Any,
    ):
        output: list[click.Parameter] = [
            flag("--json", "print one JSON object to standard output, and nothing else", "output"),
            Option("--output", metavar="FILE", type=Writable(), help="write the JSON object to a file", group="output"),
        ]
        both = [*parameters, *(output if json else ())]
        super().__init__(name, params=both, help=help, callback=self._call, **attributes)
        self.run, self.examples = run, examples

    def _call(self, **values: Any) -> int:
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
        formatter.write(f"\n{self.examples}")


class Whole(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A whole number, of `low` or more."""

    name = "N"

    def __init__(self, low: int | None = None, high: int | None = None):
        self.low, self.high = low, high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        allowed = "a whole number"
        if self.low is not None:
            allowed += f" of {self.low} or more" if self.high is None else f", {self.low} to {self.high}"
        try:
            number = int(value)
        except ValueError:
            number = None
        if number is None or (self.low is not None and number < self.low) or (self.high is not None and number > self.high):
            self.fail(f"given {value}; allowed: {allowed}", param, ctx)
        return number


Count = Whole(1)


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A number; with `above`, one that is larger."""

    name = "NUMBER"

    def __init__(self, above: float | None = None, what: str = "a number"):
        self.above, self.what = above, what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"given {value!r}; allowed: {self.what}", param, ctx)
        if self.above is not None and not number > self.above:
            self.fail(f"given {number:g}; allowed: {self.what} above {self.above:g}", param, ctx)
        return number


class ChoiceOf(click.Choice[str]):
    """A few words, as an error names them all; upper case is as good as lower case."""

    def __init__(self, choices: Iterable[str]):
        super().__init__(tuple(choices), case_sensitive=False)

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"given {value!r}; allowed: {', '.join(self.choices)}"


class Writable(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A file in a folder that exists: what a long run finds must not be lost at its end."""

    name = "FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = Path(value).absolute()
        if not path.parent.is_dir() or path.is_dir():
            self.fail(f"given {value}; allowed: a file in a folder that exists", param, ctx)
        return str(value)


def explained(error: click.ClickException) -> str:
    """An error of click in the words of the others: the option, what was given, what is allowed."""
    parameter = getattr(error, "param", None)
    if parameter is not None and isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter):
        name = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
        return f"{name}: {error.message}"
    return error.format_message()


def is_quiet(args: Args) -> bool:
    """Whether standard output is for a program: no text and no progress."""
    return bool(args.json)


Answer = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""A result for programs, or a function that makes it if it is asked for."""


def answer(args: Args, found: Answer, text: str | Callable[[], object]) -> None:
    """Gives the result: as JSON if it was asked for, else as text (printed, or by a function that prints); `--output` has JSON."""
    save(args, found)
    if args.json:
        print(_json(args, found))
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
    return json.dumps({"schema": SCHEMA, "command": args.command, **found}, indent=2)
