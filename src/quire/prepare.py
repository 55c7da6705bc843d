"""Warm-up: compiles every kernel that some batch of a layer can need, before the first call, so that no call compiles."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.contract.static import FLOATS
from quire.dispatch.choose import kernels_for
from quire.dispatch.kernel import Compiling, Kernel
from quire.errors import ArgumentError, describe
from quire.options import Options
from quire.platform import Platform
from quire.problem import Problem, is_fp8

FORMS, INDICES = ("full", "context"), ("int32", "int64")


class Prepared(NamedTuple):
    """What `prepare` did."""

    kernels: tuple[str, ...]
    """A key for each compiled kernel, as in `Decision.compiled`."""
    seconds: float
    workspace_bytes: int
    """What one call allocates for partial results at most, whatever the batch."""

    def __str__(self) -> str:
        return (
            f"{len(self.kernels)} kernels compiled in {self.seconds:.1f} s, workspace {self.workspace_bytes / 2**20:.1f} MiB a call"
        )


def prepare(
    cache_or_problem: KVCache | Problem,
    *,
    q_heads: int | None = None,
    q_dtype: torch.dtype | None = None,
    options: Options | None = None,
    forms: Sequence[str] | None = None,
    lse: Sequence[bool] | None = None,
    index: Sequence[str] | None = None,
    platform: Platform | None = None,
    directory: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Prepared:
    """Compiles all kernels of a layer in parallel, and loads them on the layer's device unless a `platform` is named.

        cache_or_problem   the layer's cache, then q_heads and q_dtype are needed too; or a Problem
        forms, lse, index  which calls will be made: full and context form, with and without LSE, types of the index tensors; by
                           default what a Problem says, and for a cache full form, without LSE, int32
        platform           by default that of the cache's or the Problem's device; one that is named is compiled for, and not loaded
        directory          where compiled kernels go, in the layout of TRITON_CACHE_DIR; by default Triton's own cache
        progress           whether a progress bar is shown; by default on a terminal

    Afterwards no call of the layer compiles. A call that compiles all the same gives one warning, which names its problem."""
    if platform is not None and not isinstance(platform, Platform):
        raise ArgumentError("platform", describe(platform), "a quire.Platform, or None for the cache's device")
    if directory is not None and not isinstance(directory, (str, os.PathLike)):
        raise ArgumentError("directory", describe(directory), "a path, or None")
    problems = _problems(cache_or_problem, q_heads, q_dtype, options, forms, lse, index)
    device = torch.device(problems[0][1].device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    here = platform is None
    platform = Platform.detect(device) if platform is None else platform
    begin = time.perf_counter()
    work, workspace = _work(problems, platform)
    folder = None if directory is None else os.fspath(directory)
    with _cache_directory(folder):
        _compile(work, platform, folder, progress)
        if here and device.type == "cuda":
            with torch.cuda.device(device):
                for launcher in {id(launcher): launcher for _, launcher in work.values()}.values():
                    for _, load in launcher.prepare(device.index):
                        load()
            _watch_for_others()
    return Prepared(tuple(work), time.perf_counter() - begin, workspace)


def _problems(
    given: KVCache | Problem,
    q_heads: int | None,
    q_dtype: torch.dtype | None,
    options: Options | None,
    forms: Sequence[str] | None,
    lse: Sequence[bool] | None,
    index: Sequence[str] | None,
) -> list[tuple[str, Problem]]:
    """The operations and problems of all calls that will be made."""
    forms = forms if forms is not None else (given.form,) if isinstance(given, Problem) else ("full",)
    lse = lse if lse is not None else (given.lse,) if isinstance(given, Problem) else (False,)
    mixed = isinstance(given, Problem) and index is None and given.index not in INDICES
    index = index if index is not None else (given.index,) if isinstance(given, Problem) else ("int32",)
    for name, values, allowed in (("forms", forms, FORMS), ("index", index, INDICES), ("lse", lse, (False, True))):
        if name == "index" and mixed:
            continue
        if not isinstance(values, (list, tuple, set, frozenset)) or not values or any(not _is_one_of(v, allowed) for v in values):
            raise ArgumentError(name, describe(values), f"a list or tuple of {' and '.join(map(str, allowed))}")
    if isinstance(given, Problem):
        if q_heads is not None or q_dtype is not None or options is not None:
            raise ArgumentError("q_heads", "q_heads, q_dtype or options beside a Problem", "None: the Problem says them")
        bases, ledger = [given.replace(form=form, lse=logs, index=i) for form in forms for logs in lse for i in index], True
    elif isinstance(given, KVCache):
        bases, ledger = list(_of_cache(given, q_heads, q_dtype, options, forms, lse, index)), given.ledger is not None
    else:
        raise ArgumentError("cache_or_problem", describe(given), "a quire.KVCache or a quire.Problem")
    found: dict[tuple[str, Problem], None] = {}
    for base in bases:
        for memory in ("aligned", "generic"):
            problem = base.replace(memory=memory)
            found["attend", problem] = None
            found["write", problem.of_writes()] = None
            # A write with slots alone has index tensors of its own.
            found["write", problem.of_writes().replace(index="int32")] = None
            if ledger:
                found["audit", problem] = None
    return list(found)


def _is_one_of(value: object, allowed: tuple[str | bool, ...]) -> bool:
    return isinstance(value, (str, bool)) and value in allowed


def _of_cache(
    cache: KVCache,
    q_heads: int | None,
    q_dtype: torch.dtype | None,
    options: Options | None,
    forms: Sequence[str],
    lse: Sequence[bool],
    index: Sequence[str],
) -> Iterator[Problem]:
    if not isinstance(q_heads, int) or isinstance(q_heads, bool) or not 1 <= q_heads <= 65536 or q_heads % cache.kv_heads:
        raise ArgumentError("q_heads", describe(q_heads), f"a multiple of kv_heads = {cache.kv_heads}, at most 65536")
    if not isinstance(q_dtype, torch.dtype) or not (q_dtype in FLOATS or is_fp8(q_dtype)):
        raise ArgumentError("q_dtype", describe(q_dtype), "fp32, fp16, bf16 or an fp8 type: the type of the queries")
    if options is not None and not isinstance(options, Options):
        raise ArgumentError("options", describe(options), "a quire.Options")
    if is_fp8(q_dtype) is not (options is not None and options.q_scale is not None):
        raise ArgumentError("options", describe(options), "Options(q_scale=...) with fp8 queries, and only with them")
    device = cache.device
    q = torch.empty((1, q_heads, cache.head_dim), dtype=q_dtype, device=device)
    kv_dtype = torch.bfloat16 if q_dtype.itemsize == 1 else q_dtype
    new = tuple(torch.empty((1, cache.kv_heads, dim), dtype=kv_dtype, device=device) for dim in (cache.head_dim, cache.v_head_dim))
    for name in index:
        shapes = ((1, 1), (1,), (2,))
        batch = Batch(*(torch.zeros(shape, dtype=getattr(torch, name), device=device) for shape in shapes))
        for form in forms:
            for logs in lse:
                beside = None if form == "full" else (new[0], new[1])
                yield Problem.of(q, cache, batch, options, new=beside, lse=logs)


Work = dict[str, tuple[tuple[str, str, Problem, int], Any]]
"""By key: operation, kernel, problem and the number of one compilation, and the launcher."""


def _work(problems: Iterable[tuple[str, Problem]], platform: Platform) -> tuple[Work, int]:
    """Every kernel that is to be compiled, once, and the largest workspace."""
    found: Work = {}
    workspace = 0
    for operation, problem in problems:
        for kernel in kernels_for(problem, platform, operation):
            launcher = kernel.launcher_for(problem, platform)
            if isinstance(launcher, Compiling):
                for number, (key, _) in enumerate(launcher.prepare(None)):
                    found.setdefault(key, ((operation, kernel.name, problem, number), launcher))
                workspace = max(workspace, launcher.workspace_bytes)
    return found, workspace


def _compile(work: Work, platform: Platform, folder: str | None, progress: bool | None) -> None:
    """Compiles side by side: each worker is a process of its own, since a compiler may abort and holds the interpreter's lock."""
    if not work:
        return
    from rich.progress import Progress

    workers = max(1, min(len(work), os.cpu_count() or 1))
    with Progress(transient=True, disable=progress is False) as bar:
        shown = bar.add_task(f"compiling for {platform.arch}", total=len(work))
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            for done in as_completed([pool.submit(compile_one, what, platform, folder) for what, _ in work.values()]):
                done.result()
                bar.advance(shown)


def compile_one(what: tuple[str, str, Problem, int], platform: Platform, folder: str | None) -> None:
    """Compiles one kernel into the compile cache, or a folder in its place: what a worker does."""
    operation, name, problem, number = what
    (kernel,) = (kernel for kernel in kernels_for(problem, platform, operation) if kernel.name == name)
    compilations: list[tuple[str, Callable[[], None]]] = list(_launcher(kernel, problem, platform).prepare(None))
    with _cache_directory(folder):
        compilations[number][1]()


def _launcher(kernel: Kernel, problem: Problem, platform: Platform) -> Compiling:
    launcher = kernel.launcher_for(problem, platform)
    assert isinstance(launcher, Compiling)
    return launcher


@contextmanager
def _cache_directory(directory: str | None) -> Iterator[None]:
    """Within it Triton's compile cache is another folder."""
    if directory is None:
        yield
        return
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = directory
        yield


_warned: set[Problem] = set()


def _watch_for_others() -> None:
    """From now on a call that compiles gives a warning, once for each problem."""
    from quire.kernels.triton.program import compile_hooks

    if _warn not in compile_hooks:
        compile_hooks.append(_warn)


def _warn(problem: Problem, kernel: str) -> None:
    if problem not in _warned:
        _warned.add(problem)
        warnings.warn(
            f"quire: a call compiles {kernel} at run time: quire.prepare did not cover {problem}", RuntimeWarning, stacklevel=2
        )
