"""Caches of 4 bits: what keys, values and scales take, and the error against float64 over the numbers before they were rounded."""

import torch

import quire

torch.manual_seed(0)
TOKENS, HEADS, DIM = 512, 2, 64
pool = quire.PagePool(pages=TOKENS // 16, page_size=16)
batch = pool.step({pool.sequence(): TOKENS})

# Keys of language models have a few dims that are much larger than the others.
q = torch.randn(TOKENS, 8, DIM)
k, v = torch.randn(2, TOKENS, HEADS, DIM).unbind()
k[..., :2] *= 10
q[..., :2] /= 10
exact, _ = quire.reference.attention(q, k, v)

errors = {}
for name, how in {
    "bf16": {},
    "int8": {"format": "int8", "scales": "token"},
    "K int8, V int4": {"k_format": "int8", "v_format": "int4", "scales": "token"},
    "int4": {"format": "int4", "scales": "token"},
    "int4, hadamard": {"format": "int4", "scales": "token", "hadamard": True},  # keys and queries are transformed alike
    "nvfp4": {"format": "nvfp4", "k_scale": float(k.abs().max()) / 2688, "v_scale": float(v.abs().max()) / 2688},
}.items():
    cache = quire.KVCache.allocate(pool, kv_heads=HEADS, head_dim=DIM, **how)
    out = quire.step(q, k, v, cache, batch)
    errors[name] = float((out.double() - exact).norm() / exact.norm())
    parts = [cache.k, cache.v, *(s for s in (cache.k_scale, cache.v_scale) if s is not None and s.dim() == 3)]
    size = sum(part.nbytes for part in parts) // (TOKENS * HEADS)
    print(f"{name:15} {size:3} bytes for each token and head, relative error {errors[name]:.1%}")

assert errors["int4, hadamard"] < errors["int4"] / 2, "a large dim no longer sets the scale of its head"
assert errors["K int8, V int4"] < errors["int4"] / 2, "keys need more bits than values"
assert errors["int8"] < 0.1
