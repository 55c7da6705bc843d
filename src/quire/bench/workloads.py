"""What is measured: batches of sequences, as data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from quire.batch import Batch
from quire.cache.format import FORMATS
from quire.cache.kv_cache import KVCache


@dataclass(frozen=True)
class Workload:
    """A batch by its lengths: (new tokens, context) of each sequence. Data and page tables are random, the same for every peer."""

    name: str
    rows: tuple[tuple[int, int], ...]
    dtype: str = "bf16"
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    @property
    def label(self) -> str:
        return f"{self.name}, {self.dtype}"

    @property
    def bytes(self) -> int:
        """What must be read and written once: keys, values, queries, outputs."""
        keys = sum(new + context for new, context in self.rows) * self.kv_heads * 2
        queries = sum(new for new, _ in self.rows) * self.q_heads * 2
        return (keys + queries) * self.head_dim * FORMATS[self.dtype].itemsize

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two products over the keys that causality leaves."""
        pairs = sum(new * context + new * (new + 1) // 2 for new, context in self.rows)
        return 4 * pairs * self.q_heads * self.head_dim

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        fields = json.loads(text)
        return cls(**fields | {"rows": tuple((new, context) for new, context in fields["rows"])})

    def build(self, folder: str | None = None) -> tuple[torch.Tensor, KVCache, Batch]:
        """q, a full cache and the batch, the same in every process. With a folder, K and V are files in it, mapped by all who
        build there: then contestants read the very same memory, and a slow bank of it is slow for everyone."""
        g = torch.Generator().manual_seed(0)
        dtype = FORMATS[self.dtype].dtype
        lens = [new + context for new, context in self.rows]
        columns = [-(-n // self.page_size) for n in lens]
        ids = torch.randperm(sum(columns), generator=g).int().split(columns)
        table = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1)
        shape = (sum(columns), self.page_size, self.kv_heads, self.head_dim)
        k, v = (_pages(shape, dtype, g, None if folder is None else Path(folder, name)) for name in "kv")
        starts = torch.tensor([0, *(new for new, _ in self.rows)]).cumsum(0).int()
        q = torch.randn(int(starts[-1]), self.q_heads, self.head_dim, generator=g).to(dtype)
        longest = max(new for new, _ in self.rows)
        batch = Batch(table, torch.tensor(lens).int(), starts, max_q_len=longest, max_kv_len=max(lens))
        return q, KVCache.wrap(k, v, layout="nhd"), batch


def _pages(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator, file: Path | None) -> torch.Tensor:
    """Random pages. Fifths of small whole numbers are as good as normal numbers here, and made in a tenth of the time."""
    pages = torch.randint(-8, 9, shape, generator=g, dtype=torch.int8)
    if file is None:
        return pages.to(dtype).div_(5)
    made = file.exists()
    mapped = torch.from_file(str(file), shared=True, size=pages.numel(), dtype=dtype).view(shape)
    return mapped if made else mapped.copy_(pages).div_(5)


def _ragged(count: int, most: int) -> tuple[tuple[int, int], ...]:
    """Decoding sequences of all lengths up to `most`, repeatable."""
    return tuple((1, 1 + (i * 7919) % most) for i in range(count))


_SHAPES = (
    Workload("decode 16 x 4096", ((1, 4095),) * 16),
    Workload("decode 1 x 32768", ((1, 32767),)),
    Workload("decode 64 ragged to 1024", _ragged(64, 1024)),
    Workload("prefill 512 over 512", ((512, 512),)),
    Workload("prefill 512 over 4096", ((512, 4096),)),
    Workload("mixed: 256 over 1024 + 15 decodes at 2048", ((256, 1024), *((1, 2047),) * 15)),
)

CPU_WORKLOADS: tuple[Workload, ...] = tuple(replace(shape, dtype=dtype) for dtype in ("fp32", "bf16") for shape in _SHAPES)
