"""The oldest and the newest Triton compile the kernels, too: with small tiles here, with all versions by `make versions`."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from quire.kernels.triton.compiler.compiled import Compiled
from support import versions
from support.versions import VERSIONS, compile_with, installed
from versions.samples import BRIEF, GLUON, TRITON, faults

CARDS = {"gluon": "sm90", "audit": "gfx942", "write": "sm80", "shared": "sm80", "mixed": "sm80"}
"""Where each call is compiled for."""


@pytest.mark.parametrize("version", [version for version in (VERSIONS[0], VERSIONS[-1]) if version != installed()])
def test_small_tiles_compile(version: str) -> None:
    """If this version cannot be downloaded, the test fails: a kernel that nobody compiled is not known to compile."""
    work = [(CARDS[sample.kernel], sample) for sample in BRIEF.values()]
    found = compile_with(version, work)
    kernels = {kernel.kernel for one in found if not isinstance(one, str) for kernel in one}
    assert {name: wrong for (arch, sample), name, one in zip(work, BRIEF, found) if (wrong := faults(arch, sample, one))} == {}
    everything = {"units", "prefill", "attend", "combine", "balance", "write", "rope", "audit"}
    assert kernels == {f"{name}_kernel" for name in everything}


def test_the_installed_version_needs_no_folder() -> None:
    assert versions.environment(installed()) is None
    assert installed() in VERSIONS


def test_a_version_that_does_not_exist_is_reported(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match=r"Triton 3\.6\.99 cannot be installed"):
        versions.environment("3.6.99")
    assert not (tmp_path / "build" / "triton-3.6.99").exists()


def test_faults_are_seen() -> None:
    fits = Compiled("prefill_kernel", 12, 1000, 168, 0, ["cp.async.bulk.tensor", "cp.async.cg.shared.global", "wgmma.mma_async"])
    assert faults("sm90", GLUON["gluon-bf16"], [fits]) == []
    for missing in fits.instructions:
        rest = [name for name in fits.instructions if name != missing]
        assert faults("sm90", GLUON["gluon-bf16"], [fits._replace(instructions=rest)]) == [f"prefill_kernel lacks {missing}"]
    assert "shared memory" in faults("sm90", GLUON["gluon-bf16"], [fits._replace(shared_memory=10**6)])[0]
    assert "products" in faults("sm80", TRITON["decode-bf16"], [Compiled("attend_kernel", 4, 0, 64, 0, [])])[0]
    assert faults("sm80", TRITON["decode-bf16"], "it aborted") == ["it aborted"]
