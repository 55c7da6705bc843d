"""Context parallelism: every rank has some of the keys of every sequence. Start it with

torchrun --nproc-per-node 2 examples/distributed/context_parallel.py
"""

import os

import torch
import torch.distributed as dist
from decoder import HEAD_DIM, KV_HEADS, LAYERS, Decoder, generate, generate_alone, heads
from torch.distributed.device_mesh import init_device_mesh

import quire
from quire.distributed import ContextParallel

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))

cp = ContextParallel(mesh["cp"], interleave=4, timeout=30)
decoder = Decoder(device)

pool = quire.PagePool(pages=32, page_size=16, device=device, shard=cp.shard)  # pages for this rank's keys alone
caches = [quire.KVCache.allocate(pool, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32) for _ in range(LAYERS)]


def attention(layer: int, x: torch.Tensor, batch: quire.Batch) -> torch.Tensor:
    q, k, v = (heads(x, weight[layer]) for weight in (decoder.q, decoder.k, decoder.v))
    out = cp.step(q, k, v, caches[layer], batch, decoder.options)
    return out.flatten(1) @ decoder.out[layer].T


tokens = generate(decoder, pool, attention)
assert tokens == generate_alone(decoder), "a single process generates other tokens"
if dist.get_rank() == 0:
    print(f"{cp}: {sum(map(len, tokens))} tokens, equal to a single process; {pool.usage()}")
dist.destroy_process_group()
