"""Decode context parallelism: the pages of a sequence are distributed over ranks, which attend to their own pages and combine."""

from __future__ import annotations

from typing import Any

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.options import Options


def attend_sharded(impl: Any, q: torch.Tensor, cache: KVCache, batch: Batch, options: Options, out: torch.Tensor) -> None:
    """Attends with every rank's queries to this rank's pages, then combines the results of all ranks."""
    raise NotImplementedError
