"""Quire as an attention backend of SGLang, loaded through its entry points: `--attention-backend quire`."""

from __future__ import annotations

from typing import Any

from quire.integrations.engines import ENGINES

NAME = "quire"
"""The name of the backend."""


def register() -> None:
    """Makes the name known to SGLang, which calls this in every process. A second call changes nothing.

    Raises:
        EngineError: This release of SGLang is not supported. SGLang logs the message and does not know the name.
    """
    ENGINES["sglang"].require()
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(create)
    for choices, add in (
        (server_args.ATTENTION_BACKEND_CHOICES, server_args.add_attention_backend_choices),
        (server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES, server_args.add_deterministic_attention_backend_choices),
        (
            server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
            server_args.add_radix_supported_deterministic_attention_backend_choices,
        ),
    ):
        if NAME not in choices:
            add([NAME])


def create(runner: Any) -> Any:
    """The backend of one model runner.

    Raises:
        EngineError: The model or a setting needs something that Quire does not have.
    """
    from quire.integrations.sglang.backend import QuireAttnBackend
    from quire.integrations.sglang.support import require_supported

    require_supported(runner)
    return QuireAttnBackend(runner)
