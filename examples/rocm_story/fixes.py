"""Each proposed fix, applied to the call, and the test's own comparison over the row that failed."""

from __future__ import annotations

from typing import Any

import torch

from rocm_story.batch import TestBatch, mismatched
from rocm_story.mixed_operator import CallArguments, mixed_operator
from rocm_story.results import Fix

NOT_WRITTEN = "write the row: query_start_loc is still int64"
TOKEN_MISSING = "complete the cache: with values of ordinary size the row would still lack its token"

IN_THE_TEST = (
    (
        "001",
        "cache_len = seq_len for decoding sequences",
        {"token_in_cache": True},
        "give the decode kernel the cache that its contract requires, as production code does",
        NOT_WRITTEN,
    ),
    (
        "002 option 1",
        "copy the query token into the cache after filling it",
        {"token_in_cache": True},
        "do what 001 does, in another place",
        NOT_WRITTEN,
    ),
    (
        "002 option 2",
        "let the kernel use context lengths for decoding sequences",
        {"length": "contexts"},
        "agree with the test's cache",
        f"{NOT_WRITTEN}. In production, where the token is in the cache, the token would no longer attend to itself",
    ),
    ("002 option 3", "document and skip", None, "make the suite pass", "fix anything: every caller with int64 gets a stale row"),
    (
        "003",
        "dtype=torch.int everywhere, skip e5m2, cache_len = seq_len for decoding sequences",
        {"token_in_cache": True},
        "end the first two failures, and complete the cache",
        f"{NOT_WRITTEN}, since torch.cumsum of int32 is int64; the four failing tests still fail",
    ),
    (
        "004 option 1",
        "dtype=torch.int in the test",
        {},
        "replace the first failure, whose message is correct, by the third, which has no message",
        NOT_WRITTEN,
    ),
)
"""Source, proposal, what it changes of the call (None: the test is skipped), its effect, its limitation."""


def fixes(batch: TestBatch, memory: torch.Tensor) -> list[Fix]:
    expected = batch.expected[batch.decode_row]
    int32 = batch.q_starts(torch.int32).int()
    in_the_operator = (
        (
            "004 option 2",
            "convert block_tables, seq_lens and query_start_loc in the wrapper",
            {"starts": int32},
            "fix it for every caller: the only proposal that names query_start_loc in the operator",
            TOKEN_MISSING,
        ),
        (
            "004 option 3",
            "let the kernel accept int64",
            {"reads_own_type": True},
            "fix it, if query_start_loc is among the tensors that it reads in their own type",
            TOKEN_MISSING,
        ),
        (
            "vLLM pull request 28905",
            "torch.cumsum(...).to(torch.int32)",
            {"starts": int32},
            "fix the test",
            "protect other callers: the kernel still reads the bytes as int32 without a check",
        ),
    )

    def remaining(change: dict[str, Any] | None) -> int | None:
        if change is None:
            return None
        return mismatched(mixed_operator(batch, CallArguments(**change), memory)[batch.decode_row], expected)

    proposals = (*IN_THE_TEST, *in_the_operator)
    return [Fix(source, proposal, remaining(change), effect, limit) for source, proposal, change, effect, limit in proposals]
