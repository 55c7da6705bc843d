"""The choice and its explanation."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest

from quire.dispatch.catalogue import FEW_ROWS
from quire.dispatch.choose import choose, chosen_by, kernel_for
from quire.dispatch.kernel import IntRange, Kernel, OneOf
from quire.errors import ArgumentError, KernelError
from quire.platform import NAMED, Platform
from quire.problem import Extent, Problem

PROBLEM = Problem(q_heads=32, kv_heads=8, head_dim=128, page_size=24, lse=True)
DECODE = Extent(seqs=64, tokens=64, max_q_len=1, max_kv_len=4096)
CPU, H100 = Platform.named("cpu"), Platform.named("sm90")

HOPPER = Kernel("hopper", "attend", "for sm90", "nowhere:launch", arches=("sm90",), page_size=OneOf((16, 32)))
GPU = Kernel("gpu", "attend", "for GPUs", "nowhere:launch", vendors=("nvidia", "amd"), page_size=OneOf((16, 32)), without=("lse",))
NATIVE = Kernel("native", "attend", "for CPUs", "nowhere:launch", vendors=("cpu",), page_size=OneOf((8, 16)), without=("lse",))
ALWAYS = Kernel("always", "attend", "for all", "operator:itemgetter", head_dim=IntRange(1, 512), capturable=False)
WRITER = Kernel("writer", "write", "for all", "operator:attrgetter")
KERNELS = (HOPPER, GPU, NATIVE, ALWAYS, WRITER)


def test_the_first_whose_limits_all_hold() -> None:
    assert choose(PROBLEM, DECODE, CPU, catalogue=KERNELS).chosen is ALWAYS
    assert choose(PROBLEM.replace(page_size=8, lse=False), DECODE, CPU, catalogue=KERNELS).chosen is NATIVE
    assert choose(PROBLEM.replace(page_size=16, lse=False), DECODE, H100, catalogue=KERNELS).chosen is HOPPER
    assert choose(PROBLEM.replace(page_size=16, lse=False), DECODE, Platform.named("gfx942"), catalogue=KERNELS).chosen is GPU
    assert choose(PROBLEM, DECODE, CPU, operation="write", catalogue=KERNELS).chosen is WRITER


def test_the_explanation() -> None:
    decision = choose(PROBLEM, DECODE, CPU, catalogue=KERNELS)
    assert (
        str(decision)
        == """\
attend: decode, q <= 1, kv <= 4096, 32/8 heads x 128, pages of 24 nhd bf16, q bf16, lse
on cpu x86-64
chosen: always (for all), because it is the first whose limits all hold
refused: hopper (for sm90)
  arch: given x86-64, allowed sm90
  page_size: given 24, allowed 16 or 32
refused: gpu (for GPUs)
  vendor: given cpu, allowed nvidia or amd
  page_size: given 24, allowed 16 or 32
  lse: given yes, allowed no
refused: native (for CPUs)
  page_size: given 24, allowed 8 or 16
  lse: given yes, allowed no
to get native: set page_size to 8 or 16; do not use lse"""
    )


def test_the_next_better_kernel_is_one_the_machine_has() -> None:
    better = choose(PROBLEM, DECODE, H100, catalogue=KERNELS).next_better
    assert better is not None and better.kernel is HOPPER and better.changes == ("set page_size to 16 or 32",)
    assert choose(PROBLEM.replace(page_size=16, lse=False), DECODE, H100, catalogue=KERNELS).next_better is None
    assert choose(PROBLEM, DECODE, CPU, catalogue=(HOPPER, ALWAYS)).next_better is None


def test_the_changes_are_true() -> None:
    """Whoever does what the explanation says gets the kernel it promises."""
    decision = choose(PROBLEM, DECODE, CPU, catalogue=KERNELS)
    assert decision.next_better is not None
    for page_size in (8, 16):
        changed = PROBLEM.replace(page_size=page_size, lse=False)
        assert choose(changed, DECODE, CPU, catalogue=KERNELS).chosen is decision.next_better.kernel


def test_json() -> None:
    found = json.loads(json.dumps(choose(PROBLEM, DECODE, CPU, catalogue=KERNELS).to_dict()))
    assert (found["chosen"], found["operation"], found["requested"], found["capturing"]) == ("always", "attend", None, False)
    assert Problem.from_json(json.dumps(found["problem"])) == PROBLEM and Extent(**found["extent"]) == DECODE
    assert found["platform"]["arch"] == "x86-64"
    assert [row["kernel"] for row in found["candidates"]] == ["hopper", "gpu", "native", "always"]
    assert found["candidates"][0]["refusals"] == [
        {"rule": "arch", "given": "x86-64", "allowed": "sm90", "holds": False, "change": None},
        {"rule": "page_size", "given": 24, "allowed": "16 or 32", "holds": False, "change": "set page_size to 16 or 32"},
    ]
    assert found["candidates"][3]["refusals"] == []
    assert found["next_better"] == {"kernel": "native", "changes": ["set page_size to 8 or 16", "do not use lse"]}


def test_a_kernel_by_name() -> None:
    decision = choose(PROBLEM.replace(page_size=16, lse=False), DECODE, CPU, kernel="always", catalogue=KERNELS)
    assert decision.chosen is ALWAYS
    assert "chosen: always (for all), because always was requested by name, and its limits all hold" in str(decision)
    assert "could also run: native (for CPUs)" in str(decision)
    assert str(decision).endswith("to get native: do not request always")


def test_a_kernel_by_name_that_refuses() -> None:
    with pytest.raises(KernelError, match=r"kernel 'native' was requested and cannot run this attend\n\n") as caught:
        choose(PROBLEM, DECODE, CPU, kernel="native", catalogue=KERNELS)
    assert caught.value.decision is not None and caught.value.decision.chosen is None
    assert "page_size: given 24, allowed 8 or 16" in str(caught.value)


@pytest.mark.parametrize("operation, names", [("attend", "hopper, gpu, native, always"), ("write", "writer")])
def test_a_kernel_by_an_unknown_name(operation: str, names: str) -> None:
    with pytest.raises(KernelError, match=f"kernel: given 'fast'; allowed for {operation}: {names}$"):
        choose(PROBLEM, DECODE, CPU, operation=operation, kernel="fast", catalogue=KERNELS)


def test_an_unknown_operation() -> None:
    with pytest.raises(ArgumentError, match="operation: given 'decode'; allowed: attend, write or audit"):
        choose(PROBLEM, DECODE, CPU, operation="decode")


def test_no_kernel() -> None:
    decision = choose(PROBLEM, DECODE, CPU, capturing=True, catalogue=(HOPPER, ALWAYS))
    assert decision.chosen is None
    assert "chosen: none, because there is none whose limits all hold" in str(decision)
    assert ", lse, inside a CUDA graph\n" in str(decision)
    assert decision.next_better is not None and decision.next_better.changes == ("launch it outside of a CUDA graph",)
    with pytest.raises(KernelError, match=r"no kernel can run this attend\n\nattend: decode"):
        chosen_by(decision)
    with pytest.raises(KernelError, match=r"no kernel can run this attend\n\nattend: decode"):
        kernel_for(PROBLEM, DECODE, CPU, "attend", None, True, (HOPPER, ALWAYS))


def test_a_launcher_is_imported_when_it_is_needed() -> None:
    found = chosen_by(choose(PROBLEM, DECODE, CPU, catalogue=KERNELS)).launcher_for(PROBLEM, CPU)
    assert found({PROBLEM: 1, CPU: 2}) == (1, 2), "an itemgetter of the problem and the platform"
    with pytest.raises(KernelError, match="nowhere:launch does not load"):
        chosen_by(choose(PROBLEM.replace(page_size=16, lse=False), DECODE, CPU, catalogue=KERNELS)).launcher_for(PROBLEM, CPU)


@pytest.mark.parametrize("tokens", [1, 16, 17, 300])
def test_the_quick_choice_is_the_explained_one(tokens: int) -> None:
    """Limits of the batch are asked in every call, those of the layer once; the answer is the same."""
    extent = Extent(1, tokens, tokens, 4096)
    for platform in (CPU, H100, Platform.named("gfx942")):
        for operation in ("attend", "write"):
            quick = kernel_for(PROBLEM, extent, platform, operation, None, False)
            assert quick is choose(PROBLEM, extent, platform, operation=operation).chosen
    rows = FEW_ROWS // PROBLEM.q_heads
    assert kernel_for(PROBLEM, Extent(1, rows, 17, 4096), H100, "attend", None, False).name == "triton-decode"
    assert kernel_for(PROBLEM, Extent(1, rows + 1, 17, 4096), H100, "attend", None, False).name != "triton-decode"
    assert kernel_for(PROBLEM, Extent(9, rows + 1, 16, 4096), H100, "attend", None, False).name == "triton-decode"
    with pytest.raises(KernelError, match=f"long_rows: given {FEW_ROWS + PROBLEM.q_heads}, allowed at most {FEW_ROWS}"):
        kernel_for(PROBLEM, Extent(1, rows + 1, 17, 4096), H100, "attend", "triton-decode", False)


def test_limits_of_the_layer_are_evaluated_once() -> None:
    asked = []
    counting = Kernel("counting", "attend", "", "nowhere:launch", without=("lse",), max_q_len=64)
    of_batch, of_layer = counting.limits
    assert counting.batch_limits == (of_batch,)
    counting.__dict__["limits"] = (of_batch, replace(of_layer, given=lambda request: asked.append(request) or False))
    for length in range(1, 65):
        extent = Extent(2, length + 1, length, 4096 * length)
        assert kernel_for(PROBLEM, extent, CPU, "attend", None, False, (counting,)) is counting
    assert len(asked) == 1
    with pytest.raises(KernelError, match="max_q_len: given 65, allowed at most 64"):
        kernel_for(PROBLEM, Extent(1, 65, 65, 65), CPU, "attend", None, False, (counting,))


@pytest.mark.parametrize("platform", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("operation", ["attend", "write"])
def test_the_real_catalogue_serves_every_platform(platform: Platform, operation: str) -> None:
    problem = Problem(q_heads=6, kv_heads=2, head_dim=80, page_size=7, format="e5m2", scales="token", layout="aiter")
    extent = Extent(seqs=3, tokens=50, max_q_len=33, max_kv_len=100)
    everything = problem.replace(
        form="context", causal="per-sequence", window=(5, None), softcap=True, alibi=True, sinks=True, mask=True, lse=True
    )
    for one in (problem, everything, problem.replace(head_dim=1), problem.replace(head_dim=512)):
        assert choose(one, extent, platform, operation=operation).chosen is not None
    assert choose(problem.replace(head_dim=513), extent, platform, operation=operation).chosen is None


def test_the_torch_kernel_is_not_captured() -> None:
    with pytest.raises(KernelError, match="capturing: given yes, allowed no"):
        choose(PROBLEM, DECODE, H100, kernel="torch", capturing=True)


def test_a_refusal_can_be_pickled() -> None:
    with pytest.raises(KernelError) as caught:
        choose(PROBLEM, DECODE, CPU, kernel="triton-decode")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.decision.candidates == caught.value.decision.candidates
