"""transformers' paged functions for continuous batching: the cache writes the new tokens and gathers all tokens of the batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from quire.conformance.runner.target import Target
from quire.conformance.targets.peer import Rules, View, cannot_repack, peer, repacked

RULES: Rules = {
    "queries in fp32, fp16 or bf16, and a cache of the same type": lambda p: (
        p.q_dtype in ("fp32", "fp16", "bf16") and p.format == p.q_dtype
    ),
    "causal sequences": lambda p: p.causal == "yes",
}


def target(name: str, device: str | None) -> Target:
    import transformers
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.cache_allocators.full_attention import FullAttentionCacheAllocator
    from transformers.generation.continuous_batching.utils import build_attention_mask
    from transformers.integrations.eager_paged import eager_paged_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    eager = name.endswith("eager")
    function = eager_paged_attention_forward if eager else sdpa_attention_forward

    def run(call: View) -> None:
        allocator = FullAttentionCacheAllocator.__new__(FullAttentionCacheAllocator)
        allocator.layer_type, allocator.index = "full_attention", 0
        # The cache writes the new tokens itself, so it gets a copy.
        allocator._kv_token_views = [tuple(pages.flatten(0, 1).clone() for pages in repacked(call.call))]
        cache = PagedAttentionCache.__new__(PagedAttentionCache)
        cache.layer_to_allocator = [allocator]
        reads, writes = indices(call)
        rows = call.q_lens > 0  # its batches contain no sequence without new tokens
        starts = torch.nn.functional.pad(call.kv_lens[rows].long().cumsum(0), (1, 0)).tolist()
        mask = torch.full((1, 1, call.live, len(reads)), torch.finfo(call.q.dtype).min, dtype=call.q.dtype, device=call.device)
        build_attention_mask(mask, [0, *call.q_starts[1:][rows].tolist()], starts)
        module = SimpleNamespace(layer_idx=0, num_key_value_groups=call.q_heads // call.kv_heads)
        if call.sinks is not None:
            module.sinks = call.sinks
        key, value = (x[: call.live].transpose(0, 1)[None] for x in call.new_tokens)
        more: dict[str, Any] = {
            "read_index": [reads],
            "write_index": [writes],
            "cu_seq_lens_k": {"full_attention": torch.tensor(starts)},
            "max_length_k": {"full_attention": call.max_kv},
        }
        query = call.q[: call.live].transpose(0, 1)[None]
        result = function(module, query, key, value, mask, scaling=call.scale, cache=cache, **more)[0]
        call.out[: call.live] = result[0]

    # Layers with a window use another cache: a ring buffer without pages.
    takes = "new_k new_v sinks" if eager else "new_k new_v"
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return peer(name, run, where, takes=takes, rules=RULES, cannot=cannot_repack, version=transformers.__version__)


def indices(call: View) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of all tokens of all sequences in order, and of the new ones."""
    reads = []
    for seq, length in enumerate(torch.where(call.q_lens > 0, call.kv_lens, 0).tolist()):
        at = torch.arange(length, device=call.device)
        reads.append(call.page_table[seq].long()[at // call.page_size] * call.page_size + at % call.page_size)
    writes = call.call.batch().slots_of_tokens(call.live, call.page_size)
    return torch.cat(reads) if reads else writes.new_zeros(0), writes
