"""The name "quire" in torch's registry of flash-attention implementations, and the kernels of aten that it replaces."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.library import Library

from quire.integrations.engines import EngineError
from quire.integrations.pytorch.attention import flash_attention
from quire.integrations.pytorch.flash_call import FlashCall

NAME = "quire"
"""The name of the implementation in torch's registry."""
DEVICES = ("CPU", "CUDA")
"""The dispatch keys that get Quire's kernels; ROCm is CUDA to torch. aten has no such kernel for the CPU at all."""


class Activation:
    """The replaced kernels, until `remove`. torch's registry holds it while Quire is the active implementation."""

    def __init__(self) -> None:
        self._libraries: list[Library] = []
        for device in DEVICES:
            library = Library("aten", "IMPL", device)
            for operator, kernel in KERNELS.items():
                if hasattr(torch.ops.aten, operator):
                    library.impl(operator, kernel)
            self._libraries.append(library)

    def remove(self) -> None:
        """Restores torch's own kernels. A library takes its kernels along when it is collected."""
        self._libraries.clear()


def forward(*arguments: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """`aten::_flash_attention_forward`."""
    call = FlashCall.from_arguments(arguments, named)
    query = call.query
    # As aten declares it, the output has the strides of query; rows that belong to no sequence are zeros.
    out = None if query.is_contiguous() else torch.zeros_like(query)
    made, lse = flash_attention(call, out)
    if torch.version.hip:
        seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
    else:
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
        offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    return made if out is None else out, lse, seed, offset, query.new_empty(0)


def forward_inplace(out: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
    """`aten::_flash_attention_forward_no_dropout_inplace`."""
    return flash_attention(FlashCall.from_arguments(arguments, named), out)[1]


def backward(*arguments: Any, **named: Any) -> NoReturn:
    """`aten::_flash_attention_backward`: refused."""
    raise EngineError(
        "the flash-attention implementation 'quire' has no backward; call under torch.no_grad(), or call "
        "torch.nn.attention.restore_flash_attention_impl() before training"
    )


KERNELS = {
    "_flash_attention_forward": forward,
    "_flash_attention_forward_no_dropout_inplace": forward_inplace,
    "_flash_attention_backward": backward,
}
"""By operator of aten. The overload `.quantized` stays torch's own: it takes no pages."""


def register() -> None:
    """Registers the name; `torch.nn.attention.activate_flash_attention_impl("quire")` selects it.

    Raises:
        EngineError: This torch has no registry.
    """
    if not hasattr(nn.attention, "register_flash_attention_impl"):
        raise EngineError(f"torch {torch.__version__} has no registry of flash-attention implementations; it came with torch 2.11")
    nn.attention.register_flash_attention_impl(NAME, register_fn=Activation)
