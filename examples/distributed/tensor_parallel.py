"""Tensor parallelism: every rank has some of the heads. Start it with

torchrun --nproc-per-node 2 examples/distributed/tensor_parallel.py
"""

import os

import torch
import torch.distributed as dist
from decoder import HEAD_DIM, KV_HEADS, LAYERS, Q_HEADS, Decoder, generate, generate_alone, heads
from torch.distributed.device_mesh import init_device_mesh

import quire
from quire.distributed import TensorParallel

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))

tp = TensorParallel(mesh["tp"], q_heads=Q_HEADS, kv_heads=KV_HEADS, timeout=30)
decoder = Decoder(device)
options = tp.options(decoder.options)  # the slopes and sinks of this rank's heads
w_q, w_k, w_v, w_out = tp.q(decoder.q), tp.kv(decoder.k), tp.kv(decoder.v), tp.q(decoder.out, dim=2)

pool = quire.PagePool(pages=32, page_size=16, device=device)
caches = [quire.KVCache.allocate(pool, kv_heads=tp.kv_heads, head_dim=HEAD_DIM, dtype=torch.float32) for _ in range(LAYERS)]


def attention(layer: int, x: torch.Tensor, batch: quire.Batch) -> torch.Tensor:
    q, k, v = (heads(x, weight[layer]) for weight in (w_q, w_k, w_v))
    out = quire.step(q, k, v, caches[layer], batch, options)
    return tp.project(out, w_out[layer])


tokens = generate(decoder, pool, attention)
assert tokens == generate_alone(decoder), "a single process generates other tokens"
if dist.get_rank() == 0:
    print(f"{tp}: {sum(map(len, tokens))} tokens, equal to a single process")
dist.destroy_process_group()
