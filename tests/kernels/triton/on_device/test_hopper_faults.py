"""Faults in the synchronisation of Hopper's kernel, each of which the emulator must report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire.kernels.triton.host.tuning import SMALL_GLUON
from support import interpreter
from support.launched import attend

if not interpreter.ON:
    pytest.skip("a GPU would only hang, or be wrong now and then", allow_module_level=True)

import triton.runtime.interpreter as plain

CASE: dict[str, Any] = {"q_lens": [20, 33], "kv_lens": [75, 70], "head_dim": 64, "kv_heads": 1, "group": 4, "q_dtype": "bf16"}
BOXES: dict[str, Any] = {**CASE, "format": "bf16"}
ROWS: dict[str, Any] = {**BOXES, "page_size": 1}
WIDE: dict[str, Any] = {**ROWS, "head_dim": 192}
"""One slot of queries, not two."""
BYTES: dict[str, Any] = {**CASE, "format": "e4m3fn"}
SPANS: dict[str, Any] = {**BOXES, "spans": [(max(0, i - 40), 75) for i in range(20)] + [(i, 70) for i in range(33)]}
GAPS: dict[str, Any] = {**BOXES, "page_size": 8, "spans": [(0, 4), (70, 75)] * 10 + [(2, 5), (64, 70), (40, 45)] * 11}
SHARD: dict[str, Any] = {**BOXES, "shard": (1, 2, 3), "form": "context"}
REGISTERS: dict[str, Any] = {**BOXES, "head_dim": 36}
"""Heads of a size that cannot be copied asynchronously."""

WAIT = "score = warpgroup_mma_wait(parts(C.V_DIM, C.V_WIDTH, C.BYTES), deps=(scores,))"
RELEASE = "release(buffers.k, now, T.STAGES)"
FENCE = "    fence_async_shared()\n"
FAULTS: dict[str, tuple[dict[str, Any], str, str, str, str]] = {
    "keys are not released": (ROWS, "attend_tiles", RELEASE, "pass", r"deadlock: .*produce waits for parity . of k\.free"),
    "values are not released": (BOXES, "attend_tiles", "release(buffers.v, now - 1, T.STAGES)", "pass", r"deadlock: .*v\.free"),
    "queries are not released": (BOXES, "consume", "release(buffers.q, nth, T.QUEUE)", "pass", r"deadlock: .*q\.free"),
    "one of three does not release queries": (
        BYTES,
        "produce_values",
        "release(buffers.q, nth, T.QUEUE)",
        "pass",
        r"deadlock: .*produce_keys waits for parity . of q\.free",
    ),
    "keys are released before the product": (
        ROWS,
        "attend_tiles",
        f"{WAIT}\n        {RELEASE}",
        f"{RELEASE}\n        {WAIT}",
        r"produce overwrites k\.slots .* while products of consume 0",
    ),
    "the parity of a full slot": (ROWS, "acquire_full", "& 1)", "& 1 ^ 1)", "never written|deadlock"),
    "the parity of a free slot": (ROWS, "acquire_free", " ^ 1)", ")", "deadlock"),
    "another slot is read": (ROWS, "start_accumulate", "tile % T.STAGES", "(tile + 1) % T.STAGES", r"reads v\.slots"),
    "another slot is written": (ROWS, "copy_rows", "slots.index(tile % SLOTS)", "slots.index((tile + 1) % SLOTS)", r"[kv]\.slots"),
    "a slot is not waited for": (BOXES, "copy_boxes", "acquire_free(ring, tile, SLOTS)", "pass", r"overwrites [kv]\.slots"),
    "queries are not waited for": (WIDE, "load_queries", "acquire_free(buffers.q, nth, T.QUEUE)", "pass", r"overwrites q\.slots"),
    "it is published before it is copied": (
        ROWS,
        "copy_rows",
        "publish_when_copied(ring.full.index(tile % SLOTS))",
        "mbarrier.arrive(ring.full.index(tile % SLOTS), count=THREADS)",
        r"reads [kv]\.slots .* while copies of produce may still write it",
    ),
    "it is published before it is stored": (
        REGISTERS,
        "load",
        "        slot = ring.slots.index(tile % T.STAGES)\n",
        "        slot = ring.slots.index(tile % T.STAGES)\n        publish(ring, tile, T.STAGES)\n",
        r"k\.(slots|full)",
    ),
    "one thread arrives for others": (BYTES, "publish", "    barrier()\n", "", r"overwrites raw_k\.slots .* while"),
    "one thread releases what others still read": (ROWS, "release", "    barrier()\n", "", r"overwrites .* while"),
    "no fence before products": (BYTES, "convert", FENCE, "", "without a fence"),
    "no fence before products of queries": (REGISTERS, "load_queries", f"    {FENCE}", "        pass\n", "without a fence"),
    "a product is used too early": (ROWS, "attend_tiles", "deps=(scores,)", "deps=(accumulation[0],)", "not waited for"),
    "too few bytes": (BOXES, "copy_boxes", "T.KEYS * WIDTH *", "T.KEYS // 2 * WIDTH *", "bytes are copied that are not expected"),
    "too many bytes": (BOXES, "copy_boxes", "T.KEYS * WIDTH *", "T.KEYS * 2 * WIDTH *", r"deadlock: .*bytes missing"),
    "too many arrivals": (BOXES, "copy_boxes", "count=THREADS - 1", "count=THREADS", r"128 arrivals at k\.full"),
    "too few arrivals": (BOXES, "copy_boxes", "count=THREADS - 1", "count=THREADS - 2", r"deadlock: .*1 of 128 arrivals"),
    "a barrier that expects too many": (ROWS, "make_ring", "count=READERS", "count=READERS + 1", "deadlock|middle of a phase"),
    "copies are left": (ROWS, "produce", "    async_copy.wait_group(0)\n", "", "has not waited for its copies"),
    "the page of another key": (ROWS, "produce", "store_page_ids(buffers, tile + 1, ids, T)", "pass", "wrong|never written"),
    "a box of another page": (BOXES, "copy_boxes", "(i + j) * T.BOX) // C.PAGE_SIZE", "i * T.BOX) // C.PAGE_SIZE", "wrong"),
    "each half has keys of its own": (SPANS, "unit_of_rows", ", T, C, low, high)", ", T, C)", "wrong|deadlock|middle of a phase"),
    "keys that no query sees": (GAPS, "addresses", "limits[2] < limits[3]", "limits[2] > limits[3]", "wrong|outside"),
    "boxes of keys that no query sees": (GAPS, "copy", "in_boxes &= limits[2] == limits[3]", "pass", "wrong|outside"),
    "new keys of another rank": (SHARD, "addresses", "position_of(batch, key)", "key", "wrong|outside"),
    "a tile is left out": (BOXES, "consume", "some, every, scale", "some + 1, every, scale", r"wrong|reads v\.slots"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(name: str) -> None:
    case, function, old, new, message = FAULTS[name]
    with fault(function, old, new), pytest.raises((AssertionError, plain.InterpreterError), match=f"(?s){message}"):
        run(case)


@pytest.mark.parametrize("case", [BOXES, ROWS, BYTES, REGISTERS], ids=["boxes", "rows", "bytes", "registers"])
def test_without_a_fault_nothing_is_reported(case: dict[str, Any]) -> None:
    run(case)


def run(case: dict[str, Any]) -> None:
    attend("gluon", "cpu", how={"tuning": SMALL_GLUON._replace(long_keys=32)}, **case)


@contextmanager
def fault(function: str, old: str, new: str) -> Iterator[None]:
    """Replaces a part of a function's source, which must be there once."""
    transform = plain.FunctionRewriter._transform_ast
    changed = []

    def transform_changed(self: Any, source: str) -> Any:
        if self.fn.__name__ == function and self.fn.__module__.startswith("quire.kernels.gluon."):
            assert source.count(old) == 1, f"{source.count(old)} times in {function}: {old}"
            changed.append(self.fn)
            source = source.replace(old, new)
        return transform(self, source)

    rewritten = plain.InterpretedFunction.rewritten_fn
    kept = {known: rewritten.pop(known) for known in list(rewritten) if known.__name__ == function}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain.FunctionRewriter, "_transform_ast", transform_changed)
        try:
            yield
        finally:
            assert changed, f"{function} did not run"
            for known in changed:
                del rewritten[known]
            rewritten.update(kept)
