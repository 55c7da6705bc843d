"""The folder of kernels that transformers loads for continuous batching, as it would load a repository of the Hub."""

from __future__ import annotations

import os
from pathlib import Path

FLASH = "quire/flash-attn2"
"""The name for `attn_implementation`. Continuous batching accepts names that contain "flash"; for its own decode path on a GPU it
also looks for the 2."""
VARIABLE = "LOCAL_KERNELS"
"""The environment variable with which the package `kernels` replaces repositories by folders."""


def hub_folder() -> Path:
    """The folder, with the layout of a repository of the Hub: a variant for every device, its module and `metadata.json`. The
    metadata has to name one backend, and its architectures are compared with the device: a CPU has none."""
    return Path(__file__).parent / "hub" / "flash-attn2"


def local_kernels(*replaced: str) -> str:
    """The value of LOCAL_KERNELS that makes Quire's folder known, with what the variable holds already.

    Args:
        replaced: Other repositories that Quire's folder stands in for, such as the only one that a model accepts.
    """
    entries = dict(entry.split("=", 1) for entry in os.environ.get(VARIABLE, "").split(":") if "=" in entry)
    entries |= dict.fromkeys((FLASH, *replaced), str(hub_folder()))
    return ":".join(f"{name}={path}" for name, path in entries.items())


def names_of_folder() -> list[str]:
    """The names by which LOCAL_KERNELS knows Quire's folder."""
    entries = (entry.split("=", 1) for entry in os.environ.get(VARIABLE, "").split(":") if "=" in entry)
    return [name for name, path in entries if Path(path).resolve() == hub_folder().resolve()]
