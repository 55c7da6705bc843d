"""Functions under test: their arguments, their limits, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import reference
from quire.conformance.cases.case import Case
from quire.conformance.runner.find_target import adapter, find
from quire.conformance.runner.run import conform, examine
from quire.conformance.runner.target import wrap
from quire.errors import ArgumentError


def attention(*, q: Any, k_pages: Any, v_pages: Any, page_table: Any, kv_lens: Any, q_starts: Any, out: Any, scale: float) -> None:
    """A kernel without options: causal, slow."""
    for i, n in enumerate(kv_lens.tolist()):
        rows = slice(int(q_starts[i]), int(q_starts[i + 1]))
        at = torch.arange(n)
        page = page_table[i].long()[at // k_pages.shape[1]]
        k, v = (pages[page, at % k_pages.shape[1]] for pages in (k_pages, v_pages))
        if rows.stop > rows.start:
            out[rows] = reference.attention(q[rows], k, v, scale=scale)[0].to(out.dtype)


def returns(**tensors: Any) -> torch.Tensor:
    out = torch.zeros_like(tensors["out"])
    attention(
        **{
            **{name: tensors[name] for name in ("q", "k_pages", "v_pages", "page_table", "kv_lens", "q_starts", "scale")},
            "out": out,
        }
    )
    return out


def test_cases_that_need_an_undeclared_argument_are_skipped() -> None:
    report = conform(
        wrap(attention, "mine"), [Case("a", lse=True), Case("b", window=(3, 0)), Case("c", layout="hnd"), Case("d", alibi=True)]
    )
    assert [result.status for result in report.results] == ["correct", "skipped", "skipped", "skipped"]
    assert "window" in report.results[1].reason and report.exit_code == 0


def test_a_function_may_return_its_output() -> None:
    def mine(*, q: Any, k_pages: Any, v_pages: Any, page_table: Any, kv_lens: Any, q_starts: Any, out: Any, scale: float) -> Any:
        return returns(
            q=q, k_pages=k_pages, v_pages=v_pages, page_table=page_table, kv_lens=kv_lens, q_starts=q_starts, out=out, scale=scale
        )

    assert examine(Case("a", padding=2), wrap(mine, "mine")).status == "correct"


def test_beyond_its_limits_a_target_must_raise_or_be_correct() -> None:
    case, limits = Case("a", page_size=8), {"page_size": (16,)}

    def strict(**tensors: Any) -> None:
        raise ValueError("pages of 16 only")

    def wrong(**tensors: Any) -> None:
        tensors["out"][:] = 0

    assert examine(case, wrap(strict, "strict", supports=limits)).status == "refused"
    assert examine(case, wrap(strict, "strict")).status == "raised"
    assert examine(case, wrap(attention, "correct", supports=limits)).status == "correct"
    said = examine(case, wrap(wrong, "wrong", supports=limits))
    assert said.status == "wrong" and "beyond its limits" in said.reason
    assert examine(case, wrap(wrong, "wrong", supports=limits, refuses=False)).status == "skipped"


def test_a_limit_may_be_a_function_or_a_range() -> None:
    target = wrap(attention, "mine", supports={"head_dim": lambda n: n % 8 == 0, "max_q_len": range(2)}, refuses=False)
    assert examine(Case("a", q_lens=(1, 1), kv_lens=(5, 9)), target).status == "correct"
    assert examine(Case("a"), target).reason == "max_q_len = 20"


def test_adapters_are_found_by_file_and_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "SUPPORTS = {'page_size': (16,)}\n"
        "def f(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale):\n    out[:] = 0\n"
    )
    target = adapter(f"{file}:f")
    assert examine(Case("a"), target).findings
    with pytest.raises(ArgumentError, match="has: f"):
        adapter(f"{file}:g")
    with pytest.raises(ArgumentError, match="a file that exists"):
        adapter(f"{tmp_path}/none.py:f")


@pytest.mark.parametrize("name", ["nothing", "nothing.py:f", "quire.nothing:f"])
def test_unknown_targets_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError):
        find(name)


def test_strange_arguments_and_limits_are_refused() -> None:
    def strange(*, q: Any, blocks: Any) -> None: ...

    with pytest.raises(ArgumentError, match="blocks"):
        wrap(strange, "strange")
    with pytest.raises(ArgumentError, match="page_sizes"):
        wrap(attention, "mine", supports={"page_sizes": (16,)})


def test_contiguous_is_a_limit() -> None:
    def strict(*, q: Any, k_pages: Any, v_pages: Any, page_table: Any, kv_lens: Any, q_starts: Any, out: Any, scale: float) -> None:
        if not (q.is_contiguous() and page_table.is_contiguous()):
            raise ValueError("contiguous tensors only")
        attention(**locals())

    def blind(*, q: Any, k_pages: Any, v_pages: Any, page_table: Any, kv_lens: Any, q_starts: Any, out: Any, scale: float) -> None:
        q = q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1))
        attention(**locals())

    case, limits = Case("a", strides="views"), {"contiguous": (True,)}
    assert examine(case, wrap(attention, "mine")).status == "correct"
    assert examine(case, wrap(strict, "strict", supports=limits)).status == "refused"
    assert examine(case, wrap(strict, "strict")).status == "raised"
    assert examine(case, wrap(blind, "blind", supports=limits, refuses=False)).status == "skipped"
    wrong = examine(case, wrap(blind, "blind"))
    assert wrong.findings[0].fault == "q-strides-ignored"


@pytest.mark.parametrize("shape", [(), (27, 4), (27, 4, 32), (3, 4, 64)])
def test_a_result_of_another_shape_raises_with_both_shapes(shape: tuple[int, ...]) -> None:
    def mine(*, q: Any, k_pages: Any, v_pages: Any, page_table: Any, kv_lens: Any, q_starts: Any, out: Any, scale: float) -> Any:
        return torch.zeros(shape)

    result = examine(Case("a"), wrap(mine, "mine"))
    assert result.status == "raised"
    assert str(list(shape)) in result.reason and "[27, 4, 64]" in result.reason
