"""A layer with RoPE and QK norm: the step normalises and rotates queries and keys in the launch that writes the cache. The same in
separate steps gives the same result."""

import torch

import quire

torch.manual_seed(0)
Q_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64

pool = quire.PagePool(pages=64, page_size=16)
cache, other = (quire.KVCache.allocate(pool, kv_heads=KV_HEADS, head_dim=HEAD_DIM) for _ in range(2))
rope = quire.Rope.make(
    HEAD_DIM,
    base=1e6,
    max_positions=4096,
    scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    q_norm=torch.rand(HEAD_DIM),  # weights of RMSNorm over a head, as Qwen3 has them
    k_norm=torch.rand(HEAD_DIM),
)
print(rope)

a, b = pool.sequence(), pool.sequence()
for counts in ({a: 40, b: 7}, {a: 1, b: 1}):
    batch = pool.step(counts)
    rows = torch.randn(sum(counts.values()), Q_HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    q, k, v = rows.split((Q_HEADS, KV_HEADS, KV_HEADS), dim=1)

    # One launch rotates, quantises and writes; attention reads the rotated queries.
    out = quire.step(q, k, v, cache, batch, rope=rope)

    # An engine that calls write and attend apart gets the rotated queries from write.
    rotated = quire.write(k, v, other, batch, rope=rope, q=q)
    assert torch.equal(quire.attend(rotated, other, batch), out)

    # The same in torch operators, in fp32, rounded once.
    plain = rope.rotate(q, batch.positions, rope.q_norm).to(q.dtype)
    print(f"{len(q)} tokens, largest difference of a query from torch: {(rotated - plain).abs().max().item():.3g}")

# A token behind the tables is refused before anything is written.
try:
    quire.step(q, k, v, cache, batch, rope=quire.Rope.make(HEAD_DIM, max_positions=41 - 1))
except quire.ContractError as error:
    print(error)
