"""One implementation in its own process, so that an environment variable that it needs, or a crash, affects no other.

Reads commands from standard input, a line each, and answers with a line of JSON:
    {"build": WORKLOAD, "folder": F}   creates or maps the data, checks the result -> {"error": ..., "budget": ...}, or
                                       {"absent": true} if the implementation has no answer to this workload
    {"time": SECONDS}                  runs for about as long                      -> {"seconds": [...]}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
"""Without this, 16-bit products of torch end the process on CPUs that advertise AMX without its palette."""
LIMIT = 300.0
"""Seconds that an answer may take: an implementation may have to compile first."""


class Worker:
    """A worker process, as its parent sees it."""

    def __init__(self, implementation: str, environment: dict[str, str], python: str = sys.executable):
        self.process = subprocess.Popen(
            [python, "-m", "quire.bench.worker", implementation],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which ends its workers
        )

    def request(self, command: dict[str, Any]) -> dict[str, Any]:
        """Sends a command and waits for its answer; {"died": reason} if the worker ended, or was ended for taking too long."""
        assert self.process.stdin and self.process.stdout
        late = threading.Timer(LIMIT, self.process.kill)
        late.start()
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            in_time = not late.finished.is_set()
            late.cancel()
        if not answer and not in_time:
            return {"died": f"no answer in {LIMIT:.0f} s"}
        return json.loads(answer) if answer else {"died": f"exit status {self.process.wait()}"}

    def close(self) -> None:
        """Ends the worker. Leaving the block closes the pipes and waits."""
        with self.process:
            self.process.kill()


def main(implementation: str) -> None:
    from quire.bench.case import build
    from quire.bench.implementations import CPU_IMPLEMENTATIONS
    from quire.bench.reference_check import BenchReference
    from quire.bench.workloads import Workload

    run = None
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any]
        if "build" in command:
            case = build(Workload.from_json(command["build"]), folder=command["folder"])
            bound = CPU_IMPLEMENTATIONS[implementation](case)
            if bound is None:
                answer = {"absent": True}
            else:
                run = bound.run
                answer = BenchReference(case).check(run(), bound.q_format)._asdict()
        else:
            assert run is not None
            seconds: list[float] = []
            until = time.perf_counter() + command["time"]
            while len(seconds) < 3 or time.perf_counter() < until:
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
            answer = {"seconds": seconds}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
