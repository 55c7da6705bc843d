"""A prefix shared without copies, the two forms of a call, and partial results that are merged."""

import torch

import quire

torch.manual_seed(0)
pool = quire.PagePool(pages=16, page_size=16)
cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64, dtype=torch.float32, ledger=True)

# A prefix of 40 tokens is computed once and forked: its last page is half full, and a sequence that writes to it gets a copy.
prefix_k, prefix_v = torch.randn(2, 40, 2, 64)
prefix = pool.sequence()
quire.write(prefix_k, prefix_v, cache, pool.step({prefix: 40}))
a, b = pool.fork(prefix), pool.fork(prefix)
print("after two forks:  ", pool.usage())
batch = pool.step({a: 3, b: 1})
print("after their step: ", pool.usage())
print("pages to copy:    ", batch.copies, "(write does it)")
assert a.pages[:2] == b.pages[:2] == prefix.pages[:2] and a.pages[2] != b.pages[2]

# Context form: the cache holds the tokens before the new ones, which are arguments. Full form: write first, then attend.
# `write` applies the copies of a batch. Context form writes nothing, so they are applied explicitly here.
q = torch.randn(4, 8, 64)
k, v = torch.randn(2, 4, 2, 64)
cache.copy_pages(batch.copies)
context, context_lse = quire.attend(q, cache, batch, new=(k, v), lse=True)
full, full_lse = quire.step(q, k, v, cache, batch, lse=True)
print(f"the two forms differ by {(full - context).abs().max().item():.1e}")
assert torch.allclose(full, context, atol=1e-6)

# The prefix once for all queries, and each sequence's own tokens: two partial results with their LSEs, merged.
shared = quire.Batch(torch.tensor([prefix.pages]), torch.tensor([40]), torch.tensor([0, 4]))
not_causal = quire.Options(causal=False)  # all four queries come after the prefix
part, part_lse = quire.attend(q, cache, shared, not_causal, lse=True)
own_cache = quire.KVCache.wrap(torch.zeros(2, 16, 2, 64), torch.zeros(2, 16, 2, 64), layout="nhd")
own_batch = quire.Batch(torch.tensor([[0], [1]]), torch.tensor([3, 1]), torch.tensor([0, 3, 4]))
own, own_lse = quire.step(q, k, v, own_cache, own_batch, lse=True)
merged, merged_lse = quire.merge((part, own), (part_lse, own_lse))
print(f"merged partial results differ by {(merged - full).abs().max().item():.1e} from the full result")
assert torch.allclose(merged, full, atol=1e-6) and torch.allclose(merged_lse, full_lse, atol=1e-5)
