"""The README tells the truth. Its python parts run one after the other in one fresh process, as a reader would type them; a
text part that follows at once is what the part before it prints, "..." standing for anything. Its quire commands run too."""

from __future__ import annotations

import doctest
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
COMMAND = "import sys; from quire.cli import main; sys.argv[0] = 'quire'; sys.exit(main())"


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


def run_session(sources: list[str]) -> list[tuple[str, str | None]]:
    done = subprocess.run(
        [sys.executable, "-c", SESSION], input=json.dumps(sources), cwd=README.parent, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return [(printed, error) for printed, error in json.loads(done.stdout)]


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
def test_command(command: str, output: str | None, python: Callable) -> None:
    done = python("-c", COMMAND, *command.split()[1:])
    assert done.returncode == 0, done.stderr
    if output is not None:
        assert same(output, done.stdout), f"printed:\n{done.stdout}\nshown:\n{output}"


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
