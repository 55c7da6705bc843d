"""`quire help`: the help of the program, or of one command."""

from __future__ import annotations

import click

from quire.cli.command import Args, Argument, Command, OneOfNames

EXAMPLES = """\
examples:
  quire help              all commands, output formats and exit statuses
  quire help explain      the same as quire explain --help

exit status: 0, 2 for a name that is no command
"""


def run(args: Args) -> int:
    from quire.cli import COMMANDS, unknown_command

    root = click.get_current_context().find_root()
    if args.name is None:
        print(root.get_help())
        return 0
    if args.name not in COMMANDS:
        raise click.UsageError(unknown_command(args.name), root)
    group = root.command
    assert isinstance(group, click.Group)
    command = group.get_command(root, args.name)
    assert command is not None
    with click.Context(command, parent=root, info_name=args.name) as context:
        print(context.get_help())
    return 0


def _names() -> list[str]:
    from quire.cli import COMMANDS

    return list(COMMANDS)


COMMAND = Command(
    "help",
    run,
    "Shows all commands and what their exit statuses mean, or the options and examples of one command.",
    [Argument("name", "a command", required=False, metavar="[COMMAND]", type=OneOfNames(_names))],
    EXAMPLES,
    json=False,
    torch=False,
)
