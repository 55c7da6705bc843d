"""The catalogue of faults: used to prove that cases can fail, to name what failed, and to teach."""

from __future__ import annotations

from quire.conformance.faults.fault import Fault, Parameters, Seen
from quire.conformance.faults.precision import PRECISION
from quire.conformance.faults.reading import READING
from quire.conformance.faults.results import RESULTS
from quire.conformance.faults.scoring import SCORING

CATALOGUE: tuple[Fault, ...] = (*READING, *SCORING, *RESULTS, *PRECISION)
BY_NAME = {fault.name: fault for fault in CATALOGUE}

__all__ = ["BY_NAME", "CATALOGUE", "Fault", "Parameters", "Seen"]
