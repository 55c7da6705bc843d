"""The choice and its explanation."""

from __future__ import annotations

import json

import pytest

from quire.dispatch.choose import choose, launcher_of
from quire.dispatch.kernel import Kernel, OneOf, Span
from quire.platform import NAMED, Platform
from quire.errors import ArgumentError, KernelError
from quire.problem import Problem

PROBLEM = Problem(q_heads=32, kv_heads=8, head_dim=128, page_size=24, max_q_len=1, max_kv_len=4096, lse=True)
CPU, H100 = Platform.named("cpu"), Platform.named("sm90")

HOPPER = Kernel("hopper", "attend", "for sm90", "nowhere:launch", arches=("sm90",), page_size=OneOf((16, 32)))
GPU = Kernel("gpu", "attend", "for GPUs", "nowhere:launch", vendors=("nvidia", "amd"), page_size=OneOf((16, 32)), without=("lse",))
NATIVE = Kernel("native", "attend", "for CPUs", "nowhere:launch", vendors=("cpu",), page_size=OneOf((8, 16)), without=("lse",))
ALWAYS = Kernel("always", "attend", "for all", "operator:itemgetter", head_dim=Span(1, 512), capturable=False)
WRITER = Kernel("writer", "write", "for all", "operator:attrgetter")
KERNELS = (HOPPER, GPU, NATIVE, ALWAYS, WRITER)


def test_the_first_whose_limits_all_hold() -> None:
    assert choose(PROBLEM, CPU, catalogue=KERNELS).chosen is ALWAYS
    assert choose(PROBLEM.replace(page_size=8, lse=False), CPU, catalogue=KERNELS).chosen is NATIVE
    assert choose(PROBLEM.replace(page_size=16, lse=False), H100, catalogue=KERNELS).chosen is HOPPER
    assert choose(PROBLEM.replace(page_size=16, lse=False), Platform.named("gfx942"), catalogue=KERNELS).chosen is GPU
    assert choose(PROBLEM, CPU, operation="write", catalogue=KERNELS).chosen is WRITER


def test_the_explanation() -> None:
    decision = choose(PROBLEM, CPU, catalogue=KERNELS)
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
to get native: set page_size to 8 or 16; do without lse"""
    )


def test_the_next_better_kernel_is_one_the_machine_has() -> None:
    better = choose(PROBLEM, H100, catalogue=KERNELS).next_better
    assert better is not None and better.kernel is HOPPER and better.changes == ("set page_size to 16 or 32",)
    assert choose(PROBLEM.replace(page_size=16, lse=False), H100, catalogue=KERNELS).next_better is None
    assert choose(PROBLEM, CPU, catalogue=(HOPPER, ALWAYS)).next_better is None


def test_the_changes_are_true() -> None:
    """Whoever does what the explanation says gets the kernel it promises."""
    decision = choose(PROBLEM, CPU, catalogue=KERNELS)
    assert decision.next_better is not None
    for page_size in (8, 16):
        assert choose(PROBLEM.replace(page_size=page_size, lse=False), CPU, catalogue=KERNELS).chosen is decision.next_better.kernel


def test_json() -> None:
    found = json.loads(json.dumps(choose(PROBLEM, CPU, catalogue=KERNELS).to_dict()))
    assert (found["chosen"], found["operation"], found["asked"], found["capturing"]) == ("always", "attend", None, False)
    assert Problem.from_json(json.dumps(found["problem"])) == PROBLEM
    assert found["platform"]["arch"] == "x86-64"
    assert [row["kernel"] for row in found["candidates"]] == ["hopper", "gpu", "native", "always"]
    assert found["candidates"][0]["refusals"] == [
        {"rule": "arch", "given": "x86-64", "allowed": "sm90", "holds": False, "change": None},
        {"rule": "page_size", "given": 24, "allowed": "16 or 32", "holds": False, "change": "set page_size to 16 or 32"},
    ]
    assert found["candidates"][3]["refusals"] == []
    assert found["next_better"] == {"kernel": "native", "changes": ["set page_size to 8 or 16", "do without lse"]}


def test_a_kernel_by_name() -> None:
    decision = choose(PROBLEM.replace(page_size=16, lse=False), CPU, kernel="always", catalogue=KERNELS)
    assert decision.chosen is ALWAYS
    assert "chosen: always (for all), because always was asked for by name, and its limits all hold" in str(decision)
    assert "also able: native (for CPUs)" in str(decision)
    assert str(decision).endswith("to get native: do not ask for always")


def test_a_kernel_by_name_that_refuses() -> None:
    with pytest.raises(KernelError, match=r"kernel 'native' was asked for and cannot attend this\n\n") as caught:
        choose(PROBLEM, CPU, kernel="native", catalogue=KERNELS)
    assert caught.value.decision is not None and caught.value.decision.chosen is None
    assert "page_size: given 24, allowed 8 or 16" in str(caught.value)


@pytest.mark.parametrize("operation, names", [("attend", "hopper, gpu, native, always"), ("write", "writer")])
def test_a_kernel_by_an_unknown_name(operation: str, names: str) -> None:
    with pytest.raises(KernelError, match=f"kernel: given 'fast'; allowed for {operation}: {names}$"):
        choose(PROBLEM, CPU, operation=operation, kernel="fast", catalogue=KERNELS)


def test_an_unknown_operation() -> None:
    with pytest.raises(ArgumentError, match="operation: given 'decode'; allowed: attend, write or audit"):
        choose(PROBLEM, CPU, operation="decode")


def test_no_kernel() -> None:
    decision = choose(PROBLEM, CPU, capturing=True, catalogue=(HOPPER, ALWAYS))
    assert decision.chosen is None
    assert "chosen: none, because there is none whose limits all hold" in str(decision)
    assert ", lse, inside a CUDA graph\n" in str(decision)
    assert decision.next_better is not None and decision.next_better.changes == ("launch it outside of a CUDA graph",)
    with pytest.raises(KernelError, match=r"no kernel can attend this\n\nattend: decode"):
        launcher_of(decision)


def test_a_launcher_is_imported_when_it_is_needed() -> None:
    import operator

    assert launcher_of(choose(PROBLEM, CPU, catalogue=KERNELS)) is operator.itemgetter
    with pytest.raises(KernelError, match="nowhere:launch does not load"):
        launcher_of(choose(PROBLEM.replace(page_size=16, lse=False), CPU, catalogue=KERNELS))


def test_a_problem_seen_before_is_not_judged_again() -> None:
    asked = []
    counting = Kernel("counting", "attend", "", "nowhere:launch", without=("lse",))
    (limit,) = counting.limits
    counting.__dict__["limits"] = (type(limit)(limit.rule, lambda call: asked.append(call) or False, limit.allowed),)
    first = choose(PROBLEM, CPU, catalogue=(counting,))
    again = choose(PROBLEM.replace(max_kv_len=4000), CPU, catalogue=(counting,))
    assert again is first and len(asked) == 1


@pytest.mark.parametrize("platform", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("operation", ["attend", "write"])
def test_the_real_catalogue_serves_every_platform(platform: Platform, operation: str) -> None:
    problem = Problem(q_heads=6, kv_heads=2, head_dim=80, page_size=7, format="e5m2", scales="token", layout="aiter", max_q_len=33)
    everything = problem.replace(
        form="context", causal="per-sequence", window=(5, None), softcap=True, alibi=True, sinks=True, mask=True, lse=True
    )
    for one in (problem, everything, problem.replace(head_dim=1), problem.replace(head_dim=512)):
        assert choose(one, platform, operation=operation).chosen is not None
    assert choose(problem.replace(head_dim=513), platform, operation=operation).chosen is None


def test_the_torch_kernel_is_not_captured() -> None:
    with pytest.raises(KernelError, match="capturing: given yes, allowed no"):
        choose(PROBLEM, H100, kernel="torch", capturing=True)
