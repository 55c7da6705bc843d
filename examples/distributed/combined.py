"""Tensor and context parallelism: pairs of ranks share the KV heads, each holds half of their keys, and the query heads are divided
over all ranks. Start it with

    torchrun --nproc-per-node 4 examples/distributed/combined.py
"""

import os

import torch
import torch.distributed as dist
from decoder import HEAD_DIM, KV_HEADS, LAYERS, Q_HEADS, Decoder, generate, generate_alone, heads
from torch.distributed.device_mesh import init_device_mesh

import quire
from quire.distributed import ContextParallel, TensorParallel

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("tp", "cp"))

every = TensorParallel(q_heads=Q_HEADS, kv_heads=KV_HEADS, timeout=30)  # all ranks: the weights of this one
pair = TensorParallel(mesh["tp"], q_heads=Q_HEADS, kv_heads=KV_HEADS, timeout=30)  # the options and the cache of its pair
cp = ContextParallel(mesh["cp"], interleave=4, split_heads=True, timeout=30)

decoder = Decoder(device)
options = pair.options(decoder.options)
w_q, w_k, w_v, w_out = every.q(decoder.q), pair.kv(decoder.k), pair.kv(decoder.v), every.q(decoder.out, dim=2)

pool = quire.PagePool(pages=32, page_size=16, device=device, shard=cp.shard)
caches = [quire.KVCache.allocate(pool, kv_heads=pair.kv_heads, head_dim=HEAD_DIM, dtype=torch.float32) for _ in range(LAYERS)]


def attention(layer: int, x: torch.Tensor, batch: quire.Batch) -> torch.Tensor:
    q, k, v = (heads(x, weight[layer]) for weight in (w_q, w_k, w_v))
    out = cp.step(q, k, v, caches[layer], batch, options)  # this rank's query heads over the keys of its pair
    return every.project(out, w_out[layer])


tokens = generate(decoder, pool, attention)
assert tokens == generate_alone(decoder), "a single process generates other tokens"
if dist.get_rank() == 0:
    print(f"{every}, {cp}: {sum(map(len, tokens))} tokens, equal to a single process")
dist.destroy_process_group()
