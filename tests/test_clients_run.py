"""tests/clients/run.py, which makes the environments of `make clients`: what it does where an installation fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "clients" / "run.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("clients_run", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of wheels, the only place where pip looks for packages."""
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def add_wheel(index: Path, name: str, version: str, source: str = "", needs: tuple[str, ...] = ()) -> None:
    """A wheel of one module, with the least metadata that pip accepts."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", source)
        required = "".join(f"Requires-Dist: {need}\n" for need in needs)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in (*wheel.namelist(), f"{info}/RECORD")))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("client") / "venv"
    subprocess.run((sys.executable, "-m", "venv", folder), check=True)
    return folder / "bin" / "python"


def versions(python: Path) -> dict[str, str]:
    code = "from importlib.metadata import distributions as d; print(*(f'{x.name}=={x.version}' for x in d()))"
    found = subprocess.run((python, "-c", code), capture_output=True, text=True, check=True).stdout
    return dict(package.split("==") for package in found.split())


def test_a_torch_that_needs_its_dependencies(script: ModuleType, index: Path, python: Path, tmp_path: Path) -> None:
    """Its dependencies are installed, those that are pinned keep their versions."""
    add_wheel(index, "torch", "2.13.0", "import cuda_library", ("cuda_library", "pinned<2"))
    add_wheel(index, "cuda_library", "1.0")
    for version in ("1.0", "2.0"):
        add_wheel(index, "pinned", version)
    pins = tmp_path / "client.txt"
    pins.write_text("# A comment.\npinned==2.0\ntorch==2.13.0\n")
    script.install_pins(python, pins)
    found = versions(python)
    assert (found["torch"], found["cuda_library"], found["pinned"]) == ("2.13.0", "1.0", "2.0")
    add_wheel(index, "torch", "2.13.1", "import nowhere")
    pins.write_text("torch==2.13.1\n")
    with pytest.raises(script.InstallError, match=r"torch cannot be imported.*PIP_INDEX_URL"):
        script.install_pins(python, pins)


def test_an_installation_that_fails(
    script: ModuleType, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says why, the other clients run, and the exit status is 1."""
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "HERE", tmp_path)
    monkeypatch.setattr(script, "CLIENTS", ("absent", "present"))
    monkeypatch.setattr(sys, "argv", ["run.py"])
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "absent.txt").write_text("no-such-package==1.0\n")
    (tmp_path / "present.txt").write_text("")
    tested, run = [], subprocess.run

    def install_or_pass(command: tuple[Any, ...], **how: Any) -> Any:
        """Runs the installation of the first client; for the second one everything succeeds."""
        if ".venv-absent" in str(command[0]) or ".venv-absent" in str(command[-1]):
            return run(command, **how)
        if "pytest" in command:
            tested.append(command[-1])
        (tmp_path / ".venv-present").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(script.subprocess, "run", install_or_pass)
    assert script.main() == 1
    shown = capsys.readouterr().out.splitlines()
    assert tested == ["present"]
    reason = "not installed: pip: ERROR: No matching distribution found for no-such-package==1.0"
    assert f"absent: {reason}" in shown and shown[-3:] == ["clients", f"  absent: {reason}", "  present: passed"]


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_other_versions_of_python(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: tuple[int, int]
) -> None:
    monkeypatch.setattr(script.sys, "version_info", (*version, 0))
    monkeypatch.setattr(script.sys, "argv", ["run.py"])
    with pytest.raises(SystemExit):
        script.main()
    assert "the pinned packages need Python 3.11 or newer, before 3.15" in capsys.readouterr().err
