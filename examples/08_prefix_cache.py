"""A prefix cache: prompts that begin with the same tokens share pages, also after the first of them is done."""

import torch

import quire

torch.manual_seed(0)
pool = quire.PagePool(pages=24, page_size=16)
cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64, dtype=torch.float32, ledger=True)
embedding = torch.randn(3, 1000, 2, 64)  # in place of a model: q, k and v follow from the id of the token


def prefill(prompt: list[int], salt: str = "") -> tuple[quire.cache.sequence.Sequence, torch.Tensor]:
    """Computes a prompt, without the pages that the pool finds, and returns its sequence and the result of the last token."""
    sequence = pool.match(prompt, salt)
    q, k, v = embedding[:, prompt[sequence.length :]]
    print(f"found {sequence.length:3} tokens, computed {len(q):3}: {pool.prefix_usage()}")
    out = quire.step(q, k, v, cache, pool.step({sequence: len(q)}))
    pool.register(sequence, prompt)  # its keys and values are written: others may find them
    return sequence, out[-1]


system = torch.randint(1000, (100,)).tolist()
question = torch.randint(1000, (30,)).tolist()

# The first prompt is computed whole. It is freed, but its full pages stay cached until their memory is needed.
first, wanted = prefill(system + question)
pool.free(first)
again, found = prefill(system + question)
assert torch.allclose(found, wanted, atol=1e-6)

# Another question after the same system prompt: the pages of the system prompt are found. Another tenant has its own salt.
other, _ = prefill(system + question[::-1])
assert other.pages[:6] == again.pages[:6] and other.pages[6] != again.pages[6]
tenant, _ = prefill(system + question, salt="tenant 2")
assert not set(tenant.pages) & set(again.pages)

# A pool evicts what was released first and is not held. A sequence that holds a prefix keeps it.
keeper = pool.match(system)
pool.free(again, other, tenant)
prefill(torch.randint(1000, (16 * 17,)).tolist())
print("at the end:", pool.prefix_usage())
assert pool.match(system).pages == keeper.pages
