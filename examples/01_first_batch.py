"""A pool, a cache, and two steps: both sequences prefill, then one decodes while the other prefills, in one call."""

import torch

import quire

torch.manual_seed(0)
Q_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


def project(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer's q, k and v for some tokens: strided views of one projection, as models make them."""
    qkv = torch.randn(tokens, Q_HEADS + 2 * KV_HEADS, HEAD_DIM)
    return qkv.split((Q_HEADS, KV_HEADS, KV_HEADS), dim=1)


pool = quire.PagePool(pages=32, page_size=16)  # one pool serves the caches of all layers
cache = quire.KVCache.allocate(pool, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
a, b = pool.sequence(), pool.sequence()

first = pool.step({a: 40, b: 7})  # new tokens of each sequence; the pool finds pages for them
q1, k1, v1 = project(47)
quire.step(q1, k1, v1, cache, first)

second = pool.step({a: 1, b: 100})  # a decodes while b prefills
q2, k2, v2 = project(101)
out = quire.step(q2, k2, v2, cache, second)

print("page_table", second.page_table.tolist(), sep="\n  ")
print("kv_lens ", second.kv_lens.tolist(), " all tokens, the new ones included")
print("q_starts", second.q_starts.tolist(), " where each sequence's new tokens start")
print(pool.usage())
print()
print(quire.explain(q2, cache, second))

# The row of a, which decodes: 41 keys, 40 of them from the step before. The reference computes it from dense tensors in float64.
k, v = torch.cat((k1[:40], k2[:1])), torch.cat((v1[:40], v2[:1]))
want, _ = quire.reference.attention(q2[:1], k, v)
error = (out[:1] - want).abs().max().item()
print(f"\nthe row of a is off by {error:.1e} from float64")
assert error < 1e-5

pool.free(a)
print("after a is freed:", pool.usage())
