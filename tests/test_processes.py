"""What crosses between processes: batches, options, caches and errors; and a scheduler with two workers."""

import copy
import multiprocessing
import pickle

import pytest
import torch

import quire
from quire.contract.rule import Violation
from quire.kernels.native.library import FILE

PAGES, SIZE = 16, 4
STEPS = ((3, 5), (1, 1), (1, 2))


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(3, sum(STEPS[step]), 1, 8, generator=generator)


def cache_of(pool):
    return quire.KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=torch.float32)


def work(pipe):
    """Runs the batches that arrive on a cache that arrived as its description; an error is sent back."""
    torch.set_num_threads(1)
    cache = pickle.loads(pipe.recv())
    while (message := pipe.recv()) is not None:
        batch, (q, k, v) = pickle.loads(message)
        try:
            answer = quire.step(torch.tensor(q), torch.tensor(k), torch.tensor(v), cache, batch).tolist()
        except quire.QuireError as error:
            answer = error
        pipe.send_bytes(pickle.dumps(answer))


def test_a_scheduler_and_two_workers():
    pool = quire.PagePool(PAGES, SIZE)
    cache, sequences = cache_of(pool), [pool.sequence(), pool.sequence()]
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for _ in range(2):
        mine, theirs = context.Pipe()
        workers.append(context.Process(target=work, args=(theirs,), daemon=True))
        workers[-1].start()
        mine.send(pickle.dumps(cache))
        pipes.append(mine)
    for step, counts in enumerate(STEPS):
        q, k, v = tokens(step)
        if step == 2:
            sequences[1] = pool.fork(sequences[0])
        batch = pool.step(dict(zip(sequences, counts)))
        for pipe in pipes:
            pipe.send(pickle.dumps((batch, (q.tolist(), k.tolist(), v.tolist()))))
        want = quire.step(q, k, v, cache, batch).tolist()
        assert [pickle.loads(pipe.recv_bytes()) for pipe in pipes] == [want, want]
    for pipe in pipes:
        pipe.send(pickle.dumps((batch, (q.tolist(), k[:1].tolist(), v.tolist()))))
        error = pickle.loads(pipe.recv_bytes())
        assert isinstance(error, quire.ContractError) and error.violations
        pipe.send(None)
    for worker in workers:
        worker.join(600)
        assert worker.exitcode == 0


ERRORS = {
    "argument": quire.ArgumentError("pages", 3, "more"),
    "argument-object": quire.ArgumentError("pages", lambda: 3, "more"),
    "contract": quire.ContractError("attend", [Violation("table", "page_table", "a", "b", seq=1, picture="^")]),
    "kernel": quire.KernelError("none"),
    "pages": quire.OutOfPages(3, 2, 4),
    "stale": quire.StaleBatch(1, 2),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))], ids=["deepcopy", "pickle"])
def test_errors(error, copied):
    got = copied(error)
    assert type(got) is type(error) and str(got) == str(error) and got.args == error.args
    plain = {name: value for name, value in vars(error).items() if not callable(value)}
    assert plain.items() <= vars(got).items() or error is ERRORS["argument-object"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))], ids=["deepcopy", "pickle"])
def test_options_and_batches(copied):
    options = quire.Options(window=4, sinks=torch.ones(2))
    fields = set(vars(quire.Options(sinks=torch.ones(2))))
    assert options.traits is options.traits and set(vars(options)) > fields
    assert repr(copied(options)) == repr(options) and torch.equal(copied(options).sinks, options.sinks)
    assert set(vars(copied(options))) == fields, "what was derived belongs to this process"
    pool = quire.PagePool(PAGES, SIZE)
    a = pool.sequence()
    batch = pool.step({a: 6})
    assert batch.positions.tolist() == list(range(6))
    got = copied(batch)
    pool.step({a: 3})
    got.check_current()
    for name in ("page_table", "kv_lens", "q_starts", "slots", "positions"):
        assert getattr(got, name).data_ptr() % 16 == 0
    assert (got.page_table.tolist(), got.kv_lens.tolist(), got.q_starts.tolist()) == ([[0, 1]], [6], [0, 6])
    assert (got.slots.tolist(), got.given_slots, got.max_kv_len, got.step_id) == (list(range(6)), None, 6, batch.step_id)
    assert got.sequences == ((a.id, 6, [(0, a.id)]),) and b"PagePool" not in pickle.dumps(got)


@pytest.mark.parametrize("layout", ["nhd", "vllm_x", "vllm_joint", "aiter"])
def test_a_cache_is_pickled_as_its_description(layout):
    pool = quire.PagePool(8, 16)
    scale = torch.tensor([0.5, 2.0])
    cache = quire.KVCache.allocate(
        pool, kv_heads=2, head_dim=32, layout=layout, dtype=torch.uint8, format="e4m3fn", k_scale=scale, v_scale=0.25, ledger=True
    )
    cache.k.fill_(7)
    got = pickle.loads(pickle.dumps(cache))
    assert repr(got) == repr(cache) and got.k_view.shape == cache.k_view.shape and got.v_view.shape == cache.v_view.shape
    assert got.pool is None and got.ledger is not None and not got.k.any()
    assert torch.equal(got.k_scale, scale) and float(got.v_scale) == 0.25
    same = copy.deepcopy(cache)
    assert torch.equal(same.k, cache.k) and same.k.data_ptr() != cache.k.data_ptr() and same.pool is not pool


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))], ids=["deepcopy", "pickle"])
def test_memos_with_addresses_are_not_copied(copied):
    """What a batch and a cache keep about calls holds ids and addresses of this process."""
    pool = quire.PagePool(PAGES, SIZE)
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=16, dtype=torch.float32)
    batch = pool.step({pool.sequence(): 6})
    k = torch.ones(6, 2, 16)
    want = quire.step(k, k, k, cache, batch)
    assert batch.validated is not None and cache.storage is cache.storage
    assert cache.packed is not None or not FILE.exists()
    other_batch, other = copied(batch), copied(cache)
    assert other_batch.validated is None and other.packed is None and "storage" not in vars(other)
    other.k.zero_()
    other_batch.page_table.fill_(PAGES)
    with pytest.raises(quire.ContractError, match="page_table"):
        quire.attend(k, other, other_batch)
    other_batch = copied(batch)
    assert torch.equal(quire.step(k, k, k, other, other_batch), want) and torch.equal(other.k, cache.k)
