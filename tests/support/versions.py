"""Other versions of Triton than the installed one: each in a folder of its own, downloaded once, for subprocesses that compile.

torch is not installed again. A subprocess that finds another Triton first on its path compiles with it; to compile, torch only has
to make tensors of the meta device.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from quire.kernels.triton.compiler.compiled import Compiled
from quire.kernels.triton.compiler.sample import KernelSample

VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
"""The newest release of each minor version that pyproject.toml allows."""
ROOT = Path(__file__).parents[2]

_PROGRAM = """
import json, sys, triton
from quire.kernels.triton.compiler.compiled import compile_in_subprocess
from quire.kernels.triton.compiler.sample import KernelSample
version, work = json.load(sys.stdin)
assert triton.__version__ == version, f"Triton {triton.__version__} of {triton.__file__}, not {version}"
print(json.dumps(compile_in_subprocess([(arch, KernelSample(**members)) for arch, members in work])))
"""


def installed() -> str:
    """The version of Triton that this environment has."""
    return metadata.version("triton")


def environment(version: str) -> Path | None:
    """The folder that has this version of Triton; None if it is the installed one. The first call downloads it."""
    if version == installed():
        return None
    folder = ROOT / "build" / f"triton-{version}"
    folder.parent.mkdir(exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _install(version, folder)
    return folder


def _install(version: str, folder: Path) -> None:
    # Renamed when it is whole: an interrupted download must not look like an environment.
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--target", str(partial), f"triton=={version}"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"Triton {version} cannot be installed into {folder}:\n{done.stderr}")
    partial.rename(folder)


def compile_with(version: str, work: Sequence[tuple[str, KernelSample]]) -> list[list[Compiled] | str]:
    """What `compile_in_subprocess` returns for this work with this version of Triton."""
    folder = environment(version)
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["PYTHONPATH"] = os.pathsep.join(path if folder is None else [str(folder), *path])
    todo = json.dumps([version, [(arch, asdict(sample)) for arch, sample in work]])
    done = subprocess.run([sys.executable, "-c", _PROGRAM], input=todo, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the subprocess of Triton {version} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return [one if isinstance(one, str) else [Compiled(*members) for members in one] for one in found]
