"""The way of a call to the driver, walked on a pretended GPU: how many functions, and that nothing is compiled twice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import quire
from quire import launch
from quire.dispatch import choose
from quire.kernels.triton.host import launcher, program
from quire.platform import Platform

PACKAGE = str(Path(quire.__file__).parent)
MOST_FUNCTIONS, MOST_FILES = 8, 4
"""Of a warm attend; Hopper's own kernel has a file more. DESIGN.md shows them."""
MOST_COLD, SHORT = 20, 8
"""Functions of more than eight lines that the first attend of a layer calls."""
GETTERS = {("cache/kv_cache.py", name) for name in ("k", "v", "k_scale", "v_scale", "storage")}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Tensors of torch's meta device stand for those of an H200; kernels are described, not compiled, and their launches noted."""
    platform = replace(Platform.named("sm90"), multiprocessors=132)
    names: list[str] = []

    def load(self: program.Program, arguments: Any, _: Platform, device: int, problem: Any = None) -> None:
        name, _ = self.recipe(arguments).kernel.__name__, self.recipe(arguments).key(platform)
        kernel = SimpleNamespace(function=0, packed_metadata=None)
        run = lambda *arguments: names.append(name)  # noqa: E731
        self.loaded[device] = program.Loaded(kernel, run, run)

    monkeypatch.setattr(Platform, "detect", classmethod(lambda cls, device=None: platform))
    monkeypatch.setattr(program.Program, "load", load)
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 0)))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(launch, "_known", {})
    yield names


def call(tokens: int, seqs: int, columns: int = 8, longest: int | None = None) -> dict[str, Any]:
    def nothing(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    cache = quire.KVCache.wrap(nothing(9, 16, 8, 128), nothing(9, 16, 8, 128), layout="nhd")
    lists = (nothing(*shape, dtype=torch.int32) for shape in ((seqs, columns), (seqs,), (seqs + 1,)))
    return {"q": nothing(tokens, 32, 128), "cache": cache, "batch": quire.Batch(*lists, max_q_len=longest)}


def walked(run: Callable[[], Any], longer_than: int = 0) -> list[tuple[str, str]]:
    """Quire's functions that are called, (file, name) each, with more than so many lines of code; except the getters of a cache and
    comprehensions."""
    found: dict[tuple[str, str], None] = {}

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        file, lines = code.co_filename[len(PACKAGE) + 1 :], {line for _, _, line in code.co_lines() if line}
        if len(lines) > longer_than and (file, code.co_name) not in GETTERS:
            found[file, code.co_name] = None

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(found)


@pytest.mark.parametrize("tokens, seqs, longest", [(7, 7, 1), (600, 3, 500)], ids=["decode", "mixed"])
def test_few_functions_lead_to_the_driver(tokens: int, seqs: int, longest: int, launched: list[str]) -> None:
    first = call(tokens, seqs, longest=longest)
    quire.attend(**first)
    cold, other = len(launched), call(tokens + 5, seqs + 2, 11, longest) | {"cache": first["cache"]}
    functions = walked(lambda: quire.attend(**other))
    assert len(launched) == 2 * cold > 0, "another batch of the same layer launches the same kernels"
    assert len(functions) <= MOST_FUNCTIONS, functions
    files = {file for file, _ in functions} - {"kernels/gluon/launcher.py"}
    assert len(files) <= MOST_FILES, functions


@pytest.mark.parametrize("tokens, seqs, longest", [(7, 7, 1), (600, 3, 500)], ids=["decode", "mixed"])
def test_the_first_call_of_a_layer(tokens: int, seqs: int, longest: int, launched: list[str]) -> None:
    quire.attend(**call(tokens, seqs, longest=longest))  # modules are imported once, whatever the layer
    for kept in (launch._known, launch._problem, choose.able_kernels):
        (kept.clear if isinstance(kept, dict) else kept.cache_clear)()
    first = call(tokens, seqs, longest=longest)
    functions = walked(lambda: quire.attend(**first), SHORT)
    assert ("launch.py", "_problem") in functions and ("dispatch/kernel.py", "longest_q") not in functions
    # `Program.load` is replaced by the fixture.
    assert len(functions) + 1 <= MOST_COLD, functions


def launched_kernels() -> list[str]:
    """The kernels that have a launcher, once per problem."""
    return sorted(kernel.name for known in launch._known.values() for kernel in known.launchers)


def test_one_launcher_serves_every_batch_of_a_layer(launched: list[str]) -> None:
    made = call(7, 7)
    for tokens, seqs, columns in ((7, 7, 8), (1, 1, 1), (90, 2, 300), (16, 16, 8), (33, 1, 9), (4000, 511, 77)):
        other = call(tokens, seqs, columns)
        quire.attend(other["q"], made["cache"], other["batch"])
        k, v = (torch.empty(tokens, 8, 128, dtype=torch.bfloat16, device="meta") for _ in "kv")
        quire.write(k, v, made["cache"], other["batch"])
    assert launched_kernels() == ["gluon-mixed", "triton", "triton-decode"]


def test_a_strided_query_is_another_problem(launched: list[str]) -> None:
    made = call(400, 2)
    quire.attend(**made)
    quire.attend(**made | {"q": torch.empty(400, 32, 256, dtype=torch.bfloat16, device="meta")[..., ::2]})
    assert launched_kernels() == ["gluon-mixed", "triton-mixed"]


def test_launch_hooks_of_profilers_are_called(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    told: list[Any] = []
    made = call(3, 3)
    quire.attend(**made)
    facts = lambda grid, stream, *arguments: {"grid": grid}  # noqa: E731
    launchers = [made for known in launch._known.values() for made in known.launchers.values()]
    for loaded in (one for each in launchers for one in vars(each)["programs"].values()):
        for kernel in loaded.loaded.values():
            kernel.kernel.launch_metadata = facts
            loaded.loaded = {None: kernel._replace(run=lambda *arguments: told.append(arguments[6]))}
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    monkeypatch.setattr(launcher.AttendLauncher, "launches", _first_only(launcher.AttendLauncher.launches))
    quire.attend(**made)
    assert told and told[0]["grid"][0] > 1


def _first_only(launches: Any) -> Any:
    return lambda self, *given: [next(iter(launches(self, *given)))]
