"""Quire as an attention backend of vLLM: the backend QUIRE, and on request in place of TRITON_ATTN, ROCM_ATTN or CPU_ATTN.

vLLM calls `register` in every process (entry point `vllm.general_plugins`). Settings are environment variables, because a plugin
has no other configuration and the registration must be the same in every process: see `settings`.
"""

from __future__ import annotations

from quire.integrations.vllm.registration import register

__all__ = ["register"]
