"""Two ranks of vLLM's decode context parallelism, each holding a part of the keys, without an engine: on CPUs vLLM's process groups
have such ranks, and its engine refuses them. Each rank compares its heads with attention over all keys:

    python context_parallel_ranks.py RANK PORT INTERLEAVE
"""

from __future__ import annotations

import os
import sys

import torch
from layers import PAGE_SIZE, layer_with_scales
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from quire import reference
from quire.integrations.vllm.backend import QuireBackend

RANKS, HEADS, HEAD_SIZE = 2, 4, 32
KV_LENS, Q_LENS = (37, 1, 90, 5), (1, 1, 9, 5)
"""With an interleave of 16 the second and the fourth sequence have keys on one rank only."""


def slots_of(rank: int, interleave: int, table: torch.Tensor, positions: list[tuple[int, int]]) -> torch.Tensor:
    """The slots of (sequence, position) on a rank, -1 where another rank holds the token."""
    slots = []
    for seq, at in positions:
        local = at // (RANKS * interleave) * interleave + at % interleave
        slot = int(table[seq, local // PAGE_SIZE]) * PAGE_SIZE + local % PAGE_SIZE
        slots.append(slot if at // interleave % RANKS == rank else -1)
    return torch.tensor(slots, dtype=torch.int64)


def main(rank: int, port: int, interleave: int) -> None:
    # The engine sets it: a name that the ranks share.
    os.environ["VLLM_DIST_IDENT"] = f"quire-{port}"
    config = VllmConfig()
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    config.parallel_config.decode_context_parallel_size = RANKS
    with set_current_vllm_config(config):
        init_distributed_environment(RANKS, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(RANKS, decode_context_model_parallel_size=RANKS)
        torch.manual_seed(0)
        sinks, slopes = torch.randn(HEADS), torch.rand(HEADS) / 8
        mine = slice(rank * HEADS // RANKS, (rank + 1) * HEADS // RANKS)
        features = {"alibi_slopes": slopes[mine].tolist(), "sinks": sinks[mine], "sliding_window": 50, "logits_soft_cap": 20.0}
        impl = QuireBackend.get_impl_cls()(HEADS // RANKS, HEAD_SIZE, HEAD_SIZE**-0.5, 1, **features)
        spec = FullAttentionSpec(PAGE_SIZE, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.float32)
        builder = QuireBackend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
    k, v = ([torch.randn(n, 1, HEAD_SIZE) for n in KV_LENS] for _ in range(2))
    q = [torch.randn(n, HEADS, HEAD_SIZE) for n in Q_LENS]
    table = torch.arange(16, dtype=torch.int32).view(4, 4)
    pages = torch.full((16, 1, PAGE_SIZE, 2 * HEAD_SIZE), float("nan"))
    layer = layer_with_scales()
    every = [(seq, at) for seq, length in enumerate(KV_LENS) for at in range(length)]
    impl.do_kv_cache_update(layer, torch.cat(k), torch.cat(v), pages, slots_of(rank, interleave, table, every))
    starts = torch.tensor([0, *torch.tensor(Q_LENS).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor(KV_LENS, dtype=torch.int32)
    common = CommonAttentionMetadata(
        starts, starts, lens, len(KV_LENS), sum(Q_LENS), max(Q_LENS), max(KV_LENS), table, torch.full((sum(Q_LENS),), -1)
    )
    own = torch.cat(q)[:, mine].contiguous()
    out = torch.full_like(own, float("nan"))
    impl.forward(layer, own, None, None, pages, builder.build(0, common), out)
    for i, at in enumerate(starts[:-1].tolist()):
        options = {"window": (49, 49), "softcap": 20.0, "alibi": slopes, "sinks": sinks}
        right, _ = reference.attention(q[i], k[i], v[i], **options)
        error = float((out[at : at + Q_LENS[i]] - right[:, mine]).abs().max())
        # fp32 results and one more rounding when they are combined; values are about 1.
        assert error < 2**-19, f"rank {rank}, sequence {i}: {error}"
    print(f"rank {rank} of {impl.dcp_world_size}: {len(KV_LENS)} sequences agree")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
