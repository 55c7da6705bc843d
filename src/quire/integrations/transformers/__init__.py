"""Quire in transformers: `attn_implementation="quire"` for `generate`, "quire/flash-attn2" for `generate_batch`.

Importing this package registers both.
"""

from __future__ import annotations

from quire.integrations.transformers.hub import FLASH, hub_folder, local_kernels
from quire.integrations.transformers.registration import NAME, register

register()

from quire.integrations.transformers.alibi import use_quire  # noqa: E402  # after the check of the installed version

__all__ = ["register", "use_quire", "hub_folder", "local_kernels", "NAME", "FLASH"]
