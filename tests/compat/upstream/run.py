"""Runs vLLM's own tests of its paged attention, unmodified, against `quire.compat.vllm`.

    python tests/compat/upstream/run.py FOLDER [--cpu] [pytest's own arguments]

FOLDER holds, at any depth, test_prefix_prefill.py and test_triton_unified_attention.py of vllm-project/vllm a014e35f38c (a checkout
of it will do). vLLM itself is not needed. All cases of a GPU: add --optional. On a CPU: add --cpu, which runs a sample.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = ("test_prefix_prefill.py", "test_triton_unified_attention.py")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    folder, *rest = arguments
    sys.path[:0] = [str(HERE), str(HERE.parents[2] / "src")]
    found = [next(iter(sorted(Path(folder).resolve().rglob(name))), None) for name in FILES]
    files = [str(path) for path in found if path]
    if not files:
        print(f"{folder}: holds neither of {', '.join(FILES)}", file=sys.stderr)
        return 2
    import pytest

    # Neither this project's settings nor vLLM's conftest, which needs most of vLLM, are for these files.
    apart = ["-c", os.devnull, "--rootdir", str(Path(folder).resolve()), "--noconftest", "-p", "no:cacheprovider"]
    return int(pytest.main([*apart, "-p", "plugin", "--import-mode=importlib", *files, *rest]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
