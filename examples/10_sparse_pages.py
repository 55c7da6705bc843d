"""Sparse attention: each head reads the pages with the best score, and the error against all keys falls with their number."""

import torch

import quire

torch.manual_seed(0)
pool = quire.PagePool(pages=80, page_size=16)
cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64, dtype=torch.float32)
sequences = [pool.sequence(), pool.sequence()]
prompt = pool.step({sequences[0]: 600, sequences[1]: 500})
# Neighbouring tokens have similar keys, as in text: 32 tokens have a common direction each.
k = torch.randn(35, 2, 64).repeat_interleave(32, 0)[:1100] + 0.3 * torch.randn(1100, 2, 64)
v = torch.randn(1100, 2, 64)
quire.write(k, v, cache, prompt)

# A decode step. Each query head points at one of the keys, so most of its weight is on a few pages.
batch = pool.step(dict.fromkeys(sequences, 1))
new_k, new_v = torch.randn(2, 2, 2, 64)
quire.write(new_k, new_v, cache, batch)
keys = (k[:600], k[600:])
q = torch.stack([of_one[torch.randint(len(of_one), (8,)), torch.arange(8) // 4] * 2 for of_one in keys])

# A cheap upper bound of a page's logits, from the largest and smallest element of its keys in each dimension (as Quest does). An
# engine keeps these bounds beside the cache; the part of a page that is not written yet holds zeros here.
pages = cache.k[batch.page_table.clamp(min=0)]  # [seqs, columns, page_size, kv_heads, head_dim]
low, high = pages.amin(2), pages.amax(2)
by_group = q.view(2, 1, 2, 4, 64)  # the four query heads of a group share the pages of their KV head
bound = torch.maximum(by_group * low.unsqueeze(3), by_group * high.unsqueeze(3)).sum(-1).amax(3)  # [seqs, columns, kv_heads]

column = torch.arange(batch.page_table.shape[1])
columns = -(-batch.kv_lens // 16)
bound[column >= columns[:, None]] = -torch.inf
bound.scatter_(1, (columns.long() - 1).view(2, 1, 1).expand(-1, -1, 2), torch.inf)  # the page of the new token always counts

dense = quire.attend(q, cache, batch)
errors = {}
for n in (1, 4, 16, int(columns.max())):
    best = bound.topk(n, dim=1)
    chosen = best.indices.masked_fill(best.values == -torch.inf, -1)  # -1 where a sequence has fewer pages
    sparse = batch.with_select(quire.Select(columns=chosen.transpose(1, 2)))
    errors[n] = ((quire.attend(q, cache, sparse) - dense).norm() / dense.norm()).item()
    print(f"{n:3} pages of {int(columns.max())}: relative error {errors[n]:.1e}")

assert errors[1] > errors[4] > errors[16], "more pages, less error"
assert errors[16] < 0.05 and errors[int(columns.max())] < 1e-6
