"""A few small calls that touch every kernel, for compute-sanitizer: it is slow, and sees what results do not show.

Run by `run.py`; by hand: PYTHONPATH=src:tests compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import quire
from quire.kernels.triton.host.constants import dot_type
from support.launched import problem_of
from support.scenario import TYPES, build

ROWS: dict[str, Any] = {"q_lens": [1, 20, 0, 1], "kv_lens": [400, 37, 9, 18], "padding": 1}
BF16: dict[str, Any] = {"format": "bf16", "q_dtype": "bf16", "head_dim": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "decode": ("triton-decode", {**ROWS, **BF16}),
    "mixed": ("triton-mixed", {**ROWS, **BF16}),
    "mixed-context-window": ("triton-mixed", {**ROWS, **BF16, "form": "context", "window": 30}),
    "decode-fp8-by-token": ("triton-decode", {**ROWS, "format": "e4m3fn", "scales": "token", "q_dtype": "bf16", "head_dim": 24}),
    "mixed-fp8": ("triton-mixed", {**ROWS, "format": "e4m3fn", "q_dtype": "bf16", "head_dim": 80, "layout": "vllm_x"}),
    "hopper": ("gluon-mixed", {**ROWS, **BF16}),
    "hopper-bytes": ("gluon-mixed-bytes", {**ROWS, "format": "e4m3fn", "q_dtype": "bf16", "head_dim": 80}),
    "hopper-spans": ("gluon-mixed", {**ROWS, **BF16, "spans": "images"}),
    "hopper-shard": ("gluon-mixed", {**ROWS, **BF16, "shard": (1, 2, 3), "form": "context"}),
    "tree-fp32": ("triton-mixed", {**ROWS, "mask": True, "page_size": 5}),
}
"""Work of the first row is shared out: `combine` runs too."""


def run_case(name: str) -> None:
    kernel, case = CASES[name]
    s = build(60, **case, device="cuda")
    s.batch.max_q_len = 16
    out, lse = quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, lse=True, kernel=kernel)
    factors = TYPES[dot_type(problem_of(s))[0]]
    # Compared at home: every kernel of torch that the tool must look at costs it a second.
    known = {part: getattr(s, part).cpu() for part in ("expected", "expected_lse", "weighted", "honest")}
    replace(s, **known).check(out.cpu(), lse.cpu(), factors=factors)


def run_write() -> None:
    """Writes, into the very last slot too."""
    for scales in ("token", None):
        pool = quire.PagePool(3, 16, device="cuda")
        cache = quire.KVCache.allocate(pool, kv_heads=3, head_dim=24, dtype=torch.float8_e4m3fn, scales=scales)
        batch = pool.step({pool.sequence(): 31, pool.sequence(): 16})
        k = torch.randn(48, 3, 24).bfloat16().to("cuda")
        quire.write(k, k, cache, batch, kernel="triton")
        batch.slots = torch.arange(47, 0, -1).to("cuda")
        quire.write(k[:47], k[:47], cache, batch, kernel="triton")
        torch.cuda.synchronize()


def main() -> None:
    for name in CASES:
        run_case(name)
    run_write()
    print(f"sanitize: {len(CASES) + 1} cases right", flush=True)


if __name__ == "__main__":
    main()
