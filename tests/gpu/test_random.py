"""Random calls against an independent oracle, new ones in every run, through every kernel of the catalogue that takes them.

pytest tests/gpu/test_random.py --random-seconds 600          longer
pytest tests/gpu/test_random.py --random-seed 123 -k attend-0 a run again, from its first seed
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

import quire
from gpu.calls import DEVICE, bits
from gpu.random_calls import RandomCall, draw, draw_write
from support import interpreter

PARTS = 14
"""As many as processes that `run.py` starts: each makes calls of its own."""
REHEARSED = 2
"""Calls that are made in the interpreter, where there is no GPU."""
MOST_FAILURES = 4


def seeds(config: pytest.Config, part: int) -> Iterator[int]:
    """Seeds until the time is over, or a few in the interpreter. The first is printed."""
    given = config.getoption("--random-seed")
    first = given if given is not None else part if interpreter.ON else random.SystemRandom().randrange(2**40)
    print(f"part {part}: --random-seed {first}", flush=True)
    end = time.monotonic() + config.getoption("--random-seconds") / 2
    seed = first
    while seed < first + REHEARSED if interpreter.ON else time.monotonic() < end or seed == first:
        yield seed
        seed += 1


def candidates(call: RandomCall) -> list[str]:
    """The kernels that take the call."""
    decision = quire.explain(call.q, call.cache, call.batch, call.options, new=call.new, out=call.out, lse=call.lse)
    names = [candidate.kernel.name for candidate in decision.candidates if not candidate.refusals]
    return [name for name in names if name not in ("torch", "native")] if interpreter.ON else names


def wrong_by(call: RandomCall, kernel: str) -> str | None:
    """What is wrong with a kernel's results, or None. The second call finds its launcher prepared."""
    results = []
    for _ in range(2):
        result = quire.attend(
            call.q, call.cache, call.batch, call.options, new=call.new, out=call.fresh_out(), lse=call.lse, kernel=kernel
        )
        out, lse = result if isinstance(result, tuple) else (result, None)
        results.append((bits(out).clone(), None if lse is None else bits(lse).clone()))
    wrong = call.wrong(out, lse)
    if wrong is None and not torch.equal(results[0][0], results[1][0]):
        wrong = "the second call gave other bits"
    return wrong


def wrong_count(call: RandomCall) -> str | None:
    """Whether the ledger's check counts the slots that were not written: a third of those that it must ask for."""
    ledger = call.cache.ledger
    assert ledger is not None
    ledger.clear()
    written = [pair for at, pair in enumerate(call.needed) if at % 3]
    if written:
        slots, positions = torch.tensor(written, device=call.q.device).T
        ledger.record(slots, positions)
    quire.attend(call.q, call.cache, call.batch, call.options, new=call.new, out=call.fresh_out(), lse=call.lse)
    found, missing = int(ledger.violations[0]), len(call.needed) - len(written)
    ledger.clear()
    return None if found == missing else f"the ledger's check counted {found} slots instead of {missing}"


def attended(seed: int) -> Iterator[tuple[str, str | None]]:
    """The kernels that a call went through, and what was wrong."""
    call = draw(seed, small=interpreter.ON).on(DEVICE)
    names = candidates(call)
    if not interpreter.ON:
        yield "audit", wrong_count(call)
    call.cache.ledger = None
    for kernel in names:
        yield kernel, wrong_by(call, kernel)


def written(seed: int) -> Iterator[tuple[str, str | None]]:
    for kernel in ("triton",) if interpreter.ON else ("triton", "torch"):
        write = draw_write(seed, DEVICE, small=interpreter.ON)
        quire.write(write.k, write.v, write.cache, write.batch, slots=write.slots, kernel=kernel)
        yield f"write by {kernel}", write.wrong()


@pytest.mark.parametrize("part", range(1 if interpreter.ON else PARTS))
@pytest.mark.parametrize("made", [attended, written], ids=["attend", "write"])
def test_random(
    made: Callable[[int], Iterator[tuple[str, str | None]]],
    part: int,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> None:
    failures: list[str] = []
    ran: Counter[str] = Counter()
    for seed in seeds(pytestconfig, part):
        try:
            for kernel, wrong in made(seed):
                ran[kernel] += 1
                failures += [] if wrong is None else [f"--random-seed {seed}, {kernel}: {wrong}"]
        except Exception as error:
            # After a fault on the card nothing else would run.
            pytest.fail(f"--random-seed {seed}: {type(error).__name__}: {error}\n" + "\n".join(failures))
        if len(failures) >= MOST_FAILURES:
            break
    record_property(f"random calls, part {part}", dict(ran))
    assert ran and not failures, "\n".join(failures)
