from quire.contract.document import render

print(render(), end="")
