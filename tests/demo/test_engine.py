"""The demo's engine: mixed batches, shared prefixes, and tokens that do not depend on which requests waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest

import quire
from quire.demo.engine import CHUNK, MOST_TOKENS, DemoEngine


def test_every_request_generates_its_tokens(finished: DemoEngine) -> None:
    assert [len(request.made) for request in finished.requests] == [request.wanted for request in finished.requests]
    assert {request.state for request in (finished.prefix, *finished.requests)} == {"done"}


def test_every_page_is_released(finished: DemoEngine) -> None:
    assert finished.pool.free_pages == finished.pool.pages
    assert finished.pool.sequences == ()


def test_prefill_and_decode_share_calls(finished: DemoEngine) -> None:
    lengths = defaultdict(list)
    for record in finished.records:
        if record.layer == 0:
            lengths[record.step].append(record.q.shape[0])
    assert any(min(of_step) == 1 < max(of_step) for of_step in lengths.values())
    assert max(max(of_step) for of_step in lengths.values()) <= CHUNK
    assert max(sum(of_step) for of_step in lengths.values()) <= MOST_TOKENS


def test_a_long_prompt_is_split_into_chunks(finished: DemoEngine) -> None:
    long = max(finished.requests, key=lambda request: len(request.prompt))
    first, second, *_ = [r.q.shape[0] for r in finished.records if r.request is long and r.layer == 0]
    assert first == CHUNK and second > 1


def test_the_prefix_is_computed_once(finished: DemoEngine) -> None:
    prefix = [record for record in finished.records if record.request is finished.prefix and record.layer == 0]
    assert sum(record.q.shape[0] for record in prefix) == len(finished.prefix.prompt)
    starts = {record.kv_len - record.q.shape[0] for record in finished.records if record.request is not finished.prefix}
    assert min(starts) == len(finished.prefix.prompt)


def test_a_shared_page_is_copied_before_it_is_written(finished: DemoEngine) -> None:
    assert len(finished.prefix.prompt) % finished.pool.page_size  # its last page is not full
    begun = {(record.request, record.dense) for record in finished.records if record.request is not finished.prefix}
    assert finished.copies == len(begun)


def test_tokens_do_not_depend_on_the_pool(finished: DemoEngine, run: Callable[..., DemoEngine]) -> None:
    roomy = run(4, pages=200)
    assert finished.waits > 0 == roomy.waits
    assert [request.tokens for request in finished.requests] == [request.tokens for request in roomy.requests]


def test_a_pool_too_small_for_one_request_raises(run: Callable[..., DemoEngine]) -> None:
    with pytest.raises(quire.OutOfPages, match=r"needs \d+ more, \d of 7 are free"):
        run(1, pages=7)


def test_the_same_seed_makes_the_same_run(finished: DemoEngine, run: Callable[..., DemoEngine]) -> None:
    again = run(4, pages=22)
    assert again.events == finished.events
    assert [request.text for request in again.requests] == [request.text for request in finished.requests]
    assert run(4, pages=22, seed=4).events != finished.events
