import sys
from pathlib import Path

from quire.kernels.triton.compiler.report import render

if len(sys.argv) != 2:
    sys.exit("usage: python -m quire.kernels.triton VERSIONS.json (what `make versions` writes)")
print(render(Path(sys.argv[1])), end="")
