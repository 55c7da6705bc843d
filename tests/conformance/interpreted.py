"""`quire conform` over our Triton kernels in Triton's interpreter, on any machine:

python tests/conformance/interpreted.py triton-mixed --level smoke
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, or it is too late
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from quire.cli import main  # noqa: E402
from quire.platform import Platform  # noqa: E402
from support import interpreter  # noqa: E402

if __name__ == "__main__":
    interpreter.install()
    # Not sm90: there Gluon's kernels are preferred, and these run in the emulator of `support.hopper` alone.
    Platform.detect = classmethod(lambda cls, device=None: cls.named("sm100"))  # type: ignore[assignment, method-assign]
    raise SystemExit(main(["conform", *sys.argv[1:], "--device", "cpu"]))
