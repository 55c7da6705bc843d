"""The settings of the plugin, which users give when they start vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from quire.integrations.engines import EngineError

OVERRIDE = "QUIRE_VLLM_OVERRIDE"
"""Names of vLLM's backends, separated by commas, that Quire takes the place of."""
CHECKED = "QUIRE_VLLM_CHECKED"
"""Whether every call is checked: 0, 1, or `results`."""

OVERRIDABLE = ("CPU_ATTN", "ROCM_ATTN", "TRITON_ATTN")
"""The backends that Quire can take the place of: each is what its platform selects by itself."""
LEVELS = ("0", "1", "results")
CPU = "CPU_ATTN"
"""The backend that vLLM always uses on a CPU, whichever is named."""


class Settings(NamedTuple):
    """What the environment variables of the plugin say."""

    override: tuple[str, ...] = ()
    """The backends that Quire takes the place of."""
    checked: bool = False
    """Whether every call runs within `quire.checked()`, with a ledger in every cache."""
    results: bool = False
    """Whether every result is compared with an exact computation too."""

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings of this process.

        Raises:
            EngineError: A variable has a value that is not allowed.
        """
        given = os.environ if environment is None else environment
        names = tuple(name.strip().upper() for name in given.get(OVERRIDE, "").split(",") if name.strip())
        unknown = [name for name in names if name not in OVERRIDABLE]
        if unknown:
            raise EngineError(f"{OVERRIDE}: got {', '.join(unknown)}; allowed are {', '.join(OVERRIDABLE)}, separated by commas")
        level = given.get(CHECKED, "0").strip().lower() or "0"
        if level not in LEVELS:
            raise EngineError(f"{CHECKED}: got {level!r}; allowed are {', '.join(LEVELS)}")
        return cls(names, level != "0", level == "results")

    def used_on_cpu(self) -> bool:
        """Whether vLLM uses Quire on a CPU.

        Raises:
            EngineError: It does not, but checks are asked for.
        """
        if self.checked and CPU not in self.override:
            raise EngineError(f"{CHECKED}: got a request for checks, but vLLM does not use Quire on a CPU; set {OVERRIDE}={CPU}")
        return CPU in self.override
