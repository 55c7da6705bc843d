"""Checks on several ranks: processes with gloo, which start once and run all checks of a module."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 240.0
"""Seconds until processes that do not end are ended: a hang is a failure, a slow machine is not."""
STOPS = "is stopped"
"""The last message of a process that will not end by itself."""


def poison_new_memory() -> None:
    """As tests/conftest.py does: memory that quire allocates holds NaN until it is written."""
    make = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("quire") and tensor.dtype.itemsize <= 4:
            # All bits set: NaN in every floating-point type but e4m3fnuz, also in messages of bytes.
            tensor.view(torch.uint8).fill_(0xFF)
        return tensor

    torch.empty = empty


def run_rank(module: str, rank: int, ranks: int, folder: str, pipe: Any) -> None:
    """Runs the checks of a module on one rank, and sends the result of each: what it returns, or the error. After an error on any
    rank no further check runs, because ranks would no longer be at the same call. At the end LAST runs, if the module has it."""
    torch.set_num_threads(1)
    poison_new_memory()
    # Files, not ports: no two runs can meet.
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    status = dist.FileStore(f"{folder}/status", ranks)
    found = importlib.import_module(module)
    for name, check in found.CHECKS.items():
        begin, failed = time.perf_counter(), False
        try:
            result = check()
        except Exception:
            result, failed = {"error": traceback.format_exc()}, True
        pipe.send((name, result))
        pipe.send((f"{name} seconds", time.perf_counter() - begin))
        status.set(f"{name}/{rank}", "failed" if failed else "passed")
        if any(status.get(f"{name}/{other}") == b"failed" for other in range(ranks)):
            return
    if hasattr(found, "LAST"):
        found.LAST(pipe.send)


def run_ranks(module: str, ranks: int, folder: Path) -> dict[str, Any]:
    """The results of all checks of a module: for each a list, by rank; under "exit" the exit codes of the processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.device_mesh", "quire.distributed", "distributed.layer"])
    pipes, workers = [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe(duplex=False)
        workers.append(context.Process(target=run_rank, args=(module, rank, ranks, str(folder), theirs), daemon=True))
        workers[-1].start()
        theirs.close()
        pipes.append(mine)
    results: dict[str, Any] = {}
    until = time.monotonic() + PATIENCE
    for rank, (pipe, worker) in enumerate(zip(pipes, workers)):
        for name, result in messages(pipe, until):
            results.setdefault(name, [None] * ranks)[rank] = result
            if result == STOPS:
                break
        else:
            worker.join(max(1.0, until - time.monotonic()))
    results["exit"] = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
        worker.join()
    return results


def messages(pipe: Any, until: float) -> Any:
    """What a process sends, until it ends or the time is over."""
    while pipe.poll(max(0.0, until - time.monotonic())):
        try:
            yield pipe.recv()
        except EOFError:
            return
