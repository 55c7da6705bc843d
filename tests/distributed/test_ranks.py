"""Tensor parallelism, context parallelism and both give what a single process gives, within the error budget; errors have names;
and when a rank dies the others fail instead of waiting for ever."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from distributed import four_ranks, two_ranks
from distributed.faults import FAULTS
from distributed.ranks import STOPS, run_ranks
from support.once import once


def results(ranks: int, factory: pytest.TempPathFactory) -> dict[str, Any]:
    name = {2: "two_ranks", 4: "four_ranks"}[ranks]

    def work() -> dict[str, Any]:
        folder: Path = factory.mktemp(name)
        return run_ranks(f"distributed.{name}", ranks, folder)

    return once(factory, name, work)


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results(2, tmp_path_factory)


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results(4, tmp_path_factory)


def of_ranks(found: dict[str, Any], name: str) -> list[Any]:
    """The results of a check on every rank; the errors, if there are any."""
    assert name in found, f"not run, because an earlier check failed: {[key for key in found if 'seconds' not in key]}"
    errors = [result["error"] for result in found[name] if isinstance(result, dict) and "error" in result]
    assert not errors, "\n".join(errors)
    return found[name]


def within_budget(found: dict[str, Any], name: str) -> None:
    for rank, ratios in enumerate(of_ranks(found, name)):
        assert ratios is not None, f"rank {rank} ended"
        wrong = {layer: ratio for layer, ratio in ratios.items() if not ratio <= 1}
        assert ratios and not wrong, f"rank {rank}: error over budget {wrong}"


BUDGETED = ("tensor_parallel", "gathered", "divided", "split_heads", "as_on_a_device", "rounded_parts", "shared_prefix", "chunks")


@pytest.mark.parametrize("name", BUDGETED)
def test_two_ranks_equal_a_single_process(two: dict[str, Any], name: str) -> None:
    within_budget(two, name)


@pytest.mark.parametrize("name", [name for name in four_ranks.CHECKS if name != "numbers_of_ranks"])
def test_four_ranks_equal_a_single_process(four: dict[str, Any], name: str) -> None:
    within_budget(four, name)


@pytest.mark.parametrize(
    "name", [n for n in two_ranks.CHECKS if n not in (*BUDGETED, "mismatches", "local_errors", "arguments", "faults")]
)
def test_on_two_ranks(two: dict[str, Any], name: str) -> None:
    assert of_ranks(two, name) == [None, None]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checks_see(two: dict[str, Any], fault: str) -> None:
    ratios = [found[fault] for found in of_ranks(two, "faults")]
    assert max(ratios) > 1, f"planted and not seen: {ratios}"


MISMATCHES = {
    "window": "ContextParallel.attend: options.window differs between the ranks of '",
    "sinks": "options.sinks differs",
    "out_scale": "options.out_scale differs",
    "kv_lens": "kv_lens differs",
    "tokens": "tokens differs",
    "tokens of own heads": "tokens differs",
    "type": "out_type differs",
    "interleave": "ContextParallel: interleave differs",
    "kv_heads": "TensorParallel: kv_heads differs",
    "function": "the function differs",
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_arguments_that_differ_between_ranks_are_named(two: dict[str, Any], name: str) -> None:
    for messages in of_ranks(two, "mismatches"):
        assert MISMATCHES[name] in messages[name]
    assert "given 4 here, 5 at rank 1" in of_ranks(two, "mismatches")[0]["window"]


REFUSED = {
    "heads": "group: given 2 ranks; allowed: 1, 3, 9 ranks for 9 q_heads and 3 kv_heads",
    "group of heads": "q_heads: given 8; allowed: a multiple of the 3 kv_heads",
    "slopes": "options.alibi: given float32[4] on cpu; allowed: [8], one entry for each query head of the whole model",
    "scales": "scale: given float32[1] on cpu; allowed: a number, [], [2] or [pages, page_size, 2]",
    "axis": "tensor: given float32[2, 5, 16] on cpu, dim=1; allowed: an axis of 8 q_heads",
    "mesh": 'group: given a DeviceMesh of shape (1, 2); allowed: one dimension of it: mesh["tp"] or mesh["cp"]',
    "foreign mesh": "group: given a DeviceMesh without this rank",
    "group": "group: given 'cp'; allowed: a torch.distributed.ProcessGroup",
    "timeout": "timeout: given 0; allowed: seconds above 0",
    "interleave": "interleave: given 0; allowed: an int of 1 or more",
    "dtype": "dtype: given torch.int8; allowed: torch.float32",
    "chunks": "chunks: given 0; allowed: an int of 1 or more",
    "no shard": "batch: given no shard; allowed: shard=(",
    "other shard": "batch: given shard=(0, 4, 4); allowed: shard=(",
    "out": "out: given float32[2, 4, 8] on cpu; allowed: [tokens, q_heads, v_head_dim] = [2, 4, 16]",
    "fp8 out": "out: given float8_e4m3fn[2, 4, 16] on cpu; allowed: float32, float16 or bfloat16; fp8 with out_scale",
    "lse": "lse: given float64[2, 4] on cpu; allowed: True, False or float32[2, 4]",
    "context form": "new: given",
    "device": "q: given float32[2, 4, 16] on meta; allowed: a tensor on a device of the group's backend, cpu:gloo",
    "weight": "weight: given float32[5, 7] on cpu for out float32[2, 4, 16] on cpu; allowed: [width, q_heads * v_head_dim]",
    "no weight": "weight: given nothing (None); allowed: a tensor",
    "no out": "out: given nothing (None); allowed: a tensor",
    "type of weight": "weight: given bfloat16[5, 64] on cpu; allowed: a tensor",
    "no options": "options: given nothing (None); allowed: the Options of the whole model",
    "no tensor": "x: given [1]; allowed: a tensor",
    "scale": "scale: given 'x'; allowed: a number, [], [2]",
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_are_refused(two: dict[str, Any], name: str) -> None:
    for messages in of_ranks(two, "arguments"):
        assert REFUSED[name] in messages[name]


def test_an_error_on_one_rank_reaches_the_others(two: dict[str, Any]) -> None:
    for rank, messages in enumerate(of_ranks(two, "local_errors")):
        assert len(messages) == 10
        for name, message in messages.items():
            if name.endswith(str(rank)):
                assert "page_table" in message and "99" in message
            else:
                assert f"ContextParallel.attend: rank {1 - rank} of the group" in message


def test_errors_have_the_numbers_of_ranks_among_all(four: dict[str, Any]) -> None:
    for rank, (differs, differing, failed, failing) in enumerate(of_ranks(four, "numbers_of_ranks")):
        other = rank ^ 1
        assert differing == [other] and f"{4 + other % 2} at rank {other}" in differs
        if rank % 2 == 0:
            assert failing == [other] and f"rank {other} of the group 'cp' of ranks {rank}, {other}" in failed


def test_a_group_without_this_rank_is_refused(two: dict[str, Any]) -> None:
    assert "group: given a process group without this rank, 1" in of_ranks(two, "arguments")[1]["foreign group"]


def test_processes_end(two: dict[str, Any]) -> None:
    assert two["exit"] == [0, 0]


def test_a_dead_rank_fails_the_others_and_they_end(four: dict[str, Any]) -> None:
    """Rank 2 was killed, its partner is 0; rank 3 was stopped, its partner is 1."""
    killed, stopped, _, state = of_ranks(four, "last")
    assert state == STOPS
    for seen in (killed, stopped):
        assert [collective for _, collective, _ in seen] == ["all_gather", "all_gather", "all_reduce"], "every call after it failed"
        for message, collective, timeout in seen:
            assert timeout == four_ranks.SHORT
            assert message.startswith(f"{collective}: failed after") and "in the group 'end' of ranks" in message
        assert seen[1][0] == seen[0][0], "a group stays unusable"
    assert "of ranks 0, 2 (this is rank 0, backend gloo)" in killed[0][0]
    assert "Timed out" in stopped[0][0] and "(timeout 3 s)" in stopped[0][0] and "Timed out" not in killed[0][0]
    assert four["exit"][:3] == [0, 0, -signal.SIGKILL], "the partners ended by themselves"
