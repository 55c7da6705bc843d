"""Platforms by name and by looking."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from quire import platform as module
from quire.dispatch.catalogue import CATALOGUE
from quire.errors import ArgumentError
from quire.platform import NAMED, Platform

# name: vendor, family, KiB of shared memory, warp, fp8
TABLE = {
    "sm75": ("nvidia", "sm75", 64, 32, None),
    "sm80": ("nvidia", "sm80", 164, 32, None),
    "sm86": ("nvidia", "sm86", 100, 32, None),
    "sm87": ("nvidia", "sm87", 164, 32, None),
    "sm89": ("nvidia", "sm89", 100, 32, "e4m3fn"),
    "sm90": ("nvidia", "sm90", 228, 32, "e4m3fn"),
    "sm100": ("nvidia", "sm100", 228, 32, "e4m3fn"),
    "sm103": ("nvidia", "sm103", 228, 32, "e4m3fn"),
    "sm120": ("nvidia", "sm120", 100, 32, "e4m3fn"),
    "sm121": ("nvidia", "sm121", 100, 32, "e4m3fn"),
    "gfx900": ("amd", "gfx9", 64, 64, None),
    "gfx906": ("amd", "gfx9", 64, 64, None),
    "gfx908": ("amd", "gfx9", 64, 64, None),
    "gfx90a": ("amd", "gfx9", 64, 64, None),
    "gfx942": ("amd", "gfx9", 64, 64, "e4m3fnuz"),
    "gfx950": ("amd", "gfx9", 160, 64, "e4m3fn"),
    "gfx1030": ("amd", "gfx10", 64, 32, None),
    "gfx1100": ("amd", "gfx11", 64, 32, None),
    "gfx1101": ("amd", "gfx11", 64, 32, None),
    "gfx1102": ("amd", "gfx11", 64, 32, None),
    "gfx1151": ("amd", "gfx11", 64, 32, None),
    "gfx1200": ("amd", "gfx12", 64, 32, "e4m3fn"),
    "gfx1201": ("amd", "gfx12", 64, 32, "e4m3fn"),
    "gfx1250": ("amd", "gfx12", 320, 32, "e4m3fn"),
    "cpu": ("cpu", "x86-64", 0, 1, None),
    "x86-64": ("cpu", "x86-64", 0, 1, None),
    "aarch64": ("cpu", "aarch64", 0, 1, None),
}


def test_the_table_has_these_names() -> None:
    assert list(NAMED) == list(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_named(name: str) -> None:
    platform = Platform.named(name)
    facts = (platform.vendor, platform.family, platform.shared_memory // 1024, platform.warp, platform.fp8)
    assert facts == TABLE[name]
    assert platform.arch == ("x86-64" if name == "cpu" else name)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match=r"arch: given 'gfx943'; allowed: sm75, sm80, .*gfx942, .*cpu"):
        Platform.named("gfx943")


def test_a_platform_is_a_value() -> None:
    assert len({Platform.named("sm90"), dataclasses.replace(Platform.named("sm90"))}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Platform.named("sm90").warp = 64  # type: ignore[misc]


def test_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_flags", lambda: frozenset({"avx2", "fpu", "amx_bf16", "hypervisor"}))
    monkeypatch.setattr(module.host, "machine", lambda: "AMD64")
    found = module._detect.__wrapped__(torch.device("cpu"))
    assert found == Platform("cpu", "cpu", "x86-64", "x86-64", cpu_features=("avx2", "amx_bf16"))


@pytest.mark.parametrize(
    "text, flags",
    [
        ("processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n", {"fpu", "avx2"}),
        ("Features\t: fp asimd bf16\n", {"fp", "asimd", "bf16"}),
        ("processor: 0\n", set()),
        (None, set()),
    ],
    ids=["x86", "arm", "silent", "no file"],
)
def test_cpu_flags(monkeypatch: pytest.MonkeyPatch, tmp_path, text: str | None, flags: set[str]) -> None:
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr("builtins.open", lambda path, real=open: real(file if path == "/proc/cpuinfo" else path))
    assert module.cpu_flags() == flags


def test_without_an_accelerator_torch_cuda_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: object) -> None:
        raise RuntimeError("no CUDA driver")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("current_device", "get_device_properties", "device_count"):
        monkeypatch.setattr(torch.cuda, name, touched)
    assert Platform.detect().vendor == "cpu"
    assert Platform.detect(torch.device("cpu")) is Platform.detect("cpu")
    with pytest.raises(ArgumentError, match="device: given 'cuda:0'; allowed: cpu"):
        Platform.detect("cuda:0")


def test_any_other_device_has_a_platform() -> None:
    assert Platform.detect("meta") == Platform("meta", "other", "meta", "meta")


NVIDIA = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_multiprocessor=233472)
AMD = SimpleNamespace(name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    module._detect.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: request.param)
    monkeypatch.setattr(torch.version, "hip", "6.4" if request.param is AMD else None)
    yield request.param
    module._detect.cache_clear()


@pytest.mark.parametrize("accelerator", [NVIDIA, AMD], indirect=True, ids=["nvidia", "amd"])
def test_an_accelerator_is_preferred(accelerator: SimpleNamespace) -> None:
    found = Platform.detect()
    named = Platform.named("gfx942" if accelerator is AMD else "sm90")
    assert found == dataclasses.replace(named, name=accelerator.name, multiprocessors=accelerator.multi_processor_count)
    assert found is Platform.detect("cuda:1") is Platform.detect("cuda")
    assert Platform.detect("cpu").vendor == "cpu"
    with pytest.raises(ArgumentError, match="device: given 'cuda:2'; allowed: cuda:0 to cuda:1"):
        Platform.detect("cuda:2")


def test_every_gpu_that_a_kernel_is_for_can_be_named() -> None:
    """What an explanation says is allowed can be asked for."""
    allowed = {arch for kernel in CATALOGUE for arch in kernel.arches or () if arch.startswith(("sm", "gfx"))}
    assert allowed and allowed <= set(NAMED)


@pytest.mark.parametrize(
    "name, arch",
    [
        ("NVIDIA H100 80GB HBM3", "sm90"),
        ("a100-sxm4-80gb", "sm80"),
        ("H100-SXM", "sm90"),
        ("H100_PCIe", "sm90"),
        ("h100-80gb", "sm90"),
        ("NVIDIA GH200 480GB", "sm90"),
        ("sm_90a", "sm90"),
        ("sm90a", "sm90"),
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("AMD Instinct MI300X OAM", "gfx942"),
        ("AMD Radeon PRO W7900", "gfx1100"),
        ("a800", "sm80"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "sm89"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "sm120"),
        ("rtx4060", "sm89"),
        ("rtx3060", "sm86"),
        ("mi308x", "gfx942"),
    ],
)
def test_names_as_tools_print_them(name: str, arch: str) -> None:
    assert Platform.named(name).arch == arch


@pytest.mark.parametrize("name", ["h1000", "sm90b", "gfx9", "nvidia", "80gb", "", "rtx"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match="arch: given"):
        Platform.named(name)
