"""`quire tune`: what it says without a GPU, and that no wrong, failing or spilling candidate ever wins."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.bench import case
from quire.bench.tune import (
    TUNING_TARGETS,
    BoundCandidate,
    CompilePool,
    GpuWorkload,
    SearchResult,
    Trial,
    TuningTarget,
    attempt,
    best_of,
    candidates,
    duplicates,
    literal,
    rounds_of,
    search,
    without_memory,
)
from quire.bench.workloads import Workload
from quire.cli import main, tune
from quire.kernels.triton.host.tuning import TABLE, Tuning
from quire.kernels.triton.host.tuning import __dict__ as names
from quire.platform import Platform

CARD = replace(Platform.named("sm90"), multiprocessors=132)
KIND = TuningTarget("decode", 2, 128)
CURRENT = KIND.current(CARD)
GRID = {"keys": (32, 64, 128), "warps": (1, 4)}
RIGHT, WRONG = torch.tensor(1.0), torch.tensor(2.0)


@dataclass
class Field:
    """A workload on which candidates do as they are told; a run of them says how long it takes."""

    seconds: Callable[[Tuning], float]
    wrong: Callable[[Tuning], bool] = lambda row: False
    raises: Callable[[Tuning], bool] = lambda row: False
    spills: Callable[[Tuning], int | None] = lambda row: 0
    bound: list[Tuning] = field(default_factory=list)

    def bind(self, row: Tuning) -> BoundCandidate:
        self.bound.append(row)

        def run() -> torch.Tensor:
            if self.raises(row):
                raise RuntimeError("out of resource: shared memory")
            self.now = self.seconds(row)
            return WRONG if self.wrong(row) else RIGHT

        return BoundCandidate(run, lambda: self.spills(row))

    def is_correct(self, out: torch.Tensor) -> bool:
        return out is RIGHT

    def timer(self, run: Callable[[], Any]) -> list[float]:
        run()
        return [self.now, self.now, 100.0 * self.now]


def of_keys(row: Tuning) -> float:
    """More keys, more speed; fewer warps are a little faster."""
    return 1.0 / row.keys + row.warps / 1e5


def is_fastest(row: Tuning) -> bool:
    return row.keys == 128


def test_the_fastest_wins() -> None:
    ground = Field(of_keys)
    found = search(KIND, CURRENT, [GRID], [ground], ground.timer)
    assert found.best is not None and (found.best.row.keys, found.best.row.warps) == (128, 1)
    assert found.gain == pytest.approx(of_keys(CURRENT) / of_keys(found.best.row))
    assert len(found.trials) == 6 and found.current.row == CURRENT
    assert found.best.seconds == (of_keys(found.best.row),), "one slow run of three is not the median"


@pytest.mark.parametrize(
    "fault, words",
    [
        ({"wrong": is_fastest}, "wrong result"),
        ({"raises": is_fastest}, "RuntimeError: out of resource: shared memory"),
        ({"spills": lambda row: 8 * is_fastest(row)}, "spills registers"),
    ],
    ids=["wrong", "fails", "spills"],
)
def test_an_unfit_candidate_never_wins(fault: dict[str, Any], words: str) -> None:
    good, ground = Field(of_keys), Field(of_keys, **fault)
    found = search(KIND, CURRENT, [GRID], [good, ground], lambda run: [good.now])
    assert found.best is not None and (found.best.row.keys, found.best.row.warps) == (64, 1)
    assert {trial.fault for trial in found.trials if trial.row.keys == 128} == {words}
    assert [trial.fit for trial in found.trials if trial.row.keys == 128] == [False, False]


def test_a_wrong_candidate_is_not_timed() -> None:
    ground = Field(of_keys, wrong=lambda row: True)
    trial = attempt(CURRENT, [ground], lambda run: pytest.fail("timed"))
    assert (trial.seconds, trial.fault) == ((), "wrong result")


def test_without_a_fit_candidate_there_is_no_winner() -> None:
    ground = Field(of_keys, wrong=lambda row: True)
    found = search(KIND, CURRENT, [GRID], [ground], ground.timer)
    assert (found.best, found.gain) == (None, None)


def test_a_row_that_spills_can_be_beaten_but_not_win() -> None:
    ground = Field(of_keys, spills=lambda row: 4 if row == CURRENT else None)
    found = search(KIND, CURRENT, [{"keys": (32,)}], [ground], ground.timer)
    assert found.best is not None and found.best.row.keys == 32 and found.gain is not None and found.gain < 1


def test_luck_does_not_win() -> None:
    """A candidate that was fast once is timed again beside the row of the table."""
    ground = Field(lambda row: 1.0 if row == CURRENT else 0.5 if ground.bound.count(row) == 1 else 2.0)
    found = search(KIND, CURRENT, [{"keys": (32,)}], [ground], ground.timer)
    assert found.best is not None and found.best.row == CURRENT and found.gain == 1.0


def test_the_mean_is_geometric() -> None:
    even, lopsided = Trial(CURRENT, (1e-3, 1e-3)), Trial(CURRENT._replace(keys=32), (1e-5, 5e-2))
    assert even.mean == pytest.approx(1e-3) and lopsided.mean == pytest.approx(7.07e-4, rel=1e-3)
    assert best_of([even, lopsided]) is lopsided


def test_rounds_go_on_from_the_best() -> None:
    ground = Field(lambda row: of_keys(row) + row.unit_overhead / 1e6)
    found = search(KIND, CURRENT, [GRID, {"unit_overhead": (1, 2)}], [ground], ground.timer)
    assert found.best is not None and found.best.row == CURRENT._replace(keys=128, warps=1, unit_overhead=1)


def test_what_the_compiler_died_of_is_not_tried() -> None:
    ground = Field(of_keys)
    dead = {row: "the compiler died" for row in candidates(CURRENT, GRID) if is_fastest(row)}
    found = search(KIND, CURRENT, [GRID], [ground], ground.timer, prepare=lambda rows: dead)
    assert found.best is not None and found.best.row.keys == 64 and not set(ground.bound) & set(dead)


COMPILER = """
import os

def compile(kernel, workload, row, platform):
    if row.keys == 128:
        os._exit(1)
    if row.keys == 32:
        raise RuntimeError("refused")
    return 1
"""


def test_only_the_guilty_are_ruled_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is in the same pool as a compiler that dies is tried again; one that refuses is left to say so when it is run."""
    (tmp_path / "mortal_compiler.py").write_text(COMPILER)
    monkeypatch.syspath_prepend(str(tmp_path))
    compile = importlib.import_module("mortal_compiler").compile
    few, some, many, more = (
        CURRENT._replace(keys=keys, per_multiprocessor=programs)
        for keys, programs in ((32, 1.0), (64, 1.0), (128, 1.0), (128, 3.0))
    )
    dead = CompilePool(1, compile)("decode", KIND.workloads()[:1], CARD, [many, few, some, more])
    assert dead == dict.fromkeys((many, more), "the compiler died")


def test_candidates_start_with_the_current_row_and_are_unique() -> None:
    for kind in TUNING_TARGETS:
        for quick in (False, True):
            for grid in rounds_of(kind.kernel, quick):
                rows = candidates(kind.current(CARD), grid)
                assert rows[0] == kind.current(CARD) and len(set(rows)) == len(rows) > 1


GIVEN = {"kernel", "arches", "width", "element", "stored", "v_in_k", "group"}
OF_LONG_ROWS = {"long_rows", "long_keys", "long_stages"}
LEFT = {"rows", "most_rows", "least", "scan"}
"""The group says the first; the second is for many heads in little shared memory; the third is for batches too small to be timed
well; the fourth is for batches of many sequences."""


@pytest.mark.parametrize("kernel, never", [("decode", OF_LONG_ROWS), ("mixed", {"registers", "many", "heads_per_tile"})])
def test_every_column_is_searched_that_a_kernel_has(kernel: str, never: set[str]) -> None:
    searched = {name for grid in rounds_of(kernel) for name in grid}
    assert searched == set(Tuning._fields) - GIVEN - LEFT - never


def test_workloads_tell_candidates_apart() -> None:
    """On Hopper, where two columns were found to matter: there some values of each are launches of their own."""
    rows = candidates(CURRENT._replace(heads_per_tile=1), {"many": (None, 3, 4, 6, 8)})
    assert [row.many for row in duplicates("decode", KIND.workloads(), CARD, rows)] == [8], "as many units has no workload"
    rows = candidates(CURRENT, {"heads_per_tile": (1, 2, 4)})
    assert duplicates("decode", KIND.workloads(), CARD, rows) == {}


def test_one_of_several_that_launch_the_same_is_tried() -> None:
    """The first: the table's row, or what an earlier round found."""
    bytes_row = TuningTarget("decode", 1, 128).current(CARD)
    ground = Field(lambda row: 1.0 / len(ground.bound))  # whoever comes last seems to be the fastest
    same = partial(duplicates, "decode", TuningTarget("decode", 1, 128).workloads(), CARD)
    grids = [{"unit_overhead": (2, 3)}, {"many": (None, 3, 1000)}]
    found = search(KIND, bytes_row, grids, [ground], ground.timer, same=same)
    assert {row.many for row in ground.bound} == {None} and {row.unit_overhead for row in ground.bound} == {2, 3}
    assert [trial.fault for trial in found.trials if trial.row.many] == ["the same launches as another candidate"] * 2


def test_progress_counts_every_round(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    counted: list[int] = []

    @contextmanager
    def progress(total: int, **how: Any) -> Iterator[Callable[[str], None]]:
        counted.append(total)
        yield lambda words: None

    def tuned(kind: TuningTarget, **how: Any) -> SearchResult:
        row = Trial(kind.current(CARD), (1.0,))
        return SearchResult(kind, [row], row, row)

    monkeypatch.setattr(tune, "_missing", lambda: None)
    monkeypatch.setattr(tune, "progress", progress)
    monkeypatch.setattr(tune, "tune", tuned)
    assert main(["tune", "--only", "16-bit cache, head_dim 128"]) == 0
    assert counted == [len(rounds_of("decode")) + len(rounds_of("mixed"))]


@pytest.mark.parametrize("row", [*TABLE, CURRENT._replace(unit_overhead=3, registers=168)], ids=literal)
def test_a_literal_is_source(row: Tuning) -> None:
    assert eval(literal(row), dict(names)) == row


@pytest.mark.parametrize("kind", TUNING_TARGETS, ids=lambda kind: kind.label)
def test_winners_in_printed_order_are_found_again(kind: TuningTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pasted above the table in the order of TUNING_TARGETS, each kind finds its own row."""
    winners = tuple(k.current(CARD)._replace(least=100 + i) for i, k in enumerate(TUNING_TARGETS))
    monkeypatch.setattr("quire.kernels.triton.host.tuning.TABLE", winners + TABLE)
    assert kind.current(CARD).least == 100 + TUNING_TARGETS.index(kind)


SMALL = Workload("small", ((1, 40), (70, 10), (1, 0)), q_heads=4, kv_heads=2, head_dim=16)


@pytest.mark.parametrize("format", ["", "e4m3fn"], ids=["16-bit", "8-bit"])
def test_the_compiler_sees_what_is_run(format: str) -> None:
    workload = Workload(SMALL.name, SMALL.sequences, format=format, q_heads=4, kv_heads=2, head_dim=16)
    real = case.build(workload)
    q, cache, batch, options = without_memory(workload)
    pairs: list[tuple[Any, Any]] = [(q, real.q), (cache.k, real.cache.k), (cache.v, real.cache.v)]
    pairs += [(cache.k_scale, real.cache.k_scale), (cache.v_scale, real.cache.v_scale)]
    pairs += [(getattr(batch, name), getattr(real.batch, name)) for name in ("page_table", "kv_lens", "q_starts")]
    for mine, theirs in pairs:
        assert mine is theirs is None or (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    assert (batch.max_q_len, batch.max_kv_len, str(options)) == (
        real.batch.max_q_len,
        real.batch.max_kv_len,
        str(real.options),
    )


def test_the_first_right_output_is_the_measure() -> None:
    """The first is held to the truth; an element that the truth does not sample is then held to the first."""
    from quire import attend

    ground = GpuWorkload("decode", SMALL, "cpu")
    right = attend(ground.case.q, ground.case.cache, ground.case.batch)
    for spoiled in (right + 1, torch.full_like(right, torch.nan)):
        assert not ground.is_correct(spoiled) and ground.right is None
    assert ground.is_correct(right) and ground.is_correct(right.clone())
    for value in (torch.nan, 9.0):
        for token in range(len(right)):
            spoiled = right.clone()
            spoiled[token, -1, -1] = value
            assert not ground.is_correct(spoiled)


def error_of(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["tune", *arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = " ".join(error_of([], capsys).split())
    assert "torch sees no GPU here" in said and "needs an NVIDIA or AMD GPU" in said and "quire tune --list" in said


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--only", "no such row"], "mixed, 8-bit cache, head_dim 128"),
        (["--only", "("], "a regular expression"),
        (["--jobs", "0"], "--jobs: given 0"),
    ],
    ids=" ".join,
)
def test_bad_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in error_of(arguments, capsys)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--help"]) == 0
    said = capsys.readouterr().out
    for words in ("--only", "--quick", "--json", "--output", "--list", "--jobs", "To use the result", "tuning.py", "exit status"):
        assert words in said


def test_list_works_anywhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "--list", "--only", "decode.*128"]) == 0
    said = capsys.readouterr().out
    assert all(literal(row) in said for row in TABLE)
    assert "decode, 8-bit cache, head_dim 128" in said and "mixed, 8-bit" not in said and "stages 2/3/4/5" in said


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU that does as it is told."""
    how: dict[str, Any] = {}

    def play(kind: TuningTarget, *, quick: bool, jobs: int, tell: Any) -> Any:
        ground = Field(of_keys, **how)
        return search(kind, kind.current(CARD), [GRID], [ground], ground.timer)

    monkeypatch.setattr(tune, "_missing", lambda: None)
    monkeypatch.setattr(tune, "tune", play)
    return how


def test_what_it_prints(
    card: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card["wrong"] = is_fastest
    file = tmp_path / "tune.json"
    monkeypatch.setattr(tune, "_report", lambda found, quick: {"rows": [one.to_dict() for one in found]})
    assert main(["tune", "--only", "decode, 16.*128", "--output", str(file)]) == 0
    said = capsys.readouterr().out
    best = CURRENT._replace(warps=1)
    assert f"{literal(best)},  # 1." in said and "2 rejected: wrong result, such as keys=128" in said and "spills" in said
    (row,) = json.loads(file.read_text())["rows"]
    assert row["best"]["row"] == literal(best) and len(row["trials"]) == 6
    assert [trial["mean"] for trial in row["trials"] if trial["fault"]] == [None, None]


def test_no_winner_is_a_failure(card: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    card["raises"] = lambda row: True
    assert main(["tune", "--only", "decode, 16.*128"]) == 1
    said = capsys.readouterr().out
    assert "no valid candidate" in said and "Tuning(" not in said and "6 rejected: RuntimeError" in said
