"""Quire in programs that call FlashInfer, through FlashInfer's own trace-apply: its calls of batch decode and prefill run on Quire.

In a program: `quire.integrations.flashinfer.enable(q_heads=32, kv_heads=8, head_dim=128, page_size=16)`. Without changing it, by
files that FlashInfer reads when it is imported:

    python -m quire.integrations.flashinfer DIR --q-heads 32 --kv-heads 8 --head-dim 128 --page-size 16
    FLASHINFER_TRACE_APPLY=1 FLASHINFER_TRACE_APPLY_PATH=DIR python serve.py
"""

from __future__ import annotations

from quire.integrations.flashinfer.definitions import Sizes, enable, write

__all__ = ["Sizes", "enable", "write"]
