"""Names of Gluon that differ between Triton 3.6 and 3.9. A kernel calls them by the newest name, from here.

    here          3.6                            3.7                            3.8, 3.9
    async_load    async_copy_global_to_shared    async_copy_global_to_shared    async_load
    box_load      async_copy_global_to_shared    async_copy_global_to_shared    async_load
    barrier       thread_barrier                 barrier                        barrier

`async_load` is that of `async_copy`, `box_load` that of `tma`. 3.8 still has their old names; in 3.9 these raise. Everything else
that the kernels use is the same in all four.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

# The old names are looked for last: 3.9 has one that only raises.
async_load: Any = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
"""Copies from memory to shared memory without registers; zeros where a mask is False."""
box_load: Any = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Copies a box of a tensor to shared memory: one instruction of one thread, by the tensor memory accelerator."""
barrier: Any = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""All threads of a warp group wait for each other."""
