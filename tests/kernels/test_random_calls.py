"""Random calls through the kernels of the CPU: the generator and the oracle of `tests/gpu/test_random.py` are themselves tested."""

from __future__ import annotations

import pytest
import torch

import quire
from gpu.random_calls import RandomCall, draw, draw_write
from support import kernels

SEEDS = range(24)
KERNELS = [name for name in ("torch", "native") if name == "torch" or kernels.levels()]


def attend(call: RandomCall, kernel: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    result = quire.attend(
        call.q, call.cache, call.batch, call.options, new=call.new, out=call.fresh_out(), lse=call.lse, kernel=kernel
    )
    return result if isinstance(result, tuple) else (result, None)


@pytest.mark.parametrize("seed", SEEDS)
def test_attend(seed: int) -> None:
    call = draw(seed, small=True)
    for kernel in KERNELS:
        wrong = call.wrong(*attend(call, kernel))
        assert wrong is None, f"{kernel}: {wrong} in {call.told}"


@pytest.mark.parametrize("seed", range(24))
def test_attend_with_spans(seed: int) -> None:
    call = draw(seed, small=True, spans=True)
    assert not [v for v in quire.check(call.q, call.cache, call.batch, call.options, new=call.new) if not v.harmless]
    for kernel in KERNELS:
        wrong = call.wrong(*attend(call, kernel))
        assert wrong is None, f"{kernel}: {wrong} in {call.told}"


@pytest.mark.parametrize("seed", SEEDS)
def test_write(seed: int) -> None:
    for kernel in KERNELS:
        write = draw_write(seed, small=True)
        quire.write(write.k, write.v, write.cache, write.batch, slots=write.slots, kernel=kernel)
        assert write.wrong() is None, f"{kernel}: {write.wrong()}"


def test_a_wrong_output_is_found() -> None:
    """One element of one output, by a hundredth of its size: found in every call whose outputs can tell."""
    found = asked = 0
    for seed in SEEDS:
        call = draw(seed, small=True)
        out, lse = attend(call, "torch")
        if call.live and call.out_format == "fp32" and call.allowed.max() < 0.01:
            asked += 1
            out[call.live - 1, 0, 0] += 0.05
            found += call.wrong(out, lse) is not None
    assert asked and found == asked


def test_a_wrong_lse_is_found() -> None:
    call = next(call for call in (draw(seed, small=True) for seed in SEEDS) if call.lse and call.live)
    out, lse = attend(call, "torch")
    assert lse is not None and call.wrong(out, lse) is None
    lse[0, 0] += 1e-2
    assert "LSE" in str(call.wrong(out, lse))


def test_a_wrong_byte_is_found() -> None:
    write = draw_write(1, small=True)
    quire.write(write.k, write.v, write.cache, write.batch, slots=write.slots, kernel="torch")
    write.storage[0].view(torch.uint8).view(-1)[3] ^= 1
    assert "1 of" in str(write.wrong())
