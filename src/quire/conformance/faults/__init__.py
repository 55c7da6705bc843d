"""The catalogue of faults. It is used to verify that cases detect faults, and to identify the fault of a kernel."""

from __future__ import annotations

from quire.conformance.faults.behaviour import BEHAVIOUR
from quire.conformance.faults.bias import BIAS
from quire.conformance.faults.fault import Fault, Observation, Parameters
from quire.conformance.faults.forms import FORMS
from quire.conformance.faults.hadamard import HADAMARD
from quire.conformance.faults.heads import HEADS
from quire.conformance.faults.indices import INDICES
from quire.conformance.faults.keys import KEYS
from quire.conformance.faults.latent import LATENT
from quire.conformance.faults.mask import MASK
from quire.conformance.faults.output import OUTPUT
from quire.conformance.faults.pages import PAGES
from quire.conformance.faults.precision import PRECISION
from quire.conformance.faults.prefixes import PREFIXES
from quire.conformance.faults.rotation import ROTATION
from quire.conformance.faults.scale import SCALE
from quire.conformance.faults.select import SELECT
from quire.conformance.faults.shard import SHARD
from quire.conformance.faults.softmax import SOFTMAX
from quire.conformance.faults.spans import SPANS
from quire.conformance.faults.stored import STORED
from quire.conformance.faults.written_numbers import WRITTEN_NUMBERS
from quire.conformance.faults.written_places import WRITTEN_PLACES
from quire.conformance.faults.zero_points import ZEROS

ATTENTION: tuple[Fault, ...] = (
    *INDICES,
    *PAGES,
    *STORED,
    *ZEROS,
    *FORMS,
    *SCALE,
    *MASK,
    *SPANS,
    *KEYS,
    *SHARD,
    *SELECT,
    *PREFIXES,
    *LATENT,
    *HADAMARD,
    *BIAS,
    *HEADS,
    *OUTPUT,
    *SOFTMAX,
    *BEHAVIOUR,
    *PRECISION,
)
"""Faults of attention, and of how a kernel behaves."""
WRITES: tuple[Fault, ...] = (*WRITTEN_PLACES, *WRITTEN_NUMBERS, *ROTATION)
"""Faults of writes."""
CATALOGUE = (*ATTENTION, *WRITES)
BY_NAME = {fault.name: fault for fault in CATALOGUE}

__all__ = ["ATTENTION", "BY_NAME", "CATALOGUE", "WRITES", "Fault", "Observation", "Parameters"]
