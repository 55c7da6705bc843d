"""Prints the kernels for people: `docs/kernels.md` is what `render` returns."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import pkgutil
import textwrap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import triton

import quire.kernels.gluon
import quire.kernels.triton.device
from quire.cache.format import OCP_FP8
from quire.kernels.triton.compiler.compiled import ARCHES, Compiled, compile_in_subprocess
from quire.kernels.triton.compiler.sample import KernelSample
from quire.kernels.triton.host.tuning import AUDIT, LEAST, SMALL, SMALL_GLUON, TABLE, WRITE, Tuning
from quire.platform import Platform

WIDTHS = (64, 128, 256, 512)
FORMATS_SHOWN = ("bf16", OCP_FP8.name)
SAMPLES = [
    *(KernelSample(kernel, width, format) for kernel in ("decode", "mixed") for width in WIDTHS for format in FORMATS_SHOWN),
    *(KernelSample("write", format=format) for format in FORMATS_SHOWN),
    KernelSample("audit"),
]
HOPPER = [KernelSample("gluon", width, format) for width in (64, 128) for format in FORMATS_SHOWN]

_HEAD = """# The GPU kernels

Printed from the objects by `make docs`, which compiles them for every card below; a test keeps the first two parts so. No GPU is
needed for any of this: `quire.kernels.triton.compiler.sample.KernelSample("decode").recipes("gfx942")` says what the compiler is
asked for, and `.compile(quire.Platform.named("gfx942"))` of each asks it. """

_TUNING = """## How much a program computes

The table is read top down: the first row that fits the card, the wider of the two heads, the products and the cache is taken.
"""

_PORTIONS = """A program of `write_kernel` stores {write.size} rows of a head with {write.warps} warps, one of `audit_kernel` looks
at {audit.size} positions with {audit.warps}; {least.size} with {least.warps}, if asked for.
"""

_COMPILED = """## What the compiler makes of it

Compiled with Triton {version}: 32 query heads over 8 key heads, pages of 16. Shared memory is a program's, registers are a
thread's. Spilled are the bytes of registers that a thread keeps in memory because it has too few. An instruction is named where a
kernel computes products.
"""

_VERSIONS = """## Versions of Triton

The same kernels by version, for one card of each vendor: registers of a thread, and the bytes it spills, if any, in parentheses.
Printed from what `make versions` writes, which compiles them with every version for more cards. Heads are of 128.
"""


def render(versions: Path) -> str:
    """The kernels, their table, what they take on each card, and by version of Triton, as Markdown. `versions` is the file that
    `make versions` writes."""
    records = json.loads(versions.read_text())
    head = _COMPILED.format(version=triton.__version__)
    return "\n".join((_HEAD, kernels(), tuning(), head, compiled(), _VERSIONS, by_version(records)))


def kernels() -> str:
    """What one program of each kernel computes, and what it is given."""
    parts = ["## What a program computes\n"]
    for found in _modules():
        module = importlib.import_module(found.name)
        for name, kernel in vars(module).items():
            if name.endswith("_kernel") and kernel.fn.__module__ == module.__name__:
                given = ", ".join(f"`{argument}`" for argument in kernel.arg_names)
                parts.append(f"### `{name}`\n\n{_prose(module.__doc__ or '')}\n\nGiven: {given}.\n")
    return "\n".join(parts)


def _modules() -> Iterable[pkgutil.ModuleInfo]:
    for package in (quire.kernels.triton.device, quire.kernels.gluon):
        yield from pkgutil.iter_modules(package.__path__, f"{package.__name__}.")


def tuning() -> str:
    """The table."""
    asked = (SMALL._replace(kernel="any, if asked for"), SMALL_GLUON._replace(kernel="of gluon, if asked for"))
    cells = [[*(_cell(value) for value in row)] for row in (*TABLE, *asked)]
    meaning = "\n".join(f"- `{name}`: {text}" for name, text in _members(Tuning))
    others = _PORTIONS.format(write=WRITE, audit=AUDIT, least=LEAST)
    return f"{_TUNING}\n{_table(Tuning._fields, cells)}\n{meaning}\n\n{others}"


def compiled() -> str:
    """Memory, registers and instructions by card. Cards are compiled for side by side, each in a process of its own."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda arch: compile_in_subprocess([(arch, sample) for sample in samples_for(arch)]), ARCHES)
        return "\n".join(_card(arch, results) for arch, results in zip(ARCHES, found))


def samples_for(arch: str) -> list[KernelSample]:
    return [*SAMPLES, *HOPPER] if arch == "sm90" else SAMPLES


def _card(arch: str, results: list[list[Compiled] | str]) -> str:
    rows = []
    for sample, result in zip(samples_for(arch), results):
        if isinstance(result, str):
            raise RuntimeError(f"{sample} does not compile for {arch}: {result}")
        for kernel in result:
            memory = f"{kernel.shared_memory / 1024:.1f}"
            what = (sample.kernel, kernel.kernel, str(sample.head_dim), sample.format)
            rows.append([*what, str(kernel.warps), memory, str(kernel.registers), str(kernel.spilled), kernel.matrix])
    heads = ("call", "kernel", "head_dim", "cache", "warps", "shared KiB", "registers", "spilled", "products")
    return f"### {arch}: {Platform.named(arch).program_memory // 1024} KiB of shared memory for a program\n\n{_table(heads, rows)}"


def by_version(records: list[dict[str, Any]]) -> str:
    """A table for sm90 and one for gfx942: one row for each kernel of a plain call, one column for each version."""
    versions = list(dict.fromkeys(record["triton"] for record in records))
    parts = []
    for arch in ("sm90", "gfx942"):
        rows: dict[tuple[str, str, str], dict[str, str]] = {}
        for record in records:
            sample = KernelSample(**record["sample"])
            if record["arch"] != arch or sample != KernelSample(sample.kernel, format=sample.format):
                continue
            if record["faults"]:
                raise RuntimeError(f"{sample} with Triton {record['triton']} for {arch}: {record['faults']}")
            for kernel in (Compiled(*members) for members in record["kernels"]):
                cell = f"{kernel.registers} ({kernel.spilled})" if kernel.spilled else str(kernel.registers)
                rows.setdefault((sample.kernel, kernel.kernel, sample.format), {})[record["triton"]] = cell
        cells = [[*what, *(found[version] for version in versions)] for what, found in rows.items()]
        parts.append(f"### {arch} by version\n\n{_table(('call', 'kernel', 'cache', *versions), cells)}")
    return "\n".join(parts)


def _members(record: type) -> list[tuple[str, str]]:
    """The members of a record that have a docstring, and that docstring on one line."""
    body: list[Any] = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0].body  # type: ignore[attr-defined]
    return [
        (ast.unparse(member.target), " ".join(ast.literal_eval(text.value).split()))
        for member, text in pairwise(body)
        if isinstance(member, ast.AnnAssign) and isinstance(text, ast.Expr)
    ]


def _prose(text: str) -> str:
    """A docstring, its indented parts as they stand."""
    return "\n\n".join(
        part if part.startswith("    ") else textwrap.fill(part, 120) for part in inspect.cleandoc(text).split("\n\n")
    )


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "all"
    return "" if value is None else str(value)


def _table(heads: Iterable[str], rows: list[list[str]]) -> str:
    lines = [list(heads), *rows]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(lines[0]))]
    printed = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    printed.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(printed) + "\n"
