"""docs/kernels.md is printed from the kernels: `make docs` writes it. What the compiler makes of them depends on its version, so
only the other parts must be current."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from quire.kernels.triton.compiler import compiled, report
from quire.kernels.triton.compiler.compiled import ARCHES, Compiled
from quire.kernels.triton.compiler.sample import KernelSample
from quire.kernels.triton.host.tuning import TABLE
from support.versions import VERSIONS

KERNELS = {"write": "write_kernel", "audit": "audit_kernel", "gluon": "prefill_kernel"}
"""One of each call's, where it is not `attend`'s."""
PAGE = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text()


def test_the_page_has_the_kernels() -> None:
    assert report.kernels() in PAGE, "make docs"


def test_the_page_has_the_table() -> None:
    assert report.tuning() in PAGE, "make docs"


def test_the_page_has_every_gpu() -> None:
    sections = {part.split(":")[0]: part for part in PAGE.split("\n### ")[1:]}
    for arch in ARCHES:
        for sample in report.samples_for(arch):
            kernel = KERNELS.get(sample.kernel, "attend_kernel")
            row = [sample.kernel, kernel, str(sample.head_dim), sample.format]
            assert any([cell.strip() for cell in line.split("|")[1:5]] == row for line in sections[arch].splitlines()), (arch, row)


def test_the_page_has_every_version() -> None:
    for arch in ("sm90", "gfx942"):
        lines = PAGE.split(f"\n### {arch} by version\n")[1].split("\n### ")[0].splitlines()
        table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
        assert table[0] == ["call", "kernel", "cache", *VERSIONS]
        assert all(all(row[3:]) for row in table)
        for call in ("decode", "mixed", "gluon")[: 3 if arch == "sm90" else 2]:
            kernel = KERNELS.get(call, "attend_kernel")
            assert {"bf16", "e4m3fn"} <= {row[2] for row in table if row[:2] == [call, kernel]}, (arch, call)


def test_every_kernel_and_every_row_is_printed() -> None:
    for name in ("attend_kernel", "combine_kernel", "prefill_kernel", "units_kernel"):
        assert f"### `{name}`" in report.kernels()
    printed = [line for line in report.tuning().splitlines() if line.startswith(("| decode", "| mixed", "| gluon"))]
    assert len(printed) == len(TABLE)


def fake(work: Any) -> list[Any]:
    return [[Compiled("attend_kernel", 4, 2048, 77, sample.head_dim, ["mma.sync", "redux.sync"])] for _, sample in work]


def record(version: str, spilled: int, faults: tuple[str, ...] = (), arch: str = "sm90", **members: Any) -> dict[str, Any]:
    kernels = [] if faults else [Compiled("attend_kernel", 4, 2048, 99, spilled, [])]
    sample = asdict(KernelSample("decode", **members))
    return {"triton": version, "arch": arch, "name": "", "sample": sample, "kernels": kernels, "faults": faults}


def test_the_command_prints_the_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "compile_in_subprocess", fake)
    found = tmp_path / "versions.json"
    found.write_text(json.dumps([record("3.6.0", 0), record("3.9.0", 72), record("3.9.0", 1, arch="sm80")]))
    monkeypatch.setattr(sys, "argv", ["report", str(found)])
    # By its path: under pytest, which rewrites the modules of a package with a plugin, it cannot be found as a module.
    runpy.run_path(str(Path(report.__file__).parents[1] / "__main__.py"), run_name="__main__")
    page = capsys.readouterr().out
    assert page == report.render(found)
    assert "| decode | attend_kernel | bf16  | 99    | 99 (72) |" in page
    assert page.startswith("# The GPU kernels\n")
    assert page.count(
        "| decode | attend_kernel | 64       | bf16   | 4     | 2.0        | 77        | 64      | mma.sync |"
    ) == len(ARCHES)


def test_what_does_not_compile_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "compile_in_subprocess", lambda work: ["it aborted" for _ in work])
    with pytest.raises(RuntimeError, match=r"decode of head_dim 64, bf16 does not compile for sm80: it aborted"):
        report.compiled()


def test_only_plain_calls_are_compared_by_version() -> None:
    table = report.by_version([record("3.9.0", 8), record("3.9.0", 16, head_dim=64), record("3.9.0", 24, lse=True)])
    assert "99 (8)" in table and "99 (16)" not in table and "99 (24)" not in table


def test_what_a_version_does_not_compile_is_not_printed() -> None:
    with pytest.raises(RuntimeError, match=r"decode of head_dim 128, bf16 with Triton 3.9.0 for sm90: \('it aborted',\)"):
        report.by_version([record("3.9.0", 0, ("it aborted",))])


def test_members_are_listed_with_their_docstrings() -> None:
    members = dict(report._members(compiled.Compiled))
    assert members["shared_memory"] == "Bytes a program." and members["registers"] == "Of a thread."
