"""Peers get what their own users would give them. Each is played by a stand-in that has its parameters and its conventions and
computes with `quire.attend`: a wrong argument is a wrong result (`support/peer_stand_ins.py`)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import pytest

from quire.bench import peers
from quire.bench.case import build
from quire.bench.cuda_workloads import SETS
from quire.bench.reference_check import BenchReference
from quire.bench.workloads import Workload
from quire.errors import ArgumentError
from support.peer_stand_ins import STAND_INS, PrefillWrapper, flash_attn_varlen_func
from support.small_workloads import small, small_reference

SMALL = Workload("small", ((1, 40), (70, 10), (1, 0)), "bf16", q_heads=4, kv_heads=2, head_dim=64)
DECODE = replace(SMALL, name="decode", sequences=((1, 40), (1, 17), (1, 0)))
WORKLOADS = [
    workload
    for shape in (SMALL, DECODE)
    for workload in (shape, replace(shape, format="e4m3fn"), replace(shape, window=13), replace(shape, dtype="fp16", page_size=32))
]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts modules of these names where Python looks for them, and nothing else of the same packages."""

    def put(modules: dict[str, dict[str, Any]]) -> None:
        for name, members in modules.items():
            parts = name.split(".")
            for i in range(1, len(parts) + 1):
                path = ".".join(parts[:i])
                if not isinstance(sys.modules.get(path), Stand):
                    monkeypatch.setitem(sys.modules, path, Stand(path))
                if i > 1:
                    monkeypatch.setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[path], raising=False)
            for member, value in members.items():
                monkeypatch.setattr(sys.modules[name], member, value, raising=False)

    return put


class Stand(ModuleType):
    """A package without files."""

    __path__: ClassVar[list[str]] = []


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.bench.peers import flashinfer

    monkeypatch.setattr(flashinfer, "WORKSPACE", 1 << 10)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.label)
@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_are_called_as_their_users_call_them(name: str, workload: Workload, stand_ins: Callable[..., None]) -> None:
    stand_ins(STAND_INS)
    found, missing = peers.load([name])
    assert not missing
    case = build(workload)
    bound = found[name](case)
    assert bound is not None
    quantises = name == "fa3" and workload.format
    assert bound.q_format == ("e4m3fn" if quantises else workload.dtype)
    out = bound.run()
    assert out.dtype is case.q.dtype
    result = BenchReference(case).check(out, bound.q_format)
    assert 0 < result.error <= result.budget
    assert out is bound.run(), "the output is given, not allocated"


_OF_VLLM = r"pages of (1|7)$|int4|nvfp4|head_dim \S+/|tree mask|images|selected|batch-invariant|^write"
UNSUPPORTED = {
    "fa3": r"head_dim 512|e5m2|int4|nvfp4|MLA.*(e4m3|fp8_ds)|alibi|tree mask|every second|images|^write",
    "flashinfer": r"^prefill.*head_dim 512|head_dim (80|96)|int4|nvfp4|MLA.*(e4m3|fp8_ds)|^write 8192, bf16(, e4m3fn cache)?$",
    "vllm_unified": _OF_VLLM,
    "vllm_chunked": _OF_VLLM + "|e5m2|softcap|every second",
}
"""Which workloads a peer does not support. It is not bound to them, so that there is no other call in its place."""


@pytest.mark.parametrize("workload", SETS["all"], ids=lambda w: w.label)
@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_of_all_workloads(name: str, workload: Workload, stand_ins: Callable[..., None]) -> None:
    stand_ins(STAND_INS)
    attends = workload.operation == "attend"
    case = small_reference(workload)[0] if attends else build(small(workload))
    bound = peers.load([name])[0][name](case)
    assert (bound is None) == bool(re.search(UNSUPPORTED[name], workload.label))
    if bound is None:
        return
    if not attends:
        assert bound.difference is not None and not (case.cache.k_bytes.any() or case.cache.v_bytes.any())
        bound.run()
        assert bound.difference() == 0
        case.cache.k_bytes.zero_()
        assert bound.difference() > 0
        return
    result = small_reference(workload)[1].check(bound.run(), bound.q_format)
    assert 0 < result.error <= result.budget


@pytest.mark.parametrize("invariant", [False, True])
def test_parts_are_fixed_where_results_must_not_depend_on_the_batch(invariant: bool, stand_ins: Callable[..., None]) -> None:
    given: dict[str, Any] = {}

    class Recorded(PrefillWrapper):
        def plan(self, *args: Any, fixed_split_size: Any = None, **how: Any) -> None:
            given["flashinfer"] = fixed_split_size, self.backend
            super().plan(*args, fixed_split_size=fixed_split_size, **how)

    def recorded(**how: Any) -> Any:
        given["fa3"] = how["num_splits"]
        return flash_attn_varlen_func(**how)

    stand_ins(STAND_INS)
    stand_ins({"flashinfer": {"BatchPrefillWithPagedKVCacheWrapper": Recorded}})
    stand_ins({"vllm.vllm_flash_attn.flash_attn_interface": {"flash_attn_varlen_func": recorded}})
    case = build(replace(SMALL, batch_invariant=invariant))
    for implementation in peers.load(["fa3", "flashinfer"])[0].values():
        bound = implementation(case)
        assert bound is not None
        bound.run()
    assert given == {"fa3": int(invariant), "flashinfer": (128, "fa2") if invariant else (None, "auto")}


@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_of_attention_do_not_write(name: str, stand_ins: Callable[..., None]) -> None:
    stand_ins(STAND_INS)
    assert peers.load([name])[0][name](build(replace(SMALL, operation="write"))) is None


def test_without_names_all_that_can_be_imported(stand_ins: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins({name: STAND_INS[name] for name in STAND_INS if "unified" in name or "interface" in name})
    monkeypatch.setattr(sys.modules["vllm.vllm_flash_attn.flash_attn_interface"], "is_fa_version_supported", lambda version: False)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    found, missing = peers.load()
    assert list(found) == ["vllm_unified"]
    assert missing["fa3"] == "ImportError: no Hopper here"
    assert "chunked_prefill_paged_decode" in missing["vllm_chunked"]
    assert "flashinfer" in missing["flashinfer"]


def test_a_peer_requested_by_name_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ArgumentError, match=r"--peers: given flashinfer, which cannot be imported \(.*flashinfer"):
        peers.load(["flashinfer"])
    with pytest.raises(ArgumentError, match="vllm_chunked, vllm_unified, fa3, flashinfer"):
        peers.load(["fa4"])
    assert peers.load([]) == ({}, {})
