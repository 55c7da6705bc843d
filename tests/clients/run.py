"""Tests Quire in the real engines, each in an environment of its own: `make clients`.

    python tests/clients/run.py [NAME ...] [--fresh]

The environment of a client is .venv-NAME, made from the pins of tests/clients/NAME.txt. It is made again when the pins change, and
with --fresh. A client that cannot be installed does not stop the others. The exit status is 1 unless every client passes.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
from pathlib import Path

OLDEST, BEFORE = (3, 11), (3, 15)
"""The versions of Python for which the pinned packages are made."""
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLIENTS = tuple(sorted(path.stem for path in HERE.glob("*.txt")))


class InstallError(Exception):
    """The environment of a client could not be made; the message is one line."""


def environment(name: str, fresh: bool) -> Path:
    """The Python of a client's environment, with Quire installed in it.

    Raises:
        InstallError: A package cannot be installed, or torch cannot be imported.
    """
    pins = HERE / f"{name}.txt"
    folder = ROOT / f".venv-{name}"
    python, mark = folder / "bin" / "python", folder / ".made-from"
    wanted = hashlib.sha256(pins.read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if fresh or not mark.exists() or mark.read_text() != wanted:
        began = time.monotonic()
        print(f"{name}: installing {folder.name} from {pins.name}", flush=True)
        _run(sys.executable, "-m", "venv", "--clear", folder)
        install_pins(python, pins)
        _pip(python, "--no-deps", "--no-build-isolation", "--editable", ROOT)
        mark.write_text(wanted)
        print(f"{name}: installed in {time.monotonic() - began:.0f} s", flush=True)
    return python


def install_pins(python: Path, pins: Path) -> None:
    """Installs the pinned packages. The pins are complete for a build of torch for CPUs: what packages ask for beyond them (CUDA
    builds, other versions of torch) is left out on purpose. A build of torch for CUDA cannot be imported without its dependencies:
    then they are installed too."""
    _pip(python, "--no-deps", "-r", pins)
    if not _imports_torch(python):
        print(f"torch cannot be imported without its dependencies: installing them, several GB for CUDA. {HINT}", flush=True)
        _pip(python, *(line for line in pins.read_text().split() if line.startswith("torch==")))
        # Dependencies of torch may have replaced pinned packages.
        _pip(python, "--no-deps", "-r", pins)
        if not _imports_torch(python):
            raise InstallError(f"torch cannot be imported, also with its dependencies. {HINT}")


HINT = "An index of CPU builds avoids this: name it in PIP_INDEX_URL or PIP_EXTRA_INDEX_URL"


def _imports_torch(python: Path) -> bool:
    return subprocess.run((python, "-c", "import torch"), capture_output=True).returncode == 0


def _pip(python: Path, *arguments: str | Path) -> None:
    _run(python, "-m", "pip", "--disable-pip-version-check", "install", "-qq", *arguments)


def _run(*command: str | Path) -> None:
    """Runs a command of an installation; the last error that it prints is the message if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        printed = [f"exit status {done.returncode}", *filter(None, map(str.strip, done.stdout.splitlines()))]
        errors = [line for line in printed if line.startswith("ERROR:") and not line.endswith(":")]
        raise InstallError(f"{command[2]}: {(errors or printed)[-1]}")


def test(name: str, fresh: bool) -> str:
    """Tests one client; returns what came of it, "passed" if all is well."""
    try:
        python = environment(name, fresh)
    except InstallError as error:
        print(f"{name}: not installed: {error}", flush=True)
        return f"not installed: {error}"
    print(f"{name}: testing", flush=True)
    status = subprocess.run((python, "-m", "pytest", "-q", "tests/clients", "--client", name), cwd=ROOT).returncode
    return f"failed, pytest's exit status is {status}" if status else "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="NAME", help=f"clients to test; by default all: {', '.join(CLIENTS)}")
    parser.add_argument("--fresh", action="store_true", help="make the environments again")
    asked = parser.parse_args()
    unknown = sorted(set(asked.clients) - set(CLIENTS))
    if unknown:
        parser.error(f"no client is called {', '.join(unknown)}; there are {', '.join(CLIENTS)}")
    if not OLDEST <= sys.version_info[:2] < BEFORE:
        oldest, before = (".".join(map(str, version)) for version in (OLDEST, BEFORE))
        needed = f"the pinned packages need Python {oldest} or newer, before {before}"
        parser.error(f"{needed}, not {sys.version.split()[0]}: make clients PYTHON=python{oldest}")
    results = {name: test(name, asked.fresh) for name in asked.clients or CLIENTS}
    print("\n".join(["", "clients", *(f"  {name}: {result}" for name, result in results.items())]))
    return int(any(result != "passed" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
