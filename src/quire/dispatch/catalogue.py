"""Every kernel there is, in order of preference: the first whose limits all hold runs."""

from __future__ import annotations

from quire.dispatch.kernel import Kernel, Span

_ANY_HEAD = Span(1, 512)
_QUERIES = ("fp32", "fp16", "bf16", "e4m3fn", "e4m3fnuz", "e5m2")

CATALOGUE: tuple[Kernel, ...] = (
    # GPU kernels go here, the most special first; then a native CPU kernel.
    # Last come the kernels that are always there. They read lengths on the host, so a CUDA graph cannot record them.
    Kernel(
        "torch",
        "attend",
        "online softmax over tiles of pages, in torch operators: every feature, on any device",
        "quire.kernels.torch.attend:launch",
        q_dtypes=_QUERIES,
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
        capturable=False,
    ),
    Kernel(
        "torch",
        "write",
        "scatters keys and values into their slots, in torch operators: every format and layout, on any device",
        "quire.kernels.torch.write:launch",
        head_dim=_ANY_HEAD,
        v_head_dim=_ANY_HEAD,
        capturable=False,
    ),
)
