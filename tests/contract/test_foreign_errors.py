"""Whatever is passed for an argument, a public function takes it or refuses it with an error of Quire's that names the argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import quire
from compat.calls import in_cache, kernel_2d, rocm, unified
from compat.case import build as compat_case
from quire import Batch, KVCache, Options, PagePool
from quire.compat import vllm
from support.scenario import build

# What no argument of these functions is for: each gets all of them. Some are legal for some arguments; then the call succeeds.
VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "an int": lambda: 7,
    "a negative int": lambda: -3,
    "an int beyond 64 bits": lambda: 2**70,
    "a float": lambda: 1.5,
    "a NaN": lambda: float("nan"),
    "a bool": lambda: True,
    "a string": lambda: "text",
    "a list": lambda: [1, 2],
    "a tuple": lambda: (1, "2"),
    "a dict": lambda: {"a": 1},
    "an object": object,
    "a numpy array": lambda: numpy.zeros((4, 4, 16), numpy.float32),
    "a tensor without axes": lambda: torch.tensor(1.0),
    "a tensor of one axis": lambda: torch.ones(3),
    "a tensor of five axes": lambda: torch.zeros(2, 1, 1, 1, 1),
    "a tensor without elements": lambda: torch.zeros(0, 4, 16),
    "a complex tensor": lambda: torch.zeros(8, 4, 16, dtype=torch.complex64),
    "a bool tensor": lambda: torch.ones(8, 4, dtype=torch.bool),
    "a sparse tensor": lambda: torch.zeros(8, 4).to_sparse(),
    "a sparse vector of ints": lambda: torch.zeros(3, dtype=torch.int32).to_sparse(),
    "a sparse table of ints": lambda: torch.zeros(3, 5, dtype=torch.int32).to_sparse(),
    "a tensor on meta": lambda: torch.zeros(8, 4, 16, device="meta"),
    "ints on meta": lambda: torch.zeros(3, dtype=torch.int32, device="meta"),
    "a torch type": lambda: torch.float16,
}


@cache
def scenario() -> Any:
    return build(50, [1, 4, 2], [20, 4, 37], padding=1)


def attend_call() -> dict[str, Any]:
    s = scenario()
    return {"q": s.q, "cache": s.cache, "batch": s.batch, "options": None, "new": None, "out": None, "lse": False, "kernel": None,
            "check": "auto"}  # fmt: skip


def write_call() -> dict[str, Any]:
    pool = PagePool(8, 4)
    cache = KVCache.allocate(pool, kv_heads=2, head_dim=16, dtype=torch.float32)
    k = torch.randn(3, 2, 16)
    given = {"k": k, "v": k.clone(), "cache": cache, "batch": pool.step({pool.sequence(): 3}), "slots": None}
    return given | {"kernel": None, "check": "auto"}


def step_call() -> dict[str, Any]:
    given = {"q": torch.randn(3, 4, 16)} | write_call() | {"options": None, "out": None, "lse": False}
    del given["slots"]
    return given


def check_call() -> dict[str, Any]:
    given = {**step_call(), "new": None, "slots": None}
    return {name: value for name, value in given.items() if name not in ("lse", "kernel", "check")}


def explain_call() -> dict[str, Any]:
    given = {name: value for name, value in attend_call().items() if name not in ("kernel", "check")}
    return given | {"k": None, "v": None, "slots": None, "operation": "attend", "platform": None}


def explain_write_call() -> dict[str, Any]:
    """Without q, and without what a write does not have."""
    given = {name: value for name, value in write_call().items() if name not in ("kernel", "check")}
    return {"q": None} | given | {"operation": "write"}


def write_slots_call() -> dict[str, Any]:
    return write_call() | {"batch": None, "slots": torch.tensor([0, 5, -1])}


def prepare_call() -> dict[str, Any]:
    given = {"cache_or_problem": scenario().cache, "q_heads": 4, "q_dtype": torch.float32, "options": None, "forms": ("full",)}
    return given | {"lse": (False,), "index": ("int32",), "platform": None, "directory": None, "progress": False}


def batch_call() -> dict[str, Any]:
    batch = scenario().batch
    tensors = {name: getattr(batch, name) for name in ("page_table", "kv_lens", "q_starts")}
    return tensors | {"slots": None, "max_q_len": None, "max_kv_len": None}


def use_batch(**given: Any) -> None:
    """A batch trusts nothing: what it takes is refused where it is used."""
    batch = Batch(**given)
    repr(batch)
    s = scenario()
    quire.attend(s.q, s.cache, batch)
    quire.check(s.q, s.cache, batch)


def fill(**given: Any) -> None:
    Batch.allocate(4, 6, 8).fill(**given)


def flash_call() -> dict[str, Any]:
    table, lens = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([1, 2])
    given = {"block_table": table, "cu_seqlens_q": torch.tensor([0, 1, 2]), "seqlen_q": None, "seqused_k": lens}
    return given | {"cache_seqlens": None, "appends": None, "max_seqlen_q": None, "max_seqlen_k": None}


def flash_call_of_one_length() -> dict[str, Any]:
    given = flash_call()
    return given | {"cu_seqlens_q": None, "seqlen_q": 1, "seqused_k": None, "cache_seqlens": given["seqused_k"], "appends": True}


def flashinfer_call() -> dict[str, Any]:
    return {"kv_indptr": torch.tensor([0, 1, 3]), "kv_indices": torch.tensor([0, 1, 2]), "kv_last_page_len": torch.tensor([1, 2]),
            "page_size": 4, "qo_indptr": None, "pages_per_seq": None}  # fmt: skip


def options_call() -> dict[str, Any]:
    return {name: field.default for name, field in Options.__dataclass_fields__.items()}


def use_options(**given: Any) -> None:
    """Options that are taken are used: what only a call can tell is refused there."""
    options = Options(**given)
    repr(options)
    s = scenario()
    quire.attend(s.q, s.cache, s.batch, options)


def wrap_call() -> dict[str, Any]:
    pages = torch.zeros(4, 16, 2, 16, dtype=torch.uint8)
    return {"k_pages": pages, "v_pages": pages.clone(), "layout": "nhd", "format": "e4m3fn", "head_dim": None, "k_scale": None,
            "v_scale": None}  # fmt: skip


def allocate_call() -> dict[str, Any]:
    return {"kv_heads": 2, "head_dim": 16, "v_head_dim": None, "dtype": torch.float16, "format": None, "layout": "nhd", "x": None,
            "k_scale": None, "v_scale": None, "scales": None, "device": None}  # fmt: skip


def checked(**given: Any) -> None:
    with quire.checked(**given):
        pass


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "attend": (quire.attend, attend_call),
    "write": (quire.write, write_call),
    "step": (quire.step, step_call),
    "check": (quire.check, check_call),
    "write with slots alone": (quire.write, write_slots_call),
    "explain": (quire.explain, explain_call),
    "explain a write": (quire.explain, explain_write_call),
    "prepare": (quire.prepare, prepare_call),
    "checked": (checked, lambda: {"results": False}),
    "Options": (use_options, options_call),
    "Batch": (use_batch, batch_call),
    "Batch.fill": (fill, lambda: {n: v for n, v in batch_call().items() if "max" not in n}),
    "Batch.allocate": (
        Batch.allocate,
        lambda: {"seqs": 2, "pages_per_seq": 3, "tokens": 4, "max_q_len": None, "max_kv_len": None, "dtype": torch.int32},
    ),
    "Batch.from_flash_attn": (Batch.from_flash_attn, flash_call),
    "Batch.from_flash_attn, one length": (Batch.from_flash_attn, flash_call_of_one_length),
    "Batch.from_flashinfer": (Batch.from_flashinfer, flashinfer_call),
    "KVCache.wrap": (KVCache.wrap, wrap_call),
    "KVCache.allocate": (lambda **given: KVCache.allocate(PagePool(4, 16), **given), allocate_call),
}

MIXED: dict[str, Any] = {"q_lens": [1, 4, 2], "seq_lens": [20, 4, 37]}


@cache
def case_of(kind: str) -> Any:
    """Good arguments, made once: what is refused writes nothing."""
    if kind == "token-major, full":
        return in_cache("cpu", **MIXED)
    return compat_case("cpu", token_major=kind == "token-major", **MIXED)


def given_to(name: str, **changes: Any) -> None:
    """One of vLLM's operators, with good arguments but for these."""
    if name == "unified_attention":
        unified(case_of("token-major, full"), **changes)
    elif name == "kernel_paged_attention_2d":
        kernel_2d(case_of("mixed"), **changes)
    elif name == "paged_attention_rocm":
        rocm(case_of("mixed"), **changes)
    elif name in ("reshape_and_cache", "reshape_and_cache_flash"):
        a = case_of("token-major" if name.endswith("flash") else "mixed").arguments
        names = ("key", "value", "key_cache", "value_cache", "kv_cache_dtype", "k_scale", "v_scale")
        slots = torch.arange(a["query"].shape[0])
        getattr(vllm, name)(**{n: a[n] for n in names} | {"slot_mapping": slots} | changes)
    elif name == "use_rocm_custom_paged_attention":
        good = {"qtype": torch.float16, "head_size": 128, "block_size": 16, "gqa_ratio": 4, "max_seq_len": 100, "sliding_window": 0,
                "kv_cache_dtype": "auto"}  # fmt: skip
        vllm.use_rocm_custom_paged_attention(**good | changes)
    else:
        case = case_of("mixed")
        given = dict(zip(inspect.signature(getattr(vllm, name)).parameters, case.arguments.values()))
        getattr(vllm, name)(**given | case.options | changes)


OPERATORS = [name for name in vllm.__all__ if name != "KVQuantMode"]
OURS = [(name, argument) for name, (_, good) in FUNCTIONS.items() for argument in good()]
THEIRS = [(name, argument) for name in OPERATORS for argument in inspect.signature(getattr(vllm, name)).parameters]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A string may be the name of a folder, which is then created."""
    monkeypatch.chdir(tmp_path)


def foreign(run: Callable[[Any], Any]) -> list[str]:
    """The values that end in an error of somebody else's."""
    found = []
    for what, make in VALUES.items():
        try:
            run(make())
        except quire.QuireError as error:
            if len(str(error)) > 4000:
                found.append(f"{what}: a message of {len(str(error))} characters")
        except Exception as error:
            found.append(f"{what}: {type(error).__name__}: {str(error)[:160]}")
    return found


@pytest.mark.parametrize(("name", "argument"), OURS, ids=[f"{n}-{a}" for n, a in OURS])
def test_no_argument_ends_in_a_foreign_error(name: str, argument: str) -> None:
    run, good = FUNCTIONS[name]
    run(**good())
    assert foreign(lambda value: run(**good() | {argument: value})) == []


@pytest.mark.parametrize("name", OPERATORS)
def test_no_argument_of_vllm_ends_in_a_foreign_error(name: str) -> None:
    given_to(name)
    arguments = [argument for operator, argument in THEIRS if operator == name]
    found = {a: foreign(lambda value, a=a: given_to(name, **{a: value})) for a in arguments}  # type: ignore[misc]
    assert {a: errors for a, errors in found.items() if errors} == {}


@pytest.mark.parametrize("name", ["attend", "write", "step"])
def test_a_missing_or_unknown_argument_is_a_type_error(name: str) -> None:
    run, good = FUNCTIONS[name]
    with pytest.raises(TypeError):
        run(**good() | {"softcup": 3})
    with pytest.raises(TypeError):
        run(**{n: value for n, value in good().items() if n != "cache"})


def test_a_large_array_is_described_in_a_line() -> None:
    s = scenario()
    with pytest.raises(quire.ArgumentError) as caught:
        quire.attend(numpy.zeros((1000, 64, 128), numpy.float32), s.cache, s.batch)  # type: ignore[call-overload]
    assert "q: given" in str(caught.value) and "numpy" in str(caught.value) and "[1000, 64, 128]" in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["attend", "step"])
def test_an_lse_of_none_is_refused(name: str) -> None:
    """It is neither True nor False."""
    run, good = FUNCTIONS[name]
    with pytest.raises(quire.ArgumentError, match=r"^lse: given nothing \(None\); allowed: True, False or a tensor"):
        run(**good() | {"lse": None})


@pytest.mark.parametrize("name", ["write", "step"])
def test_nothing_to_write_is_refused(name: str) -> None:
    run, good = FUNCTIONS[name]
    with pytest.raises(quire.ArgumentError, match=r"^k: given nothing"):
        run(**good() | {"k": None, "v": None})
