"""Tests Quire in the real engines, each in an environment of its own: `make clients`.

    python tests/clients/run.py [NAME ...] [--fresh]

The environment of a client is .venv-NAME, made from the pins of tests/clients/NAME.txt. It is made again when the pins change, and
with --fresh. The exit status is 1 if a test of any client fails.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLIENTS = tuple(sorted(path.stem for path in HERE.glob("*.txt")))


def environment(name: str, fresh: bool) -> Path:
    """The Python of a client's environment, with Quire installed in it."""
    pins = HERE / f"{name}.txt"
    folder = ROOT / f".venv-{name}"
    python, mark = folder / "bin" / "python", folder / ".made-from"
    wanted = hashlib.sha256(pins.read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if fresh or not mark.exists() or mark.read_text() != wanted:
        began = time.monotonic()
        print(f"{name}: installing {folder.name} from {pins.relative_to(ROOT)}", flush=True)
        subprocess.run((sys.executable, "-m", "venv", "--clear", folder), check=True)
        install = (python, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps")
        # The pins are complete: what packages ask for beyond them (CUDA builds, other versions of torch) is left out on purpose.
        subprocess.run((*install, "-r", pins), check=True)
        subprocess.run((*install, "--no-build-isolation", "--editable", ROOT), check=True)
        mark.write_text(wanted)
        print(f"{name}: installed in {time.monotonic() - began:.0f} s", flush=True)
    return python


def test(name: str, fresh: bool) -> int:
    """Runs the tests of one client; returns pytest's exit status."""
    python = environment(name, fresh)
    print(f"{name}: testing", flush=True)
    return subprocess.run((python, "-m", "pytest", "-q", "tests/clients", "--client", name), cwd=ROOT).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="NAME", help=f"clients to test; by default all: {', '.join(CLIENTS)}")
    parser.add_argument("--fresh", action="store_true", help="make the environments again")
    asked = parser.parse_args()
    unknown = sorted(set(asked.clients) - set(CLIENTS))
    if unknown:
        parser.error(f"no client is called {', '.join(unknown)}; there are {', '.join(CLIENTS)}")
    failed = [name for name in asked.clients or CLIENTS if test(name, asked.fresh)]
    print(f"failed: {', '.join(failed)}" if failed else "every client passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
