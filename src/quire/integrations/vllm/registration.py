"""Registers the backend in vLLM."""

from __future__ import annotations

import logging

from quire.integrations.engines import ENGINES, EngineError
from quire.integrations.vllm.settings import CPU, OVERRIDE, Settings

_log = logging.getLogger("vllm.quire")
"""A child of vLLM's logger. Warnings only: vLLM loads plugins before it configures logging, and Python then drops information."""

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
        EngineError: A setting has a value that is not allowed or would be without effect, or vLLM is missing or has an unsupported
            version. If no setting asks for Quire, an unsupported version is only logged and nothing is registered: vLLM then starts
            as without Quire.
    """
    settings = Settings.read()
    try:
        ENGINES["vllm"].require()
    except EngineError as error:
        if settings != Settings() or ENGINES["vllm"].installed() is None:
            raise
        _log.warning("the backend %s is not available: %s", NAME, error)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    used = settings.used_on_cpu() if _on_cpu() else True
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, CLASSES[NAME])
        if not used:
            _log.warning("Quire is not used: on a CPU vLLM ignores --attention-backend; to use Quire, set %s=%s", OVERRIDE, CPU)
    for name in settings.override:
        if AttentionBackendEnum[name].get_path() != CLASSES[name]:
            register_backend(AttentionBackendEnum[name], CLASSES[name])
            _log.warning("Quire takes the place of %s", name)


def _on_cpu() -> bool:
    # vLLM resolves its platform when it parses arguments, before it loads plugins: this only reads it. No device is initialised.
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
