"""Runs the GPU tests in several processes at once, since compiling takes longer than running; then compute-sanitizer.

    python3 tests/gpu/run.py [--reports FOLDER] [paths or options of pytest ...]

Needs torch, Triton, numpy and pytest. Prints what failed, then one line with all counts. What all processes said stays in FOLDER.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
ON_DEVICE = "tests/kernels/triton/on_device"
TESTS = ["tests/gpu", *(f"{ON_DEVICE}/test_{name}.py" for name in ("codes", "hopper", "hopper_spans"))]
PROCESSES = 14
"""At most; one core each, two are left to the driver and the system."""
LIMIT = 480
"""Seconds after which a process is given up."""
SANITIZER_LIMIT = 45
TOOLS = ("memcheck", "racecheck")
HANDED = ("prefill.py",)
"""Kernels whose warps have different work. The compiler hands it to them through shared memory, at barriers that racecheck does not
follow, and says of that code that it stands in these files. What is ours in shared memory is not there, but in
`ring_buffer.py`, `copies.py`, `producer.py` and `consumer.py`."""


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}


@contextmanager
def side_by_side() -> Iterator[dict[str, str]]:
    """What lets processes run on the card at once, where NVIDIA's daemon for that (MPS) is installed and starts: without it they
    take turns, and the tests twice as long. It serves these processes alone."""
    control = shutil.which("nvidia-cuda-mps-control")
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        where = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        own = {**os.environ, **where}
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started = control is not None and subprocess.run([control, "-d"], env=own, **quiet).returncode == 0
        sees = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"]
        works = started and subprocess.run(sees, env=own, **quiet).returncode == 0
        try:
            yield where if works else {}
        finally:
            if started and control is not None:
                subprocess.run([control], input=b"quit\n", env=own, **quiet)


def run_tests(arguments: list[str], processes: int, folder: Path, **where: str) -> Counter[str]:
    """The counts of all processes together."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-p", "support.share"]
    running = {}
    for at in range(processes):
        share = environment(GPU_TEST_SHARE=f"{at}/{processes}", **where)
        with open(folder / f"{at}.txt", "w") as said:
            one = [*command, f"--junitxml={folder / f'{at}.xml'}", *arguments]
            running[at] = subprocess.Popen(one, cwd=ROOT, env=share, stdout=said, stderr=subprocess.STDOUT)
    counts: Counter[str] = Counter()
    begin = time.monotonic()
    for at, process in running.items():
        try:
            process.wait(max(1.0, LIMIT - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        counts += read(at, process.returncode, folder)
    return counts


def read(at: int, code: int, folder: Path) -> Counter[str]:
    """What one process found. Failures are printed; one that left no report failed as a whole."""
    report, said = folder / f"{at}.xml", (folder / f"{at}.txt").read_text(errors="replace")
    # 5: its share was empty.
    if code not in (0, 1, 5) or not report.exists():
        print(f"process {at} ended with {code} and without a result:\n{said[-2500:]}", flush=True)
        return Counter(died=1)
    counts: Counter[str] = Counter()
    told = 0
    for case in ElementTree.parse(report).iter("testcase"):
        failed = [child for kind in ("failure", "error") for child in case.findall(kind)]
        counts["failed" if failed else "skipped" if case.find("skipped") is not None else "passed"] += 1
        for child in failed:
            # After a fault on the card everything fails: the first few tell it.
            text = "\n" + (child.text or "")[-900:] if told < 2 else ""
            print(f"FAILED {case.get('classname')}::{case.get('name')}{text}", flush=True)
            told += 1
    return counts


def start_sanitizer(tool: str, folder: Path) -> subprocess.Popen[bytes] | None:
    """compute-sanitizer over the small cases, if it is here."""
    found = shutil.which("compute-sanitizer")
    if found is None:
        return None
    # Without torch's own pool every tensor is an allocation by itself: what lies beside it is nobody's, and an overrun shows.
    own = environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1") if tool == "memcheck" else environment()
    command = [
        "timeout",
        str(SANITIZER_LIMIT),
        found,
        "--tool",
        tool,
        "--error-exitcode",
        "99",
        sys.executable,
        "tests/gpu/sanitize.py",
    ]
    with open(folder / f"{tool}.txt", "wb") as said:
        return subprocess.Popen(command, cwd=ROOT, env=own, stdout=said, stderr=subprocess.STDOUT)


def read_sanitizer(tool: str, process: subprocess.Popen[bytes] | None, folder: Path) -> bool:
    """Prints what a tool found; whether it found an error. That it is missing, slow or refuses is said, and is no error of ours."""
    name = f"compute-sanitizer --tool {tool}:"
    if process is None:
        print(name, "not on PATH, nothing was looked at")
        return False
    code = process.wait()
    lines = (folder / f"{tool}.txt").read_text(errors="replace").splitlines()
    for line in [line for line in lines if "SUMMARY" in line]:
        print(name, line.strip("= "))
    handed, ours = hazards(lines)
    if code == 99 and handed and not ours:
        print(name, f"all {handed} are the compiler's handing of work to warps, none is in the code of the kernels")
        code = 0
    if code == 99:
        print("\n".join(lines[:80]))
    elif code == 124:
        print(name, f"did not end within {SANITIZER_LIMIT} s. It said:\n" + "\n".join(lines[-5:]))
    elif not any(line.startswith("sanitize:") for line in lines):
        print(name, f"ended with {code} before the cases did. It said:\n" + "\n".join(lines[-15:]))
    return code == 99


def hazards(lines: list[str]) -> tuple[int, int]:
    """How many of racecheck's hazards are the compiler's own, and how many are ours: one access in our code makes it ours."""
    handed = ours = 0
    blocks = "\n".join(line.strip("= ") for line in lines).split("Error: ")[1:]
    for block in blocks:
        places = re.findall(r" in (\S+?):\d+", block.split("\n\n")[0])
        foreign = bool(places) and block.startswith("Race reported") and all(place in HANDED for place in places)
        handed, ours = handed + foreign, ours + (not foreign)
    return handed, ours


def main() -> int:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=Path, help="where to leave what all processes said")
    given, arguments = parser.parse_known_args()
    arguments = arguments or TESTS
    processes = max(1, min(PROCESSES, (os.cpu_count() or 1) - 2))
    with tempfile.TemporaryDirectory() as name:
        folder = (given.reports or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.xml"):
            old.unlink()
        with side_by_side() as where:
            counts = run_tests(arguments, processes, folder, **where)
        tested = time.monotonic() - begin
        tools = {tool: start_sanitizer(tool, folder) for tool in TOOLS}
        found = [tool for tool, process in tools.items() if read_sanitizer(tool, process, folder)]
    if not counts["passed"]:
        print("nothing passed: is there a GPU that torch can see?")
    parts = [f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped")]
    parts += [f"{counts['died']} processes of {processes} without a result"] * bool(counts["died"])
    parts += [f"errors found by {', '.join(found)}"] * bool(found)
    how = f"{tested:.0f} s the tests, in {processes} processes {'side by side' if where else 'taking turns'}"
    print(f"gpu-test: {', '.join(parts)} in {time.monotonic() - begin:.0f} s ({how})")
    return int(bool(counts["failed"] or counts["died"] or found or not counts["passed"]))


if __name__ == "__main__":
    sys.exit(main())
