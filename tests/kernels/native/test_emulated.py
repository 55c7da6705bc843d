"""The library on CPUs that are not here: it tries no instruction that they lack, and is right with those they have."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from quire.kernels.native import library
from support.kernels import NO_LIBRARY, levels

SOURCES = Path(library.__file__).parent
pytestmark = pytest.mark.skipif(not library.FILE.exists(), reason=NO_LIBRARY)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here")
    made = tmp_path_factory.mktemp("driver") / "driver"
    source = Path(__file__).with_name("driver.cpp")
    subprocess.run(["c++", "-std=c++17", "-O1", f"-I{SOURCES}", str(source), "-o", str(made), "-ldl"], check=True)
    return made


def verdicts(*command: str) -> dict[str, str]:
    """The instruction sets that ran, and what the driver says of each."""
    done = subprocess.run([*command, str(library.FILE)], capture_output=True, text=True)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stdout}{done.stderr}"
    return {line.split(":")[0]: line.split()[1] for line in done.stdout.splitlines()}


def test_this_cpu(driver: Path) -> None:
    assert verdicts(str(driver)) == dict.fromkeys(levels(), "right")


@pytest.mark.parametrize(("cpu", "sets"), [("qemu64", {"portable"}), ("Nehalem", {"portable"}), ("Haswell", {"portable", "avx2"})])
def test_a_cpu_without_avx512(driver: Path, cpu: str, sets: set[str]) -> None:
    if shutil.which("qemu-x86_64") is None:
        pytest.skip("qemu-x86_64 is not installed (Debian's package qemu-user)")
    if "portable" not in levels():
        pytest.skip("the library here is not for x86-64")
    assert verdicts("qemu-x86_64", "-cpu", cpu, str(driver)) == dict.fromkeys(sets, "right")
