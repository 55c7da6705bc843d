"""The search for rows of `kernels/triton/host/tuning.py`: candidates as data, each checked before it is timed, the fastest wins."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from quire.batch import Batch
from quire.bench.case import build
from quire.bench.gpu import why
from quire.bench.reference_check import BenchReference
from quire.bench.workloads import CUDA_WORKLOADS, FP8, Workload
from quire.cache.format import FORMATS
from quire.cache.kv_cache import KVCache
from quire.contract.call import Call
from quire.kernels.triton.host.tuning import Tuning, tuning_for
from quire.launch import described
from quire.options import Options
from quire.platform import Platform

Grid = Mapping[str, Sequence[Any]]
"""Fields of `Tuning` and the values to try, all with all."""

ROUNDS: dict[str, tuple[Grid, ...]] = {
    "decode": (
        {"keys": (32, 64, 128), "stages": (2, 3, 4, 5), "warps": (1, 2, 4, 8), "per_multiprocessor": (1.0, 2.0, 3.0, 4.0, 8.0)},
        {"registers": (128, 168), "per_multiprocessor": (2.0, 3.0, 4.0)},
        {"unit_overhead": (1, 2, 3, 4)},
        {"many": (None, 3, 4, 6, 8), "heads_per_tile": (1, 2, 4)},
    ),
    "mixed": (
        {"long_rows": (64, 128), "long_keys": (32, 64, 128), "long_stages": (2, 3, 4), "warps": (4, 8)},
        {"keys": (32, 64, 128), "stages": (2, 3, 4, 5), "per_multiprocessor": (1.0, 2.0)},
        {"unit_overhead": (1, 2, 3, 4)},
    ),
}
"""Each round starts from the best of the one before it: fields that depend on each other are in one round."""

QUICK_ROUNDS: dict[str, tuple[Grid, ...]] = {
    "decode": ({"keys": (32, 64), "stages": (3, 4), "warps": (1, 4), "per_multiprocessor": (2.0, 3.0, 8.0)},),
    "mixed": ({"long_rows": (64, 128), "long_keys": (32, 64), "long_stages": (2, 3), "warps": (4, 8)},),
}

WORKLOADS: dict[str, tuple[str, ...]] = {
    "decode": (
        "decode 64 x 4096",
        "decode 1 x 8192",
        "decode 16 x 4096",
        "decode 128 ragged, 16 to 16384",
        "decode 256 x 1024",
    ),
    "mixed": ("prefill 8 x 1024 over 1024", "mixed: 1 x 2048 over 4096 + 63 decodes at 4096", "prefill 1 x 8192"),
}
"""By their names; a quick search takes the first two."""
REPETITIONS = 3
"""How often the winner and the current row of the table are timed again, alternately: the fastest of many was also lucky."""


class TuningTarget(NamedTuple):
    """The kernel, cache and head_dim that one row of the table is for."""

    kernel: str
    stored: int
    """Bytes of an element in the cache."""
    width: int
    """head_dim."""

    @property
    def label(self) -> str:
        return f"{self.kernel}, {8 * self.stored}-bit cache, head_dim {self.width}"

    def workloads(self, quick: bool = False) -> list[Workload]:
        """The workloads that its candidates are timed on."""
        usual = {w.name: w for w in reversed(CUDA_WORKLOADS)}
        names = WORKLOADS[self.kernel][: 2 if quick else None]
        return [replace(usual[name], head_dim=self.width, format=FP8 if self.stored == 1 else "") for name in names]

    def current(self, platform: Platform) -> Tuning:
        """The current row of the table, for this target alone."""
        row = tuning_for(self.kernel, platform.arch, self.width, 2, self.stored)
        return row._replace(arches=(platform.arch,), width=self.width, element=2, stored=self.stored)


TUNING_TARGETS = tuple(TuningTarget(*kind) for kind in itertools.product(("decode", "mixed"), (1, 2), (64, 128, 256)))
"""In the order that the table, which is searched top down, needs."""


def rounds_of(kernel: str, quick: bool = False) -> tuple[Grid, ...]:
    return (QUICK_ROUNDS if quick else ROUNDS)[kernel]


def candidates(start: Tuning, grid: Grid) -> list[Tuning]:
    """The start, and every other point of the grid."""
    points = (start._replace(**dict(zip(grid, values))) for values in itertools.product(*grid.values()))
    return list(dict.fromkeys((start, *points)))


def duplicates(kernel: str, workloads: Sequence[Workload], platform: Platform, rows: Sequence[Tuning]) -> dict[Tuning, str]:
    """Candidates whose launches are the same as those of an earlier one on every workload. Which of two such candidates is faster
    would be chance, and they may differ on other batches."""
    first: dict[str, Tuning] = {}
    found = {}
    calls = [call_without_memory(workload) for workload in workloads]
    for row in rows:
        if first.setdefault(_launched(kernel, calls, platform, row), row) != row:
            found[row] = "the same launches as another candidate"
    return found


def _launched(kernel: str, calls: Sequence[Call], platform: Platform, row: Tuning) -> str:
    """The launches of a candidate for some calls, without addresses."""
    from quire.kernels.triton.host.launcher import AttendLauncher

    todo = [(call, *described("attend", call)) for call in calls]
    launchers = [AttendLauncher(kernel, problem, platform, row) for _, problem, _ in todo]
    dynamic = any(launcher.schedule(call, extent).tail_programs for launcher, (call, _, extent) in zip(launchers, todo))
    if row.many is not None and not dynamic:
        # None of the calls has so many units: the kernels' other schedule is compiled in, and never runs.
        return _launched(kernel, calls, platform, row._replace(many=None))
    launches = [
        (program.constants, program.options, grid, arguments)
        for launcher, (call, _, extent) in zip(launchers, todo)
        for program, grid, arguments, _ in launcher.launches(call, extent, lambda tensor: tensor.dtype)
    ]
    return str(launches)


def literal(row: Tuning) -> str:
    """The row as source, to paste.

    >>> literal(Tuning("decode", ("sm90",), 128, 2, 1, 16, 32, 3, 0, 0, 0, 1, 8.0, unit_overhead=3))
    'Tuning("decode", ("sm90",), 128, 2, 1, 16, 32, 3, 0, 0, 0, 1, 8.0, unit_overhead=3)'
    """
    usual = row._field_defaults
    arches = "(" + "".join(f'"{arch}", ' for arch in row.arches).rstrip(" " if len(row.arches) == 1 else ", ") + ")"
    shown = {"kernel": f'"{row.kernel}"', "arches": arches}
    words = [shown.get(name, repr(value)) for name, value in row._asdict().items() if name not in usual]
    words += [f"{name}={value!r}" for name, value in row._asdict().items() if name in usual and value != usual[name]]
    return f"Tuning({', '.join(words)})"


@dataclass(frozen=True)
class Trial:
    """The result of one candidate."""

    row: Tuning
    seconds: tuple[float, ...] = ()
    """Of each workload; empty if it was not timed."""
    spills: int | None = None
    """Registers that the compiler spilled to memory; None if it was not compiled or the backend does not report it."""
    fault: str = ""
    """Why it cannot be chosen."""

    @property
    def fit(self) -> bool:
        return bool(self.seconds) and not self.fault

    @property
    def mean(self) -> float:
        """The geometric mean of its seconds."""
        return math.exp(statistics.fmean(map(math.log, self.seconds))) if self.seconds else math.inf

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"row": literal(self.row), "mean": self.mean if self.seconds else None}


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    kind: TuningTarget
    trials: list[Trial]
    current: Trial
    """The current row of the table and the best one, as they were timed alternately at the end. The best one is the current row if
    none is faster, and None if none can be used."""
    best: Trial | None

    @property
    def gain(self) -> float | None:
        """How many times as fast as the current row of the table; None if that one was not timed."""
        return None if self.best is None or not self.current.seconds else self.current.mean / self.best.mean

    def to_dict(self) -> dict[str, Any]:
        best = None if self.best is None else self.best.to_dict()
        trials = [trial.to_dict() for trial in self.trials]
        return {**self.kind._asdict(), "label": self.kind.label, "current": self.current.to_dict(), "best": best} | {
            "gain": self.gain,
            "trials": trials,
        }


class BoundCandidate(NamedTuple):
    """A candidate with its tensors."""

    run: Callable[[], torch.Tensor]
    spills: Callable[[], int | None]
    """Spilled registers; known after it ran."""


class CandidateWorkload(Protocol):
    """One workload on which candidates are tried."""

    def bind(self, row: Tuning) -> BoundCandidate:
        """The candidate with its tensors; its output holds NaN."""

    def is_correct(self, out: torch.Tensor) -> bool:
        """Whether an output is right."""


Timer = Callable[[Callable[[], Any]], Sequence[float]]


def attempt(row: Tuning, workloads: Iterable[CandidateWorkload], timer: Timer) -> Trial:
    """Runs, checks and times a candidate. Whatever it raises becomes its fault, and does not end the search."""
    seconds: list[float] = []
    spills: int | None = None
    try:
        for workload in workloads:
            ready = workload.bind(row)
            out = ready.run()
            spills = max((s for s in (spills, ready.spills()) if s is not None), default=None)
            if not workload.is_correct(out):
                return Trial(row, spills=spills, fault="wrong result")
            seconds.append(statistics.median(timer(ready.run)))
    except Exception as error:
        return Trial(row, spills=spills, fault=why(error))
    return Trial(row, tuple(seconds), spills, "spills registers" if spills else "")


def best_of(trials: Iterable[Trial]) -> Trial | None:
    """The fastest one without a fault."""
    return min((trial for trial in trials if trial.fit), key=lambda trial: trial.mean, default=None)


def search(
    kind: TuningTarget,
    current: Tuning,
    rounds: Sequence[Grid],
    workloads: Sequence[CandidateWorkload],
    timer: Timer,
    *,
    same: Callable[[Sequence[Tuning]], Mapping[Tuning, str]] = lambda rows: {},
    prepare: Callable[[Sequence[Tuning]], Mapping[Tuning, str]] = lambda rows: {},
    progress: Callable[[str], None] = lambda line: None,
) -> SearchResult:
    """The best row for a target. `same` is called with all candidates so far, `prepare` with those of a round before they are
    tried. Both return the candidates to exclude, with the reason."""
    tried: dict[Tuning, Trial] = {}
    for number, grid in enumerate(rounds, start=1):
        leader = best_of(tried.values())
        rows = [row for row in candidates(leader.row if leader else current, grid) if row not in tried]
        progress(f"{kind.label}: round {number} of {len(rounds)}, {len(rows)} candidates")
        duplicated = same([*tried, *rows])
        excluded = {**duplicated, **prepare([row for row in rows if row not in duplicated])}
        for row in rows:
            tried[row] = Trial(row, fault=excluded[row]) if row in excluded else attempt(row, workloads, timer)
    leader = best_of(tried.values())
    if leader is None or leader.row == current:
        return SearchResult(kind, list(tried.values()), tried[current], leader)
    repeated = [(time_again(tried[current], workloads, timer), time_again(leader, workloads, timer)) for _ in range(REPETITIONS)]
    was, best = (_medians(trials) for trials in zip(*repeated))
    if not best.fit or (was.fit and was.mean <= best.mean):
        best = was
    return SearchResult(kind, list(tried.values()), was, best if best.fit else None)


def time_again(trial: Trial, workloads: Sequence[CandidateWorkload], timer: Timer) -> Trial:
    """Times a candidate once more, if it was timed before."""
    return attempt(trial.row, workloads, timer) if trial.seconds else trial


def _medians(trials: Sequence[Trial]) -> Trial:
    """Each workload's median over the repetitions; if a repetition failed, that one."""
    failed = next((trial for trial in trials if not trial.seconds), None)
    return failed or replace(trials[0], seconds=tuple(map(statistics.median, zip(*(trial.seconds for trial in trials)))))


class GpuWorkload:
    """A workload's tensors on the GPU, and its reference. The first right output is what the others are compared with: it covers
    every element, the reference a sample."""

    def __init__(self, kernel: str, workload: Workload, device: torch.device | str = "cuda"):
        self.kernel, self.case = kernel, build(workload, device)
        self.reference, self.out = BenchReference(self.case), self.case.out()
        self.budget = 0.0
        """The largest error that was allowed in the sample."""
        self.right: torch.Tensor | None = None

    def bind(self, row: Tuning) -> BoundCandidate:
        from quire.kernels.triton.host.launcher import AttendLauncher, platform_of

        case, out = self.case, self.out.fill_(torch.nan)
        call = Call(case.cache, case.batch, case.q, case.options, None, out)
        problem, _ = described("attend", call)
        launcher = AttendLauncher(self.kernel, problem, platform_of(problem, Platform.detect(case.q.device)), row)

        def run() -> torch.Tensor:
            launcher(call)
            return out

        programs = (*launcher.programs.values(), launcher.combine, *filter(None, [launcher.balance]))
        return BoundCandidate(run, lambda: _spills(loaded.kernel for program in programs for loaded in program.loaded.values()))

    def is_correct(self, out: torch.Tensor) -> bool:
        if self.right is not None:
            # Each of the two may be off by the budget.
            return float((out.float() - self.right.float()).abs().max()) <= 2 * self.budget
        if not (self.reference.check(out, self.case.workload.dtype).right and bool(out.isfinite().all())):
            return False
        self.budget = self.reference.largest_budget(self.case.workload.dtype)
        self.right = out.clone()
        return True


def _spills(kernels: Iterable[Any]) -> int | None:
    """The most that one of the compiled kernels spills; -1 or None if the backend does not report it."""
    spills = [kernel.n_spills for kernel in kernels if kernel.n_spills is not None and kernel.n_spills >= 0]
    return max(spills, default=None)


def compile_ahead(kernel: str, workload: Workload, row: Tuning, platform: Platform) -> int:
    """Compiles what a candidate launches into Triton's cache on disk, for tensors without memory; the number of kernels."""
    from quire.kernels.triton.host.launcher import AttendLauncher
    from quire.kernels.triton.host.program import as_bytes

    call = call_without_memory(workload)
    problem, extent = described("attend", call)
    launches = AttendLauncher(kernel, problem, platform, row).launches(call, extent, as_bytes)
    todo = {program: arguments for program, _, arguments, _ in launches}
    for program, arguments in todo.items():
        program.recipe(arguments).compile(platform)
    return len(todo)


def call_without_memory(workload: Workload) -> Call:
    """A workload as a call, its tensors without memory."""
    q, cache, batch, options = without_memory(workload)
    return Call(cache, batch, q, options, None, torch.empty_like(q))


def without_memory(workload: Workload) -> tuple[torch.Tensor, KVCache, Batch, Options]:
    """The tensors of `case.build` without memory: shapes, strides and types."""
    w, formats = workload, workload.formats

    def nothing(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    used = [-(-(new + context) // w.page_size) for new, context in w.sequences]
    k, v = (nothing(sum(used), w.page_size, w.kv_heads, f.units_of(w.head_dim), dtype=f.dtype) for f in formats)
    k_scale, v_scale = (nothing(dtype=torch.float32) if f.quantised else None for f in formats)
    batch = Batch(
        nothing(len(used), -(-max(used) // 8) * 8, dtype=torch.int32),
        nothing(len(used), dtype=torch.int32),
        nothing(len(used) + 1, dtype=torch.int32),
        max_q_len=max(new for new, _ in w.sequences),
        max_kv_len=max(new + context for new, context in w.sequences),
    )
    q = nothing(w.tokens, w.q_heads, w.head_dim, dtype=FORMATS[w.dtype].dtype)
    how: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "hadamard": w.hadamard}
    cache = KVCache.wrap(k, v, layout="nhd", k_format=formats[0].name, v_format=formats[1].name, **how)
    return q, cache, batch, Options(window=w.window)


class CompilePool:
    """Processes that compile. One whose compiler dies takes the others with it: they are started again, and each candidate that was
    not done is then tried alone, so that only the guilty one is ruled out."""

    def __init__(self, jobs: int, compile: Callable[..., int] = compile_ahead):
        self.jobs, self.compile = jobs, compile

    def __call__(self, kernel: str, workloads: Sequence[Workload], platform: Platform, rows: Sequence[Tuning]) -> dict[Tuning, str]:
        """The candidates at which a compiler died. One that merely refuses says so again when it is tried."""
        same: dict[Any, list[Tuning]] = {}
        for row in rows:
            # Nothing is compiled for the number of programs.
            same.setdefault(row._replace(per_multiprocessor=0.0), []).append(row)
        todo = [(kernel, workload, equal[0], platform) for equal in same.values() for workload in workloads]
        undone = list(self._run(self.jobs, todo))
        guilty = {call[2] for task in undone for call in self._run(1, [task])}
        return {row: "the compiler died" for equal in same.values() if equal[0] in guilty for row in equal}

    def _run(self, jobs: int, todo: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Does it; what no process lived to finish comes back."""
        from concurrent.futures.process import BrokenProcessPool

        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = []
            for call in todo:
                try:
                    futures.append((call, pool.submit(self.compile, *call)))
                except BrokenProcessPool:
                    yield call
            for call, future in futures:
                if isinstance(future.exception(), BrokenProcessPool):
                    yield call
