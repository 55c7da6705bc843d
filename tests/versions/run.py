"""Compiles the GPU kernels with every version of Triton that Quire supports, for cards that need not be here: `make versions`.

    python tests/versions/run.py [--out build/versions.json] [--arches sm90 ...] [--versions 3.9.0 ...]

Each version is downloaded once, into build/triton-VERSION. `make docs` prints the table of versions in docs/kernels.md from the
file that is written. The exit status is 1 if a kernel does not compile or is not what it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.versions import ROOT, VERSIONS, compile_with, environment
from versions.samples import ARCHES, faults, samples_for


def compile_arch(version: str, arch: str) -> Iterator[dict[str, Any]]:
    """One record for each call: its kernels, and what is wrong with them."""
    samples = samples_for(arch)
    for (name, sample), found in zip(samples.items(), compile_with(version, [(arch, one) for one in samples.values()])):
        wrong = faults(arch, sample, found)
        kernels = [] if isinstance(found, str) else found
        yield {"triton": version, "arch": arch, "name": name, "sample": asdict(sample), "kernels": kernels, "faults": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", choices=VERSIONS, default=VERSIONS, help="versions of Triton; all by default")
    parser.add_argument("--arches", nargs="+", choices=ARCHES, default=ARCHES, help="cards; all by default")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "versions.json", help="the file to write")
    asked = parser.parse_args()
    began = time.monotonic()
    for version in asked.versions:
        environment(version)
    print(f"Triton {', '.join(asked.versions)}: installed after {time.monotonic() - began:.0f} s", flush=True)
    records = []
    work = [(version, arch) for arch in asked.arches for version in asked.versions]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (version, arch), found in zip(work, pool.map(lambda one: list(compile_arch(*one)), work)):
            records += found
            bad = [record for record in found if record["faults"]]
            print(f"Triton {version}, {arch}: {len(found)} calls, {len(bad)} of them wrong", flush=True)
            for record in bad:
                print(f"  {record['name']}:", *record["faults"], sep="\n    ", flush=True)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(records))
    print(f"{len(records)} calls in {time.monotonic() - began:.0f} s, written to {asked.out}")
    return int(any(record["faults"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
