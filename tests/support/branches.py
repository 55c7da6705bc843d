"""Which ways a kernel's branches went: listed from its source, counted while the interpreter runs it.

A branch is an `if`, an `elif`, a conditional expression, or a `while`; its outcomes are yes and no. So is a `for`, whose only
outcome is that it is entered.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

Place = tuple[str, int, int]
"""Module, line, column."""
JIT = ("triton.jit", "gluon.jit")
"""The decorators of functions that Triton compiles."""


CANNOT = {
    "attend.attend_sequences: if C.PDL -> yes": "compiled: griddepcontrol.launch_dependents",
    **{
        f"attend.attend_sequences: if {test} -> {outcome}": "only on cards that launch dependent kernels early"
        for test in ("workspace.overlapped != 0", "workspace.overlapped == 0", "program == 0")
        for outcome in ("yes", "no")
    },
    "combine.combine_kernel: if C.PDL -> yes": "compiled: griddepcontrol.wait",
    "schedule.uniform: if not C.UNIFORM -> no": "compiled: redux.sync",
    **{f"schedule.uniform: if x.dtype == tl.int64 -> {outcome}": "only where redux.sync is compiled" for outcome in ("yes", "no")},
    "features.reciprocal: if C.NVIDIA -> yes": "compiled: rcp.approx",
    "formats.int4_of: if NVIDIA and BITS > 8 -> yes": "instructions of cards: test_int4_is_unpacked",
    **{
        f"formats.int4_of: if DOT == 'bf16' -> {outcome}": "instructions of cards: test_int4_is_unpacked"
        for outcome in ("yes", "no")
    },
    "formats.e2m1_of: if NVIDIA and BITS > 8 -> yes": "instructions of cards: test_e2m1_is_unpacked_and_scaled",
    "formats.encode_e4m3fn: if HARDWARE -> yes": "an instruction of cards: test_fp8_is_encoded_by_hardware_if_possible",
    "formats.encode_e5m2: if HARDWARE -> yes": "an instruction of cards: test_fp8_is_encoded_by_hardware_if_possible",
    "attend.attend_sequences: if LONG is not None -> no": "without long rows there are no further programs",
    "prefill.prefill_kernel: if C.PDL -> yes": "compiled: griddepcontrol.wait",
    **{
        f"prefill.prefill_kernel: if launch {test} FIRST -> {outcome}": "only on cards that launch dependent kernels early"
        for test in ("==", "!=")
        for outcome in ("yes", "no")
    },
    "producer.take_item: if count > 0 -> no": "a program without work has ended before",
    "write.rope_kernel: if rope.q is not None -> no": "without queries there are no further programs",
}
"""Outcomes that no run in the interpreter can have, and why. Behind 'compiled:' stands the instruction of a card that is found in
what is compiled there instead."""


class Branch(NamedTuple):
    """One branch, and how a person names it."""

    module: str
    line: int
    column: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.function}: {self.text}"


def branches_of(module: ModuleType) -> list[Branch]:
    """The branches of every function of a module that Triton compiles, in the order of their source."""
    found = []
    for function in ast.parse(inspect.getsource(module)).body:
        if isinstance(function, ast.FunctionDef) and any(ast.unparse(d) in JIT for d in function.decorator_list):
            found += [_describe(node, module.__name__, function.name) for node in ast.walk(function) if _is_branch(node)]
    return sorted(found)


def outcomes(modules: Iterable[ModuleType]) -> set[tuple[Branch, bool]]:
    """Every way that every branch could go."""
    found = [branch for module in modules for branch in branches_of(module)]
    return {(branch, outcome) for branch in found for outcome in ((True,) if branch.text.startswith("for ") else (True, False))}


class Counting(ast.NodeTransformer):
    """Rewrites a function so that each branch reports its outcome to `took(module, line, column, outcome)`."""

    NAME = "_quire_took"

    def __init__(self, module: str, above: int):
        self.module = module
        self.above = above
        """Lines of the file above the source that is rewritten."""

    def _report(self, node: Any, value: ast.expr) -> ast.expr:
        place = (self.module, node.lineno + self.above, node.col_offset, isinstance(node, ast.For))
        return ast.Call(ast.Name(self.NAME, ast.Load()), [*map(ast.Constant, place), value], [])

    def visit_If(self, node: Any) -> Any:
        self.generic_visit(node)
        node.test = self._report(node, node.test)
        return node

    visit_IfExp = visit_While = visit_If

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        node.iter = self._report(node, node.iter)
        return node


class Taken:
    """The outcomes that were seen."""

    def __init__(self) -> None:
        self.seen: set[tuple[Place, bool]] = set()

    def took(self, module: str, line: int, column: int, loop: bool, value: Any) -> Any:
        """What a rewritten branch calls with its test, or with what it goes through."""
        return self._turns((module, line, column), value) if loop else self._note((module, line, column), bool(value))

    def _note(self, place: Place, outcome: bool) -> bool:
        self.seen.add((place, outcome))
        return outcome

    def _turns(self, place: Place, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._note(place, True)
            yield value


def _is_branch(node: ast.AST) -> bool:
    return isinstance(node, (ast.If, ast.IfExp, ast.While, ast.For))


def _describe(node: Any, module: str, function: str) -> Branch:
    if isinstance(node, ast.For):
        text = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
    else:
        word = {ast.If: "if", ast.IfExp: "... if", ast.While: "while"}[type(node)]
        text = f"{word} {ast.unparse(node.test)}"
    return Branch(module, node.lineno, node.col_offset, function, text)
