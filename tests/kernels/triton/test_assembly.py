"""The PTX that unpacks elements of 4 bits, computed here instruction by instruction for every code: only a GPU could run it."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton.device import formats
from support import nvfp4

VALUES = [*nvfp4.MAGNITUDES, *(-number for number in nvfp4.MAGNITUDES)]
"""Of e2m1, in the order of its codes."""
TYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def halves_of(register: int, kind: str) -> torch.Tensor:
    return torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32).to(torch.int16).view(TYPES[kind]).double()


def register_of(numbers: torch.Tensor, kind: str) -> int:
    rounded = numbers.to(TYPES[kind])
    assert torch.equal(rounded.double(), numbers), "a result is rounded"
    low, high = (int(number) & 0xFFFF for number in rounded.view(torch.int16))
    return low | high << 16


def compute(assembly: str, inputs: list[int]) -> int:
    """The result $0 of PTX whose other operands are registers of 32 bits."""
    values = {f"${nth}": value for nth, value in enumerate(inputs, start=1)}

    def value(operand: str) -> int:
        return values[operand] if operand in values else int(operand, 0)

    for name, operands in re.findall(r"^\s*([a-z]\S*) (.*);$", assembly.replace("{", "").replace("}", ""), re.MULTILINE):
        target, *given = (operand.strip() for operand in operands.split(","))
        x = [value(operand) for operand in given]
        code, *_, kind = name.split(".")
        if code == "mov":
            values[target] = x[0]
        elif code == "prmt":
            source = x[0] | x[1] << 32
            values[target] = sum((source >> 8 * (x[2] >> 4 * n & 7) & 0xFF) << 8 * n for n in range(4))
        elif code in ("shl", "shr"):
            values[target] = (x[0] << x[1] if code == "shl" else x[0] >> x[1]) & 0xFFFFFFFF
        elif code == "and":
            values[target] = x[0] & x[1]
        elif code == "lop3":
            bits = [[one >> n & 1 for n in range(32)] for one in x[:3]]
            values[target] = sum((x[3] >> (4 * a + 2 * b + c) & 1) << n for n, (a, b, c) in enumerate(zip(*bits)))
        elif code == "fma":
            a, b, c = (halves_of(one, kind) for one in x)
            values[target] = register_of(a * b + c, kind)
        else:
            assert code == "mul", name
            values[target] = register_of(halves_of(x[0], kind) * halves_of(x[1], kind), kind)
    return values["$0"]


def units_with(code: int, at: int, bits: int) -> list[int]:
    """Two units of `bits` bits that have codes at bit `at`, all others set, in registers."""
    codes = [code, 15 - code]
    units = [((1 << bits) - 1) & ~(15 << at) | one << at for one in codes]
    return units if bits == 32 else [units[0] | units[1] << 16]


@pytest.mark.parametrize("dot, kind", [("bf16", "bf16x2"), ("fp16", "f16x2")])
@pytest.mark.parametrize("bits", [16, 32])
def test_int4_is_unpacked(bits: int, dot: str, kind: str) -> None:
    for at in range(0, bits, 4):
        for code in range(16):
            result = compute(formats.int4_assembly(bits, at, dot), units_with(code, at, bits))
            assert halves_of(result, kind).tolist() == [one - 16 if one > 7 else one for one in (code, 15 - code)], (at, code)


@pytest.mark.parametrize("bits", [16, 32])
def test_e2m1_is_unpacked_and_scaled(bits: int) -> None:
    scale = 0x5C003480  # 256 and 9 / 32
    for at in range(0, bits, 4):
        for code in range(16):
            result = compute(formats.e2m1_assembly(bits, at), [*units_with(code, at, bits), scale])
            expected = torch.tensor([VALUES[code], VALUES[15 - code]]).double() * halves_of(scale, "f16x2") / 2**14
            assert torch.equal(halves_of(result, "f16x2"), expected), (at, code)


@pytest.mark.parametrize("bits", [16, 32])
def test_operands_are_registers(bits: int) -> None:
    """One for the result, and each operand that the assembly names."""
    for assembly, more in ((formats.int4_assembly(bits, 4, "bf16"), 0), (formats.e2m1_assembly(bits, 4), 1)):
        named = sorted(set(re.findall(r"\$\d", assembly)))
        assert named == [f"${n}" for n in range(len(formats.operands_of(bits, more).split(",")))]
