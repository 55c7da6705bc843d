"""vLLM's paged-attention operators on Quire's kernels: only the import has to change.

Names, order of arguments and meaning are those of vllm-project/vllm at a014e35f38c; a *block* is vLLM's name for a page. Defects of
that commit are not reproduced; `docs/migrating.md` lists the differences.
"""

from quire.compat.vllm.decode import kernel_paged_attention_2d, paged_attention_rocm
from quire.compat.vllm.mixed import chunked_prefill_paged_decode, context_attention_fwd
from quire.compat.vllm.rule import use_rocm_custom_paged_attention
from quire.compat.vllm.unified import KVQuantMode, unified_attention
from quire.compat.vllm.write import reshape_and_cache, reshape_and_cache_flash

__all__ = [
    "chunked_prefill_paged_decode",
    "context_attention_fwd",
    "kernel_paged_attention_2d",
    "paged_attention_rocm",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "unified_attention",
    "use_rocm_custom_paged_attention",
    "KVQuantMode",
]
