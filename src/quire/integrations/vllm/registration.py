"""Registers the backend in vLLM."""

from __future__ import annotations

import logging

from quire.integrations.engines import ENGINES, EngineError
from quire.integrations.vllm.settings import Settings

NAME = "QUIRE"
"""The name of the backend: `--attention-backend QUIRE`."""

_BACKENDS = "quire.integrations.vllm.backend"
CLASSES = {
    NAME: f"{_BACKENDS}.QuireBackend",
    "CPU_ATTN": f"{_BACKENDS}.QuireInPlaceOfCpuAttn",
    "ROCM_ATTN": f"{_BACKENDS}.QuireInPlaceOfRocmAttn",
    "TRITON_ATTN": f"{_BACKENDS}.QuireInPlaceOfTritonAttn",
}
"""The class of each backend. vLLM looks a backend up by the name that its class returns, so each name has a class."""


def register() -> None:
    """Registers Quire's backend in this process; called by vLLM. Calling it again changes nothing.

    Raises:
        EngineError: A setting has a value that is not allowed, or vLLM is missing or has an unsupported version. If no setting asks
            for Quire, an unsupported version is only logged and nothing is registered: vLLM then starts as without Quire.
    """
    settings = Settings.read()
    try:
        ENGINES["vllm"].require()
    except EngineError as error:
        if settings != Settings() or ENGINES["vllm"].installed() is None:
            raise
        logging.getLogger("vllm.quire").warning("the backend %s is not available: %s", NAME, error)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, CLASSES[NAME])
    for name in settings.override:
        register_backend(AttentionBackendEnum[name], CLASSES[name])
