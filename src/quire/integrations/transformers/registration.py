"""Makes Quire known to transformers, through its public registries alone."""

from __future__ import annotations

import os

from quire.integrations.engines import ENGINES, EngineError
from quire.integrations.transformers.hub import FLASH, VARIABLE, local_kernels, names_of_folder

NAME = "quire"
"""The name for `attn_implementation` with `generate`."""


def register(*, replace: str | None = None) -> None:
    """Registers `attn_implementation="quire"`, and adds the kernel folder of `quire/flash-attn2` to LOCAL_KERNELS. Importing
    `quire.integrations.transformers` calls it; calling it again is harmless.

    Args:
        replace: A repository of the Hub for which Quire's folder is loaded instead, in this process. For models that accept only
            certain repositories: GPT-OSS accepts "kernels-community/vllm-flash-attn3".

    Raises:
        EngineError: transformers is not installed, or has an unsupported version; or `replace` is given and the package kernels is
            not installed.
    """
    ENGINES["transformers"].require()
    from transformers import AttentionInterface, AttentionMaskInterface

    from quire.integrations.transformers.dense import dense_attention
    from quire.integrations.transformers.refused_models import refuse_models
    from quire.integrations.transformers.visible_keys import visible_keys_mask

    AttentionInterface.register(NAME, dense_attention)
    AttentionMaskInterface.register(NAME, visible_keys_mask)
    refuse_models((NAME, FLASH))
    os.environ[VARIABLE] = local_kernels(*(() if replace is None else (replace,)))
    if replace is not None:
        _forget_failures()


def _forget_failures() -> None:
    """Loads Quire's folder under its own name. transformers remembers the kernel that it tried last, also if it could not be
    loaded, and does not try it again: a model that had failed without `replace` would be made without an attention function."""
    if "kernels" in ENGINES["transformers"].missing():
        raise EngineError(f"replace needs the package kernels; to get it: pip install 'quire[{ENGINES['transformers'].extra}]'")
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    lazy_import_flash_attention(FLASH)


def register_paged() -> None:
    """Registers Quire's functions for paged caches and their masks under every name by which LOCAL_KERNELS knows its folder."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from quire.integrations.transformers.paged import paged_attention
    from quire.integrations.transformers.refused_models import refuse_models
    from quire.integrations.transformers.visible_keys import flash_mask

    refuse_models(names_of_folder())
    for name in names_of_folder():
        AttentionInterface.register(name, paged_attention)
        AttentionMaskInterface.register(name, flash_mask)
