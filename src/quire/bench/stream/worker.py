"""One implementation of a stream in its own process, so that an environment variable that it needs, or a crash, affects no other.

Reads the spec as a line of JSON from standard input. Writes a line {"step": N} after every step, then one with the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from quire.bench.stream.implementations import CPU_IMPLEMENTATIONS, StreamImplementation
from quire.bench.stream.replay import EagerRunner, replay, warm_up
from quire.bench.stream.result import StreamResult
from quire.bench.stream.setup import Setup, Spec

_SOURCE = str(Path(__file__).parents[3])


def measure(
    name: str, spec: Spec, progress: Callable[[], None], *, python: str = sys.executable, environment: dict[str, str] | None = None
) -> StreamResult:
    """Runs one implementation in a process. If it ends early, the note says how."""
    path = os.pathsep.join(filter(None, (_SOURCE, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [python, "-m", "quire.bench.stream.worker", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | (environment or {}),
        start_new_session=True,  # Ctrl-C reaches the parent alone, which ends the worker
    )
    answer: dict[str, object] = {}
    with process:
        assert process.stdin and process.stdout and process.stderr
        try:
            process.stdin.write(spec.to_json() + "\n")
            process.stdin.close()
            for line in process.stdout:
                answer = json.loads(line)
                if "step" in answer:
                    progress()
            errors = process.stderr.read().strip().splitlines()
        except BaseException:
            process.kill()
            raise
        status = process.wait()
    if "implementation" in answer:
        return StreamResult(**answer)  # type: ignore[arg-type]
    return StreamResult(name, note=f"exit status {status}: {errors[-1] if errors else 'without a message'}")


def run(name: str, implementation: StreamImplementation, spec: Spec, progress: Callable[[int], None]) -> StreamResult:
    """Replays the stream in this process."""
    setup = Setup(spec)
    warm_up(setup, implementation(setup, None))
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done)

    return StreamResult.of(name, replay(setup, EagerRunner(setup, implementation(setup, None)), step))


def main(name: str) -> None:
    import torch

    spec = Spec.from_json(sys.stdin.readline())
    with torch.no_grad():
        result = run(name, CPU_IMPLEMENTATIONS[name], spec, lambda done: print(json.dumps({"step": done}), flush=True))
    answer = result.to_dict()
    del answer["own"]
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
