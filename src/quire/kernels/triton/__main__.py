from quire.kernels.triton.report import render

print(render(), end="")
