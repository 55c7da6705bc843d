"""`python -m quire.conformance`: prints the catalogue of faults as Markdown."""

from __future__ import annotations

from quire.conformance.reporting.fault_document import render

if __name__ == "__main__":
    print(render(), end="")
