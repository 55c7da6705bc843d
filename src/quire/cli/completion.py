"""`quire completion`: the script that completes commands and options in a shell."""

from __future__ import annotations

from click.shell_completion import get_completion_class

from quire.cli.command import Args, Argument, ChoiceOf, Command

SHELLS = {
    "bash": 'eval "$(quire completion bash)"      in ~/.bashrc',
    "zsh": 'eval "$(quire completion zsh)"       in ~/.zshrc',
    "fish": "quire completion fish | source       in ~/.config/fish/config.fish",
}
EXAMPLES = f"""\
what to do with it:
  {SHELLS["bash"]}
  {SHELLS["zsh"]}
  {SHELLS["fish"]}

exit status: 0
"""


def run(args: Args) -> int:
    from quire.cli import commands

    kind = get_completion_class(args.shell)
    assert kind is not None
    script = kind(commands(), {}, "quire", "_QUIRE_COMPLETE")
    # `source()` of bash also starts bash to ask for its version, which may not be the shell of this machine.
    print(script.source_template % script.source_vars())
    return 0


COMMAND = Command(
    "completion",
    run,
    "Prints a script for a shell. Once the shell has read it, the Tab key completes commands, options and their values.",
    [Argument("shell", "the shell: bash, zsh or fish", type=ChoiceOf(SHELLS), metavar="SHELL")],
    EXAMPLES,
    json=False,
    torch=False,
)
