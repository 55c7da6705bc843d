"""Ahead-of-time compilation: compiles every kernel that the batches of a layer can need, so that no call compiles."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import product
from multiprocessing import active_children, get_context
from types import ModuleType
from typing import Any, NamedTuple, get_args

import torch

from quire import interrupts
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.cache.latent import with_values
from quire.cache.select import Kind
from quire.contract.call import Call
from quire.contract.static import FLOATS
from quire.dispatch.choose import kernels_for
from quire.dispatch.kernel import CompilingLauncher, Kernel
from quire.errors import ArgumentError, describe
from quire.launch import described
from quire.options import PLAIN, Options
from quire.platform import Platform
from quire.problem import Problem, is_fp8
from quire.rope import Rope

FORMS, LSES, INDICES = ("full", "context"), (False, True), ("int32", "int64")
SELECTIONS: tuple[str, ...] = get_args(Kind)


class Prepared(NamedTuple):
    """The result of `quire.prepare`.

    Example:
        >>> import quire
        >>> print(quire.Prepared(kernels=("attend_kernel-0f",), seconds=2.0, workspace_bytes=2**20))
        1 kernel compiled in 2.0 s, workspace 1.0 MiB a call
    """

    kernels: tuple[str, ...]
    """A key for each compiled kernel, as in `Decision.compiled`."""
    seconds: float
    """The time that it took."""
    workspace_bytes: int
    """The maximum workspace (partial results) that one call allocates, for any batch."""

    def __str__(self) -> str:
        count = f"{len(self.kernels)} kernel{'' if len(self.kernels) == 1 else 's'}"
        return f"{count} compiled in {self.seconds:.1f} s, workspace {self.workspace_bytes / 2**20:.1f} MiB a call"


def prepare(
    cache_or_problem: KVCache | Problem,
    *,
    q_heads: int | None = None,
    q_dtype: torch.dtype | None = None,
    options: Options | None = None,
    rope: Rope | None = None,
    prefixes: bool = False,
    select: str | None = None,
    spans: bool = False,
    forms: Sequence[str] | None = None,
    lse: Sequence[bool] | None = None,
    index: Sequence[str] | None = None,
    platform: Platform | None = None,
    directory: str | os.PathLike[str] | None = None,
    progress: bool | Callable[[int, int], None] | None = None,
) -> Prepared:
    """Compiles all kernels of a layer in parallel subprocesses and loads them on the layer's device. After that no call of the
    layer compiles; a call that has to compile gives a RuntimeWarning that names its problem.

    Args:
        cache_or_problem: The cache of the layer, together with `q_heads` and `q_dtype`; or a `quire.Problem`. A cache is prepared
            for batches with a shard if its pool has one; a Problem if its `shard` is True.
        q_heads, q_dtype, options, rope: Those of the calls. With rope, writes rotate keys and queries.
        prefixes: Whether some batches of the cache have prefixes. This and the next two are for a cache; a Problem has such fields.
        select, spans: Whether batches select "positions" or "columns", and have spans. Their entries have the type of `index`.
        forms: Which of "full" and "context" form will be called. Default: as the Problem; for a cache full.
        lse: Whether calls are with LSE (True), without (False) or both. Default: as the Problem; for a cache without.
        index: Types of index tensors, spans and selections: "int32", "int64" or both. Default: as the Problem; for a cache int32.
        platform: Compile for this platform and load nothing. Default: the platform of the cache's or Problem's device.
        directory: Where to store compiled kernels, like TRITON_CACHE_DIR. Default: Triton's cache.
        progress: Whether to show a bar on standard error (default: if it is a terminal); or a function, which is called with the
            number of compiled kernels and of all, first with 0.

    Returns:
        A `quire.Prepared`: the keys of the compiled kernels, the time, and the maximum workspace of a call.

    Raises:
        ArgumentError: An argument has the wrong class or value, or `directory` cannot be created.
        KernelError: There are kernels to compile, and Triton is not installed.

    Example:
        >>> import quire
        >>> problem = quire.Problem(q_heads=32, kv_heads=8, head_dim=128, page_size=16)
        >>> quire.prepare(problem).kernels  # the CPU kernels are compiled with the package
        ()
    """
    _check_arguments(rope, platform, directory, progress)
    batches = _of_batches(cache_or_problem, prefixes, select, spans)
    problems = _problems(cache_or_problem, q_heads, q_dtype, options, forms, lse, index, rope, batches)
    device, begin, here = _numbered(torch.device(problems[0][1].device)), time.perf_counter(), platform is None
    platform = Platform.detect(device) if platform is None else platform
    work, workspace = _work(problems, platform)
    folder = None if directory is None else _created(os.fspath(directory))
    with _cache_directory(folder):
        _compile(work, platform, folder, progress)
        if here and device.type == "cuda":
            _load(work, device)
    return Prepared(tuple(work), time.perf_counter() - begin, workspace)


def _numbered(device: torch.device) -> torch.device:
    """A device with its number, if it can be known."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check_arguments(rope: object, platform: object, directory: object, progress: object) -> None:
    if rope is not None and not isinstance(rope, Rope):
        raise ArgumentError("rope", describe(rope), "a quire.Rope, or None")
    if platform is not None and not isinstance(platform, Platform):
        raise ArgumentError("platform", describe(platform), "a quire.Platform, or None for the device of the cache")
    if directory is not None and not isinstance(directory, (str, os.PathLike)):
        raise ArgumentError("directory", describe(directory), "a path, or None")
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise ArgumentError("progress", describe(progress), "True, False, None or a function")


def _of_batches(given: KVCache | Problem, prefixes: bool, select: str | None, spans: bool) -> dict[str, Any]:
    """What the batches of a cache have, as fields of a problem. The type of entries is that of the index tensors."""
    for name, value in (("prefixes", prefixes), ("spans", spans)):
        if not isinstance(value, bool):
            raise ArgumentError(name, describe(value), "True or False")
        if value and isinstance(given, Problem):
            raise ArgumentError(name, f"{name}=True with a Problem", "False: the Problem has it")
    if select is not None and (not isinstance(select, str) or select not in SELECTIONS):
        raise ArgumentError("select", describe(select), f"{' or '.join(map(repr, SELECTIONS))}, or None")
    if select is not None and isinstance(given, Problem):
        raise ArgumentError("select", f"{select!r} with a Problem", "None: the Problem has it")
    return {"prefixes": prefixes, "select": select, "spans": spans}


def _problems(
    given: KVCache | Problem,
    q_heads: int | None,
    q_dtype: torch.dtype | None,
    options: Options | None,
    forms: Sequence[str] | None,
    lse: Sequence[bool] | None,
    index: Sequence[str] | None,
    rope: Rope | None = None,
    batches: dict[str, Any] | None = None,
) -> list[tuple[str, Problem]]:
    """The operations and problems of all calls that will be made."""
    if not isinstance(given, KVCache | Problem):
        raise ArgumentError("cache_or_problem", describe(given), "a quire.KVCache or a quire.Problem")
    variants = _variants(given, forms, lse, index)
    if isinstance(given, Problem):
        if q_heads is not None or q_dtype is not None or options is not None:
            raise ArgumentError("q_heads", "q_heads, q_dtype or options with a Problem", "None: the Problem has them")
        bases = [given.replace(form=form, lse=logs) for form, logs, _ in variants]
        if index is not None:
            bases = [_with_index(base, i) for base, (*_, i) in zip(bases, variants)]
    else:
        bases = [_with_batches(base, batches or {}) for base in _of_cache(given, q_heads, q_dtype, options, variants)]
    turned = None if rope is None else rope.traits(True)
    found: dict[tuple[str, Problem], None] = {}
    for problem in (base.replace(memory=memory) for base in bases for memory in ("aligned", "generic")):
        found["attend", problem] = None
        found["write", problem.of_writes(turned)] = None
        # A write with slots and without a batch has int32 index tensors.
        found["write", problem.of_writes(turned).replace(index="int32", shard=False)] = None
        if isinstance(given, Problem) or given.ledger is not None:
            found["audit", problem] = None
    return list(found)


def _with_index(problem: Problem, index: str) -> Problem:
    """The problem with index tensors, spans and selections of this type."""
    fields = {"index": index}
    if problem.spans != "none":
        fields["spans"] = index
    if problem.select != "none":
        fields["select_index"] = index
    return problem.replace(**fields)


def _with_batches(problem: Problem, batches: dict[str, Any]) -> Problem:
    """The problem of batches with the fields of `_of_batches`. Refuses what the contract does not combine."""
    spans, select = batches.get("spans", False), batches.get("select")
    if spans and (problem.mask or problem.window != (None, None) or problem.causal != "yes"):
        raise ArgumentError("spans", "True with Options(mask, window or causal)", "neither: spans say what each token sees")
    if select and (spans or problem.mask or problem.shard or problem.form == "context"):
        given = f"{select!r} with a mask, spans, a shard or context form"
        raise ArgumentError("select", given, "none of these: leave hidden keys out of the selection")
    fields = {"prefixes": batches.get("prefixes", False), "spans": "int32" if spans else "none", "select": select or "none"}
    return _with_index(problem.replace(**fields), problem.index)


def _variants(
    given: KVCache | Problem, forms: Sequence[str] | None, lse: Sequence[bool] | None, index: Sequence[str] | None
) -> list[tuple[str, bool, str]]:
    """Every combination of form, LSE and index type that will be called; by default those of the Problem."""
    defaults = (given.form, given.lse, given.index) if isinstance(given, Problem) else ("full", False, "int32")
    arguments: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("forms", forms, FORMS),
        ("lse", lse, LSES),
        ("index", index, INDICES),
    )
    chosen: list[Any] = []
    for (name, values, allowed), default in zip(arguments, defaults):
        if values is None:
            chosen.append((default,))
            continue
        if not isinstance(values, (list, tuple, set, frozenset)) or not values or any(not _is_one_of(v, allowed) for v in values):
            raise ArgumentError(name, describe(values), f"a list or tuple of {' and '.join(map(str, allowed))}")
        chosen.append(tuple(values))
    return list(product(*chosen))


def _is_one_of(value: object, allowed: tuple[str | bool, ...]) -> bool:
    return isinstance(value, (str, bool)) and value in allowed


def _of_cache(
    cache: KVCache,
    q_heads: int | None,
    q_dtype: torch.dtype | None,
    options: Options | None,
    variants: list[tuple[str, bool, str]],
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
    k = torch.empty((1, cache.kv_heads, cache.head_dim), dtype=kv_dtype, device=device)
    new = (k, torch.empty((1, cache.kv_heads, cache.v_head_dim), dtype=kv_dtype, device=device))
    if cache.v_in_k is not None:
        new = with_values((k, None), cache)
    for form, logs, name in variants:
        shard = None if cache.pool is None else cache.pool.shard
        tensors = (torch.zeros(shape, dtype=getattr(torch, name), device=device) for shape in ((1, 1), (1,), (2,)))
        batch = Batch(*tensors, shard=shard)
        call = Call(cache, batch, q, options or PLAIN, None if form == "full" else new, with_lse=logs)
        yield described("attend", call)[0]


Work = dict[str, tuple[tuple[str, str, Problem, int], Any]]
"""By key: the operation, kernel, problem and index of one compilation, and its launcher."""


def _work(problems: Iterable[tuple[str, Problem]], platform: Platform) -> tuple[Work, int]:
    """Every kernel to compile, each once, and the largest workspace."""
    found: Work = {}
    workspace = 0
    for operation, problem in problems:
        for kernel in kernels_for(problem, platform, operation):
            launcher = kernel.launcher_for(problem, platform)
            if isinstance(launcher, CompilingLauncher):
                for number, (key, _) in enumerate(launcher.prepare(None)):
                    found.setdefault(key, ((operation, kernel.name, problem, number), launcher))
                workspace = max(workspace, launcher.workspace_bytes)
    return found, workspace


def _load(work: Work, device: torch.device) -> None:
    """Loads every kernel, and watches for others."""
    with torch.cuda.device(device):
        for launcher in {id(launcher): launcher for _, launcher in work.values()}.values():
            for _, load in launcher.prepare(device.index):
                load()
    _watch_for_others()


def _created(folder: str) -> str:
    """The folder, which is there afterwards: workers need it."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ArgumentError("directory", repr(folder), f"a folder that can be created ({error.strerror})") from None
    if not os.access(folder, os.W_OK):
        raise ArgumentError("directory", repr(folder), "a folder that can be written to")
    return folder


@contextmanager
def _progress_of(progress: bool | Callable[[int, int], None] | None, title: str) -> Iterator[Callable[[int, int], None]]:
    """The function that is told how many kernels are compiled: the caller's, or one that draws a bar."""
    if progress is not None and not isinstance(progress, bool):
        yield progress
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=progress is False or not console.is_terminal) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _compile(work: Work, platform: Platform, folder: str | None, progress: bool | Callable[[int, int], None] | None) -> None:
    """Compiles in parallel. Each worker is a subprocess, because the compiler holds the interpreter lock and may abort."""
    if not work:
        return
    workers = max(1, min(len(work), os.cpu_count() or 1))
    before = active_children()
    with (
        _progress_of(progress, f"compiling for {platform.arch}") as tell,
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
    ):
        try:
            tell(0, len(work))
            with interrupts.held(), _without_main_module():
                running = [pool.submit(compile_one, what, platform, folder) for what, _ in work.values()]
            for count, done in enumerate(as_completed(running), start=1):
                done.result()
                tell(count, len(work))
        except BaseException:
            # The results of the others are not needed, and leaving the `with` statement would wait for them.
            pool.shutdown(wait=False, cancel_futures=True)
            started = set(active_children()) - set(before)
            for worker in started:
                worker.terminate()
            for worker in started:
                worker.join()
            raise


@contextmanager
def _without_main_module() -> Iterator[None]:
    """A context in which started workers do not import the caller's main module. They need nothing of it, and a script without
    `if __name__ == "__main__"` would run again in every worker."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def compile_one(what: tuple[str, str, Problem, int], platform: Platform, folder: str | None) -> None:
    """Compiles one kernel into Triton's cache or into `folder`; runs in a worker."""
    operation, name, problem, number = what
    (kernel,) = (kernel for kernel in kernels_for(problem, platform, operation) if kernel.name == name)
    compilations: list[tuple[str, Callable[[], None]]] = list(_launcher(kernel, problem, platform).prepare(None))
    with _cache_directory(folder):
        compilations[number][1]()


def _launcher(kernel: Kernel, problem: Problem, platform: Platform) -> CompilingLauncher:
    launcher = kernel.launcher_for(problem, platform)
    assert isinstance(launcher, CompilingLauncher)
    return launcher


@contextmanager
def _cache_directory(directory: str | None) -> Iterator[None]:
    """A context in which Triton's compile cache is another folder."""
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
    from quire.kernels.triton.host.program import compile_hooks

    if _warn not in compile_hooks:
        compile_hooks.append(_warn)


def _warn(problem: Problem, kernel: str) -> None:
    if problem not in _warned:
        _warned.add(problem)
        warnings.warn(
            f"quire: a call compiles {kernel} at run time: quire.prepare did not cover {problem}", RuntimeWarning, stacklevel=2
        )
