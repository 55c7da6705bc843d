"""Functions stay small: at most 60 lines, cyclomatic complexity 20 and 10 parameters. Functions compiled for a GPU (`jit`) are not
measured: their size follows from the hardware."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "quire"
FILES = sorted(SRC.rglob("*.py"))
MOST_LINES, MOST_COMPLEXITY, MOST_PARAMETERS = 60, 20, 10

# vLLM's signatures: neither their parameters nor the lines of their signature count.
FOREIGN_SIGNATURES = {
    "kernel_paged_attention_2d",
    "paged_attention_rocm",
    "chunked_prefill_paged_decode",
    "context_attention_fwd",
    "use_rocm_custom_paged_attention",
    "unified_attention",
}
# Keyword arguments of the public interface, each with a default; the reference, which takes the options one by one; and
# FlashAttention's functions, whose arguments transformers reads off the signature.
PUBLIC_SIGNATURES = {
    ("batch.py", "__init__"),
    ("cache/kv_cache.py", "allocate"),
    ("cache/kv_cache.py", "wrap"),
    ("contract/check.py", "check"),
    ("explain.py", "explain"),
    ("integrations/transformers/flash.py", "flash_attn_varlen_func"),
    ("integrations/transformers/flash.py", "flash_attn_with_kvcache"),
    ("prepare.py", "prepare"),
    ("reference.py", "attention"),
    ("step.py", "step"),
    ("write.py", "write"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.Assert, ast.With, ast.match_case)


def complexity(function: ast.AST) -> int:
    """Cyclomatic complexity: 1, and 1 for each branch, loop, condition of a comprehension and boolean operator."""
    total = 1
    for node in ast.walk(function):
        total += isinstance(node, BRANCHES)
        if isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
    return total


def is_compiled_for_a_gpu(function: Function) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def functions(source: str) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))


def too_large(source: str, path: str) -> Iterator[str]:
    """What is too large in a file at `path` below src/quire."""
    for node in functions(source):
        if is_compiled_for_a_gpu(node):
            continue
        foreign = path.startswith("compat/") and node.name in FOREIGN_SIGNATURES
        end = node.end_lineno or node.lineno
        lines = end - (node.body[0].lineno if foreign else node.lineno) + 1
        parameters = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
        if lines > MOST_LINES:
            yield f"{path}: {node.name} has {lines} lines"
        if complexity(node) > MOST_COMPLEXITY:
            yield f"{path}: {node.name} has complexity {complexity(node)}"
        if parameters > MOST_PARAMETERS and not foreign and (path, node.name) not in PUBLIC_SIGNATURES:
            yield f"{path}: {node.name} has {parameters} parameters"


def test_functions_are_small() -> None:
    assert [found for path in FILES for found in too_large(path.read_text(), path.relative_to(SRC).as_posix())] == []


LONG = "def f():\n" + "    x = 1\n" * 60
BRANCHED = "def f(x):\n" + "    if x: pass\n" * 20
WIDE = f"def f({', '.join(f'p{i}' for i in range(11))}): pass"


@pytest.mark.parametrize(
    "source", [LONG, BRANCHED, WIDE, WIDE.replace("p5", "*, p5")], ids=["lines", "branches", "parameters", "keywords"]
)
def test_the_law_sees(source: str) -> None:
    assert len(list(too_large(source, "attend.py"))) == 1
    assert list(too_large(f"@triton.jit\n{source}", "kernels/torch/x.py")) == []


@pytest.mark.parametrize(
    "source",
    [LONG.replace("    x = 1\n", "", 1), BRANCHED.replace("    if x: pass\n", "", 1), WIDE.replace("p10", "*p10")],
    ids=["60 lines", "complexity 20", "10 parameters"],
)
def test_the_law_allows(source: str) -> None:
    assert list(too_large(source, "attend.py")) == []


def test_exceptions_exist() -> None:
    names = {(path.relative_to(SRC).as_posix(), node.name) for path in FILES for node in functions(path.read_text())}
    assert PUBLIC_SIGNATURES <= names
    assert {name for path, name in names if path.startswith("compat/")} >= FOREIGN_SIGNATURES
