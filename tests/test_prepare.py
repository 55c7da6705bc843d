"""Warm-up: what is compiled beforehand is all that any batch needs."""

from __future__ import annotations

import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import quire
from quire import Extent, Platform, Problem
from quire.dispatch.choose import choose
from quire.prepare import Prepared, _of_batches, _problems, _warn, _warned, _work, prepare

LAYER = Problem(q_heads=32, kv_heads=8, head_dim=128, page_size=16, device="cuda:0")


def prepared_keys(problem: Problem, platform: Platform) -> set[str]:
    return set(_work(_problems(problem, None, None, None, (problem.form,), (problem.lse,), ("int32",)), platform)[0])


@pytest.mark.parametrize("arch", ["sm90", "sm80", "gfx942"])
@pytest.mark.parametrize("fields", [{}, {"format": "e4m3fn", "scales": "tensor"}, {"form": "context"}, {"mask": True}], ids=str)
def test_no_batch_needs_another_kernel(fields: dict[str, object], arch: str) -> None:
    problem, platform, draw = LAYER.replace(**fields), Platform.named(arch), random.Random(3)
    ready = prepared_keys(problem, platform)
    assert 0 < len(ready) <= 12
    for _ in range(60):
        seqs = draw.choice((1, 2, 30, 200, 512))
        longest = draw.choice((1, 2, 5, 16, 17, 300))
        extent = Extent(seqs, draw.randint(seqs, seqs * longest), longest, draw.randint(longest, 10**5))
        for memory in ("aligned", "generic"):
            one = problem.replace(memory=memory)
            assert set(choose(one, extent, platform).compiled) <= ready
            assert set(choose(one.of_writes(), extent, platform, operation="write").compiled) <= ready


def test_writes_that_rotate_are_prepared() -> None:
    """Whatever the memory, the slots and the positions of a call: kernels are compiled for the rope alone."""
    rope, platform = (
        quire.Rope.make(128, max_positions=4, device="meta", q_norm=torch.empty(128, device="meta")),
        Platform.named("sm90"),
    )
    ready = set(_work(_problems(LAYER, None, None, None, None, None, None, rope), platform)[0])
    assert len(ready) <= 12
    for memory in ("aligned", "generic"):
        turned = LAYER.replace(memory=memory).of_writes(rope.traits(True))
        needed = set(choose(turned, Extent(2, 9, 5, 99), platform, operation="write").compiled)
        assert needed and needed <= ready
        assert not needed & set(choose(LAYER.of_writes(), Extent(), platform, operation="write").compiled)


LATENT = {"kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "v_in_k": True}
ROPE = quire.Rope.make(128, max_positions=4, device="meta")


@pytest.mark.parametrize("arch", ["sm90", "sm80", "gfx942"])
@pytest.mark.parametrize("form", ["full", "context"])
@pytest.mark.parametrize(
    "fields",
    [
        {"prefixes": True},
        {"prefixes": True, "format": "e4m3fn", "scales": "tensor"},
        {"prefixes": True, **LATENT},
        {"select": "positions", **LATENT},
        {"select": "columns", "select_index": "int64"},
        {"spans": "int64"},
    ],
    ids=str,
)
def test_batches_with_more_than_index_tensors_are_prepared(fields: dict[str, object], form: str, arch: str) -> None:
    """Batches that have prefixes, spans or a selection, with writes that rotate."""
    if form == "context" and "select" in fields:
        return
    problem, platform, draw = LAYER.replace(form=form, **fields), Platform.named(arch), random.Random(4)
    ready = set(_work(_problems(problem, None, None, None, None, None, None, ROPE), platform)[0])
    assert 0 < len(ready) <= 12
    kernels = set()
    for memory in ("aligned", "generic"):
        one = problem.replace(memory=memory)
        assert set(choose(one.of_writes(ROPE.traits(True)), Extent(2, 9, 5, 99), platform, operation="write").compiled) <= ready
        for longest in (1, 2, 4, 7, 16, 300):
            seqs, saved = draw.choice((2, 300)), draw.choice((0, 10**6)) if problem.prefixes else 0
            decision = choose(one, Extent(seqs, seqs * longest, longest, 10**5, saved), platform)
            kernels.add(decision.chosen.name if decision.chosen else "none")
            assert set(decision.compiled) <= ready
    assert "none" not in kernels and ("triton-shared" in kernels) is problem.prefixes


def test_a_cache_and_a_problem_ask_for_the_same() -> None:
    k, v = (torch.empty(4, 16, 8, 128, dtype=torch.bfloat16, device="meta") for _ in "kv")
    cache, how = quire.KVCache.wrap(k, v, layout="nhd"), (("full", "context"), (False, True), ("int32", "int64"))
    found = _problems(cache, 32, torch.bfloat16, None, *how)
    same = _problems(LAYER.replace(device="meta"), None, None, None, *how)
    assert {problem for _, problem in found} == {problem for _, problem in same}


def empty_cache() -> quire.KVCache:
    return quire.KVCache.wrap(*(torch.empty(4, 16, 8, 128, dtype=torch.bfloat16, device="meta") for _ in "kv"), layout="nhd")


@pytest.mark.parametrize(
    "given, fields",
    [
        ({"prefixes": True}, {"prefixes": True}),
        ({"spans": True}, {"spans": "int64"}),
        ({"select": "columns"}, {"select": "columns", "select_index": "int64"}),
    ],
    ids=str,
)
def test_what_the_batches_of_a_cache_have_is_named(given: dict[str, object], fields: dict[str, object]) -> None:
    batches = _of_batches(empty_cache(), **{"prefixes": False, "select": None, "spans": False} | given)  # type: ignore[arg-type]
    found = _problems(empty_cache(), 32, torch.bfloat16, None, None, None, ("int64",), None, batches)
    same = LAYER.replace(device="meta", index="int64", **fields)
    assert {problem for operation, problem in found if operation == "attend"} == {same, same.replace(memory="generic")}


@pytest.mark.parametrize(
    "given, match",
    [
        ({"prefixes": 1}, "prefixes: given .*True or False"),
        ({"spans": "int32"}, "spans: given .*True or False"),
        ({"select": "rows"}, "select: given .*'positions' or 'columns', or None"),
        ({"select": "columns", "spans": True}, "select: given 'columns' with a mask, spans"),
        ({"select": "columns", "forms": ("full", "context")}, "select: given 'columns' with .*context form"),
        ({"spans": True, "options": quire.Options(window=8)}, "spans: given True with Options"),
    ],
    ids=str,
)
def test_wrong_batches(given: dict[str, object], match: str) -> None:
    with pytest.raises(quire.ArgumentError, match=match):
        prepare(empty_cache(), q_heads=32, q_dtype=torch.bfloat16, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"prefixes": True}, {"select": "positions"}, {"spans": True}], ids=str)
def test_a_problem_says_what_batches_have(given: dict[str, object]) -> None:
    with pytest.raises(quire.ArgumentError, match="the Problem has it"):
        prepare(LAYER, **given)  # type: ignore[arg-type]


def test_kernels_that_are_not_compiled_need_nothing() -> None:
    pool = quire.PagePool(pages=4, page_size=16)
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64)
    done = prepare(cache, q_heads=4, q_dtype=torch.bfloat16)
    assert (done.kernels, done.workspace_bytes) == ((), 0)


TINY = Problem(q_heads=1, kv_heads=1, head_dim=16, page_size=16, batch_invariant=True, q_dtype="fp16", format="fp16")
KERNELS = 6
"""Those of TINY: two of attention, one that combines, two of writes, one of the ledger."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Prepared, Path]:
    folder = tmp_path_factory.mktemp("kernels")
    return prepare(TINY, platform=Platform.named("sm80"), directory=folder, progress=False), folder


def test_a_folder_is_a_compile_cache(prepared: tuple[Prepared, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    platform, extent, (done, folder) = Platform.named("sm80"), Extent(2, 2, 1, 64), prepared
    assert isinstance(done, Prepared) and len(done.kernels) == KERNELS and done.seconds > 0 and done.workspace_bytes > 0
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "empty"))
    assert choose(TINY, extent, platform).not_compiled == ("attend_kernel", "combine_kernel"), "another folder than the one in use"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    decision = choose(TINY, extent, platform)
    assert decision.not_compiled == () and set(decision.compiled) < set(done.kernels)
    assert f"kernels: {len(decision.compiled)}, compiled" in str(decision)


SCRIPT = """
import sys, quire
print("once")
layer = quire.Problem(q_heads=1, kv_heads=1, head_dim=16, page_size=16, batch_invariant=True, q_dtype="fp16", format="fp16")
print(len(quire.prepare(layer, platform=quire.Platform.named("sm80"), directory=sys.argv[1]).kernels))
"""


def test_workers_do_not_run_the_script_again(prepared: tuple[Prepared, Path], tmp_path: Path) -> None:
    """A script without `if __name__ == "__main__"` is not imported by the workers, which start although all kernels are there."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(prepared[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.returncode) == (["once", str(KERNELS)], 0), done.stderr


def test_what_was_not_covered_is_named_once() -> None:
    _warned.discard(LAYER)
    with pytest.warns(RuntimeWarning, match=r"compiles attend_kernel at run time: quire.prepare did not cover 32/8 heads x 128"):
        _warn(LAYER, "attend_kernel")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _warn(LAYER, "combine_kernel")
    _warned.discard(LAYER)


@pytest.mark.parametrize(
    "given, match",
    [
        ({}, "q_heads"),
        ({"q_heads": 3, "q_dtype": torch.bfloat16}, "a multiple of kv_heads = 2"),
        ({"q_heads": 4}, "q_dtype"),
        ({"q_heads": 4, "q_dtype": torch.bfloat16, "forms": "full"}, "forms"),
        ({"q_heads": 4, "q_dtype": torch.bfloat16, "index": ("int8",)}, "index"),
        ({"q_heads": 4, "q_dtype": torch.bfloat16, "lse": True}, "lse"),
    ],
)
def test_wrong_questions(given: dict[str, object], match: str) -> None:
    cache = quire.KVCache.allocate(quire.PagePool(4, 16), kv_heads=2, head_dim=64)
    with pytest.raises(quire.ArgumentError, match=match):
        prepare(cache, **given)  # type: ignore[arg-type]
    with pytest.raises(quire.ArgumentError, match="cache_or_problem"):
        prepare("a cache")  # type: ignore[arg-type]


def test_a_write_with_slots_alone_is_covered() -> None:
    """Its index tensors are int32, whatever those of the batches are."""
    platform = Platform.named("sm90")
    ready = set(_work(_problems(LAYER.replace(index="int64"), None, None, None, None, None, None), platform)[0])
    alone = choose(LAYER.of_writes(), Extent(1, 9, 9, 9), platform, operation="write")
    assert alone.compiled and set(alone.compiled) <= ready


def test_a_problem_says_which_calls_are_made() -> None:
    given = LAYER.replace(form="context", lse=True, index="int64")
    found = {problem for operation, problem in _problems(given, None, None, None, None, None, None) if operation == "attend"}
    assert found == {given, given.replace(memory="generic")}


def test_spans_and_selections_of_a_problem_have_the_type_that_is_named() -> None:
    for fields, name in (({"spans": "int32"}, "spans"), ({"select": "columns"}, "select_index")):
        given = LAYER.replace(**fields)
        for index, types in ((None, {"int32"}), (("int32", "int64"), {"int32", "int64"})):
            found = _problems(given, None, None, None, None, None, index)
            attends = {problem for operation, problem in found if operation == "attend"}
            assert {(getattr(problem, name), problem.index) for problem in attends} == {(one, one) for one in types}
