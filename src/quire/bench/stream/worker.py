"""One contestant of a stream in a process of its own, so that an environment variable it needs, or a crash, stays there.

Reads the spec as a line of JSON from standard input. Writes a line {"step": N} after every step, then one with the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from quire.bench.stream.contestants import CPU_CONTESTANTS, Contestant
from quire.bench.stream.replay import Eager, replay, warm_up
from quire.bench.stream.result import Result
from quire.bench.stream.setup import Setup, Spec

_SOURCE = str(Path(__file__).parents[3])


def measure(
    name: str, spec: Spec, tell: Callable[[], None], *, python: str = sys.executable, environment: dict[str, str] | None = None
) -> Result:
    """Runs one contestant in a process. If it ends early, the note says how."""
    path = os.pathsep.join(filter(None, (_SOURCE, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [python, "-m", "quire.bench.stream.worker", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | (environment or {}),
    )
    answer: dict[str, object] = {}
    with process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(spec.to_json() + "\n")
        process.stdin.close()
        for line in process.stdout:
            answer = json.loads(line)
            if "step" in answer:
                tell()
        errors = process.stderr.read().strip().splitlines()
        status = process.wait()
    if "contestant" in answer:
        return Result(**answer)  # type: ignore[arg-type]
    return Result(name, note=f"exit status {status}: {errors[-1] if errors else 'without a message'}")


def run(name: str, contestant: Contestant, spec: Spec, tell: Callable[[int], None]) -> Result:
    """Replays the stream in this process."""
    setup = Setup(spec)
    warm_up(setup, contestant(setup, None))
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        tell(done)

    return Result.of(name, replay(setup, Eager(setup, contestant(setup, None)), step))


def main(name: str) -> None:
    import torch

    spec = Spec.from_json(sys.stdin.readline())
    with torch.no_grad():
        result = run(name, CPU_CONTESTANTS[name], spec, lambda done: print(json.dumps({"step": done}), flush=True))
    answer = result.to_dict()
    del answer["own"]
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
