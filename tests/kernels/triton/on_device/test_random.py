"""A few random calls, small ones, by the generator of `tests/gpu/test_random.py`: attention, writes, and the ledger's check."""

from __future__ import annotations

import pytest
import torch

from gpu.random_calls import TYPES, draw, draw_write
from quire.contract.call import Call
from quire.kernels.triton.host.launcher import AttendLauncher
from quire.launch import described
from quire.options import PLAIN
from support.launched import audit, platform_at, write

SEEDS = (1, 5, 9)


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
@pytest.mark.parametrize("seed, spans", [*((seed, False) for seed in SEEDS), (2, True), (4, True), (7, True)])
def test_attend(seed: int, spans: bool, kernel: str, device: str) -> None:
    call = draw(seed, small=True, spans=spans).on(device)
    out = call.fresh_out()
    shape = (call.q.shape[0], call.q.shape[1], call.cache.v_head_dim)
    if out is None:
        out = torch.zeros(shape, dtype=TYPES[call.out_format], device=device)
    lse = torch.full(shape[:2], torch.nan, device=device) if call.lse else None
    options = call.options or PLAIN
    problem, _ = described("attend", Call(call.cache, call.batch, call.q, options, call.new, out, with_lse=call.lse))
    launched = Call(call.cache, call.batch, call.q, options, call.new, out, lse=lse, zero_padding=call.out is None)
    AttendLauncher(kernel, problem, platform_at(device))(launched)
    assert call.wrong(out, lse) is None, f"{call.wrong(out, lse)} in {call.told}"


@pytest.mark.parametrize("seed", SEEDS)
def test_write(seed: int, device: str) -> None:
    made = draw_write(seed, device, small=True)
    write(made.k, made.v, made.cache, made.batch, made.slots)
    assert made.wrong() is None


@pytest.mark.parametrize("seed", SEEDS)
def test_the_audit_checks_every_needed_slot(seed: int, device: str) -> None:
    call = draw(seed, small=True).on(device)
    held = call.cache.ledger
    assert held is not None
    written = call.needed[1:]
    if written:
        slots, positions = torch.tensor(written, device=device).T
        held.record(slots, positions)
    audit(Call(call.cache, call.batch, call.q, call.options or PLAIN, call.new))
    assert int(held.violations[0]) == len(call.needed) - len(written)
