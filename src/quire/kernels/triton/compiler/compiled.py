"""Compiles kernels for any GPU, which need not be present, and reads memory, registers and instructions from the compiled object. A
compiler may abort: `compile_in_subprocess` compiles in another process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

from quire.kernels.triton.compiler.sample import KernelSample
from quire.platform import Platform

ARCHES = ("sm80", "sm89", "sm90", "sm100", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
"""The GPUs that documents and tests compile for."""

_MATRIX = r"wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_mfma_\w+|v_wmma_\w+"
_NOTABLE = re.compile(
    rf"{_MATRIX}|griddepcontrol\.\w+|redux\.sync|rcp\.approx|cvt\.\w+\.f16x2\.\w+|cvt\.rn\.satfinite\.\w+\.\w+|"
    r"cp\.async\.c[ag]\.shared\.global|cp\.async\.bulk\.tensor(?=\.\dd\.shared)"
)


class Compiled(NamedTuple):
    """One kernel, compiled."""

    kernel: str
    warps: int
    shared_memory: int
    """Bytes a program."""
    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of registers that a thread spills to memory."""
    instructions: list[str]
    """Those that show how it was compiled."""

    @property
    def matrix(self) -> str:
        """The instructions of its products."""
        return ", ".join(name for name in self.instructions if re.fullmatch(_MATRIX, name))


def compile_for(arch: str, sample: KernelSample) -> list[Compiled]:
    """The kernels of a call, in the order of their launches."""
    platform = Platform.named(arch)
    return [_read(recipe.compile(platform)) for recipe in sample.recipes(arch)]


def compile_in_subprocess(work: Iterable[tuple[str, KernelSample]]) -> list[list[Compiled] | str]:
    """The same for many samples, in another process; the compiler's message in place of those that could not be compiled."""
    todo = [(arch, asdict(sample)) for arch, sample in work]
    results: list[list[Compiled] | str] = []
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    while len(results) < len(todo):
        rest = json.dumps(todo[len(results) :])
        done = subprocess.run([sys.executable, "-c", program], input=rest, capture_output=True, text=True)
        for line in re.findall(r"^compiled: (.*)$", done.stdout, re.MULTILINE):
            found = json.loads(line)
            results.append(found if isinstance(found, str) else [Compiled(*members) for members in found])
        if len(results) < len(todo):
            results.append(f"the compiler ended with {done.returncode}: {done.stderr[-2000:]}")
    return results


def _read(kernel: Any) -> Compiled:
    figures = _of_cubin(kernel) if "cubin" in kernel.asm else _of_amdgcn(kernel.asm["amdgcn"])
    text = kernel.asm.get("ptx") or kernel.asm["amdgcn"]
    found = sorted(set(_NOTABLE.findall(text)))
    return Compiled(kernel.metadata.name, kernel.metadata.num_warps, kernel.metadata.shared, *figures, found)


def _of_cubin(kernel: Any) -> tuple[int, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(rf"Function {kernel.metadata.name}:\s*REG:(\d+) STACK:(\d+)", said)
    assert found, said
    # A kernel of Triton has nothing else on its stack.
    return int(found[1]), int(found[2])


def _of_amdgcn(text: str) -> tuple[int, int]:
    registers, spilled = (int(re.findall(rf"\.{name}:\s+(\d+)", text)[0]) for name in ("vgpr_count", "vgpr_spill_count"))
    return registers, 4 * spilled


def main() -> None:
    """Reads samples from standard input, and writes a line for each."""
    for arch, members in json.load(sys.stdin):
        try:
            result: Any = compile_for(arch, KernelSample(**members))
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        print("compiled:", json.dumps(result), flush=True)
