"""`torch.set_default_device`: every tensor that the library makes says where it lies, so calls go on working in host memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import quire
from quire.cli.demo import one_thread
from quire.conformance.cases.case import Case
from quire.conformance.faults.injected import injected
from quire.conformance.recording.record import load
from quire.conformance.recording.replay import here, then
from quire.conformance.runner.find_target import find
from quire.conformance.runner.run import conform
from quire.demo import requests
from quire.demo.engine import DemoEngine
from quire.demo.model import DemoModel
from quire.demo.verification import Verification, outputs, tokens
from quire.kernels.native import library
from support.scenario import Scenario, build

SRC = Path(quire.__file__).parent
MIXED: dict[str, Any] = {"q_lens": [1, 4, 0, 2], "kv_lens": [20, 4, 9, 37], "padding": 1}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "context form": {"form": "context"},
    "tree": {"mask": True, "window": 9, "alibi": True},
    "token scales": {"format": "int8", "scales": "token"},
    "fp8 queries": {"q_dtype": "e4m3fn", "q_scale": 0.05, "format": "e4m3fn"},
    "causal by sequence": {"causal": "mixed", "sinks": True, "softcap": 20.0},
}
KERNELS = ["torch", *(["native"] if library.FILE.exists() else [])]


@pytest.fixture
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def scenario(**features: Any) -> Scenario:
    with torch.device("cpu"):
        return build(60, **MIXED, **features)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CALLS)
def test_attend(name: str, kernel: str) -> None:
    s = scenario(**CALLS[name])
    out, lse = quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, lse=True, kernel=kernel)
    assert quire.check(s.q, s.cache, s.batch, s.options, new=s.new) == []
    assert quire.explain(s.q, s.cache, s.batch, s.options, new=s.new).chosen is not None
    merged, _ = quire.merge([out.float(), out.float()], [lse, lse])
    assert merged.device.type == "cpu"
    with torch.device("cpu"):
        s.check(out, lse, factors=out.dtype)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", ["table", "lengths", "table of a tree", "pages of a tree"])
def test_a_bad_call_is_refused_by_its_rule(name: str) -> None:
    s = scenario(**CALLS["tree" if "tree" in name else "plain"])
    if name == "lengths":
        s.batch.kv_lens[1] = 3
    elif name == "pages of a tree":
        s.batch.page_table[3] = 900
    else:
        s.batch.page_table = s.batch.page_table[:, :1]
    with pytest.raises(quire.ContractError):
        quire.attend(s.q, s.cache, s.batch, s.options)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_pool_and_its_caches(dtype: torch.dtype, ledger: bool, tmp_path: Path) -> None:
    pool = quire.PagePool(pages=32, page_size=4)
    scales: Any = {"scales": "token"} if dtype is torch.int8 else {}
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=16, dtype=dtype, ledger=ledger, **scales)
    q, k, v = torch.randn(12, 8, 16, device="cpu").split((4, 2, 2), 1)
    first, second = pool.sequence(), pool.sequence()
    batch = pool.step({first: 7, second: 5})
    quire.step(q, k, v, cache, batch)
    assert quire.check(q, cache, batch) == []
    third = pool.fork(first)
    batch = pool.step({third: 1, second: 2})
    with quire.record(tmp_path / "call"), quire.checked(results=True):
        out = quire.step(q[:3], k[:3], v[:3], cache, batch)
    assert out.device.type == "cpu"
    (recorded,) = load(tmp_path / "call")
    assert (then(recorded).status, here(recorded).status) == ("correct", "correct")
    if ledger:  # written twice: the rule is of the ledger
        with pytest.raises(quire.ContractError, match="ownership"):
            quire.write(k[:3], v[:3], cache, batch)
    slots = batch.slots_of_tokens(3, 4)
    assert slots.device.type == "cpu"
    pool.free(first)


@pytest.mark.usefixtures("elsewhere")
def test_batches() -> None:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cpu")

    held = quire.Batch.allocate(seqs=2, pages_per_seq=3, tokens=4)
    table, lens, starts = torch.zeros(1, 2, dtype=torch.int32, device="cpu"), ints(5), ints(0, 1)
    held.fill(table, lens, starts, ints(4))
    made = quire.Batch.from_flashinfer(kv_indptr=ints(0, 2), kv_indices=ints(1, 0), kv_last_page_len=ints(1), page_size=4)
    other = quire.Batch.from_flash_attn(block_table=table, cache_seqlens=lens, seqlen_q=1, appends=True)
    for batch in (held, made, other):
        assert {t.device.type for t in (batch.page_table, batch.kv_lens, batch.q_starts)} == {"cpu"}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("fault", ["", "window-left-off", "sink-missing"])
def test_the_kit(fault: str) -> None:
    case = Case("small", q_lens=(1, 5), kv_lens=(20, 33), kv_heads=1, group=2, head_dim=16, window=(8, 0), sinks=True)
    report = conform(injected(fault) if fault else find("torch"), [case])
    (result,) = report.results
    assert result.status == ("wrong" if fault else "correct"), result.reason
    assert [fault in finding.equivalent_faults for finding in result.findings] == ([True] if fault else [])


@pytest.mark.usefixtures("elsewhere")
def test_the_demo() -> None:
    engine = DemoEngine(DemoModel.make(1), *requests.make(2, 1), 22)
    with one_thread():
        for _ in zip(range(4), engine.run()):
            pass
        assert Verification.of(outputs(engine)).holds and Verification.of(tokens(engine)).holds


CONSTRUCTORS = (
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip


def nowhere(source: str) -> list[str]:
    """The calls that leave the device to torch."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and any(ast.unparse(node.func) == f"torch.{name}" for name in CONSTRUCTORS)
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]


# The kit computes within `on_host()`, which the tests above enter.
FILES = [path for path in sorted(SRC.rglob("*.py")) if "conformance" not in path.relative_to(SRC).parts]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_every_tensor_says_where_it_lies(path: Path) -> None:
    assert nowhere(path.read_text()) == []


def test_the_search_finds() -> None:
    assert nowhere("torch.arange(3)") and not nowhere("torch.arange(3, device=x.device)")
