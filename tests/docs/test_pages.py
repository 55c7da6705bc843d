"""The Python code of the documentation runs as it is shown, from top to bottom of a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import quire

DOCS = Path(__file__).parents[2] / "docs"


def run_page(page: str, session: dict[str, object]) -> None:
    parts = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert len(parts) >= 2
    for part in parts:
        exec(compile(part, page, "exec"), session)


@pytest.mark.parametrize(
    "page", ["index.md", "migrating.md", "explain.md", "prefix_cache.md", "spans.md", "sparse_attention.md", "rope.md", "mla.md"]
)
def test_the_code_of_a_page_runs(page: str) -> None:
    session: dict[str, object] = {}
    run_page(page, session)
    assert session["out"].isfinite().all()


def test_explain_shows_what_the_command_prints() -> None:
    """The listing of explain.md, for the command above it that has `--arch h100`. What is compiled depends on the machine."""
    problem = quire.Problem(q_heads=32, kv_heads=8, head_dim=128, page_size=16, format="e4m3fn", scales="tensor")
    extent = quire.Extent(max_q_len=512, max_kv_len=4096, tokens=512)
    from quire.dispatch.choose import choose

    summary = choose(problem, extent, quire.Platform.named("h100")).summary()
    shown = re.search(r"^```text\n(.*?)^```$", (DOCS / "explain.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown
    expected = [line for line in summary.splitlines() if not line.startswith("kernels")]
    assert [line for line in shown[1].splitlines() if not line.startswith("kernels")] == expected


def test_the_code_of_wrong_results_runs_around_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page leaves the model to the reader: here it is one layer."""
    monkeypatch.chdir(tmp_path)
    calls = []

    def model(tokens: int) -> None:
        pool = quire.PagePool(pages=4, page_size=16)
        cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=16)
        q, k, v = torch.randn(tokens, 6, 16, dtype=torch.bfloat16).split((4, 1, 1), dim=1)
        calls.append(quire.step(q, k, v, cache, pool.step({pool.sequence(): tokens})))

    run_page("wrong_results.md", {"quire": quire, "model": model, "tokens": 5})
    assert len(calls) >= 3
    assert (tmp_path / "call.safetensors").exists()
