"""Quire as a flash-attention implementation of PyTorch. Importing this package registers the name "quire"; nothing is replaced yet:

    import quire.integrations.pytorch
    torch.nn.attention.activate_flash_attention_impl("quire")

From then on `torch.nn.attention.varlen.varlen_attn` and `varlen_attn_out` run on Quire, on the CPU, on CUDA and on ROCm.
`torch.nn.attention.restore_flash_attention_impl()` undoes it.
"""

from __future__ import annotations

from quire.integrations.pytorch.registration import NAME, register

__all__ = ["NAME", "register"]

register()
