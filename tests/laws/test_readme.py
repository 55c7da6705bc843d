"""The README tells the truth. Its python parts run one after the other in one fresh process, as a reader would type them; a
text part that follows at once is what the part before it prints, "..." standing for anything. Its quire commands run too."""

from __future__ import annotations

import doctest
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

README = Path(__file__).parents[2] / "README.md"

SESSION = """
import contextlib, io, json, sys, traceback
session, answers = {"__name__": "__main__"}, []
for source in json.load(sys.stdin):
    printed, error = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(source, "README.md", "exec"), session)
        except BaseException:
            error = traceback.format_exc()
    answers.append((printed.getvalue(), error))
print(json.dumps(answers))
"""
EACH_COMMAND = """
import json, multiprocessing, os, sys, tempfile, torch

def run(command, printed):
    os.dup2(printed.fileno(), 1)
    sys.argv = command.split()
    from quire.cli import main
    sys.exit(main())

# Each in a process of its own; torch, which takes most of the time, is imported once.
answers = []
for command in json.load(sys.stdin):
    with tempfile.TemporaryFile("w+") as printed:
        process = multiprocessing.get_context("fork").Process(target=run, args=(command, printed))
        process.start()
        process.join()
        printed.seek(0)
        answers.append((process.exitcode, printed.read()))
print(json.dumps(answers))
"""


class Part(NamedTuple):
    """A fenced part of a page, and the output that the page shows for it."""

    language: str
    text: str
    line: int
    output: str | None

    def __str__(self) -> str:
        return f"line {self.line}"


def parts_of(page: str) -> list[Part]:
    fences = list(re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    parts = []
    for fence, after in zip(fences, [*fences[1:], None]):
        shown = after is not None and after[1] == "text" and not page[fence.end() : after.start()].strip()
        parts.append(Part(fence[1], fence[2], page[: fence.start()].count("\n") + 1, after[2] if shown else None))
    return parts


def same(shown: str | None, printed: str) -> bool:
    """Whether the page shows what was printed. A part that prints without saying what is not the same."""
    want, got = ("".join(f"{line.rstrip()}\n" for line in text.strip().splitlines()) for text in (shown or "", printed))
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)


def answers_of(script: str, lines: list[str]) -> tuple[list[Any], str]:
    """What a script printed about each line, and what it said on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(lines), cwd=README.parent, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def run_session(sources: list[str]) -> list[tuple[str, str | None]]:
    return [(printed, error) for printed, error in answers_of(SESSION, sources)[0]]


PARTS = parts_of(README.read_text()) if README.exists() else []
PYTHON = [part for part in PARTS if part.language == "python"]
COMMANDS = [
    (command.removeprefix("$ "), part.output)
    for part in PARTS
    if part.language == "console" and re.match(r"(\$ )?quire ", part.text)
    for command in part.text.splitlines()
]


@pytest.fixture(scope="module")
def session() -> dict[Part, tuple[str, str | None]]:
    return dict(zip(PYTHON, run_session([part.text for part in PYTHON])))


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    """How each command ended and what it printed; as `stderr`, what all of them said there."""
    lines = [command for command, _ in COMMANDS]
    answers, stderr = answers_of(EACH_COMMAND, lines)
    return dict(zip(lines, answers)) | {"stderr": stderr}


def test_code_comes_early() -> None:
    assert PYTHON and PYTHON[0].line <= 15


@pytest.mark.parametrize("part", PYTHON, ids=str)
def test_python(part: Part, session: dict[Part, tuple[str, str | None]]) -> None:
    printed, error = session[part]
    assert error is None, error
    shown = part.output if BUILT else without_compiler(part.output)
    assert same(shown, printed), f"printed:\n{printed}\nshown:\n{shown}"


BUILT = (README.parent / "src/quire/kernels/native/libquire.so").exists()


def without_compiler(shown: str) -> str:
    """What the page would show where nobody could compile the native kernels: it shows them."""
    shown = re.sub(r"^chosen: native .*$", "chosen: torch ...", shown, flags=re.MULTILINE)
    return re.sub(r"^(refused: native .*\n.*)$", r"\1\n...", shown, flags=re.MULTILINE)


@pytest.mark.parametrize("command, output", COMMANDS, ids=[command for command, _ in COMMANDS])
def test_command(command: str, output: str | None, commands: dict[str, Any]) -> None:
    code, printed = commands[command]
    assert code == 0, commands["stderr"]
    if output is not None:
        assert same(output, printed), f"printed:\n{printed}\nshown:\n{output}"


PAGE = """
```python
x = 1
```
words
```python
print(x, 0.123)
```

```text
1 ...
```
"""


def test_the_page_is_read() -> None:
    assert parts_of(PAGE)[:2] == [Part("python", "x = 1\n", 2, None), Part("python", "print(x, 0.123)\n", 6, "1 ...\n")]


def test_a_session_goes_on() -> None:
    assert run_session(["x = 1", "print(x)", "1 / 0"])[1] == ("1\n", None)
    assert "ZeroDivisionError" in str(run_session(["1 / 0"])[0][1])


@pytest.mark.parametrize("shown, printed", [("1 ...\n", "2 3\n"), (None, "1\n"), ("1\n", ""), ("a\nb\n", "a\n")])
def test_the_law_sees_a_difference(shown: str | None, printed: str) -> None:
    assert not same(shown, printed)


def test_dots_stand_for_anything() -> None:
    assert same("1 ...\n", "1 0.123\n") and same(None, "") and same("a\n", "a   \n")
