"""Wraps the memory of an existing engine without a copy: two of vLLM's cache layouts, and its index tensors."""

import torch

import quire

torch.manual_seed(0)
PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, X = 12, 16, 2, 64, 8

# vLLM's x-packed pair: eight elements of a key lie together, values are transposed.
key_cache = torch.zeros(PAGES, KV_HEADS, HEAD_DIM // X, PAGE_SIZE, X, dtype=torch.bfloat16)
value_cache = torch.zeros(PAGES, KV_HEADS, HEAD_DIM, PAGE_SIZE, dtype=torch.bfloat16)
packed = quire.KVCache.wrap(key_cache, value_cache, layout="vllm_x")

# Its joint page: K and V of a slot side by side. This one is a view of a larger buffer, so there are gaps between its pages.
buffer = torch.zeros(PAGES, 2, KV_HEADS, PAGE_SIZE, 2 * HEAD_DIM, dtype=torch.bfloat16)
joint = quire.KVCache.wrap(buffer[:, 0], layout="vllm_joint")

# The engine's own index tensors, under the engine's own names. torch.cumsum of int32 gives int64, which is supported.
query_lens = torch.tensor([5, 1, 20], dtype=torch.int32)
seq_lens = torch.tensor([5, 33, 40], dtype=torch.int32)
query_start_loc = torch.cat((torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0)))
block_table = torch.tensor([[7, -1, -1], [3, 9, 1], [0, 11, 4]])
batch = quire.Batch.from_vllm(block_table=block_table, seq_lens=seq_lens, query_start_loc=query_start_loc)
assert batch.page_table is block_table and batch.q_starts.dtype == torch.int64

# The contexts of sequences 1 and 2 are written first, by a batch of their own.
context = quire.Batch(block_table, torch.tensor([0, 32, 20]), torch.tensor([0, 0, 32, 52]))
old_k, old_v = torch.randn(2, 52, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
q = torch.randn(26, 8, HEAD_DIM, dtype=torch.bfloat16)
k, v = torch.randn(2, 26, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
outs = []
for cache in (packed, joint):
    quire.write(old_k, old_v, cache, context)
    outs.append(quire.step(q, k, v, cache, batch))
    print(cache)
print(quire.explain(q, packed, batch).problem)
assert torch.equal(*outs)

# It is the engine's memory that was written: token 32 of sequence 1 is in page 1, slot 0, head by head.
assert torch.equal(key_cache[1, :, :, 0, :].reshape(KV_HEADS, HEAD_DIM), k[5])
assert torch.equal(buffer[1, 0, :, 0, HEAD_DIM:], v[5])
assert not buffer[:, 1].any()  # the gaps between the pages are untouched
print("both layouts give the same bits, written into the engine's own memory")
