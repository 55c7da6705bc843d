"""Shared prefixes: answers to one prompt read the pages of the prompt once, as when a policy is trained on groups of answers."""

import torch

import quire

torch.manual_seed(0)
PROMPTS, ANSWERS, PROMPT, STEPS = 4, 16, 512, 3
pool = quire.PagePool(pages=1024, page_size=16)
cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64, dtype=torch.bfloat16)


def tokens(n: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of some tokens."""
    return torch.randn(n, 12, 64, dtype=torch.bfloat16).split((8, 2, 2), dim=1)


# Each prompt is computed once. Its answers are forks: they hold its pages, and say so in the batch of a step.
prompts = [pool.sequence() for _ in range(PROMPTS)]
quire.step(*tokens(PROMPTS * PROMPT), cache, pool.step(dict.fromkeys(prompts, PROMPT)))
answers = [pool.fork(prompt) for prompt in prompts for _ in range(ANSWERS)]

for _ in range(STEPS):
    batch = pool.step(dict.fromkeys(answers, 1), share=True)
    q, k, v = tokens(len(answers))
    out = quire.step(q, k, v, cache, batch)

print(batch.prefixes)
print(quire.explain(q, cache, batch).summary())

# The result is the same, up to rounding, whether the pages of a prompt are read once or for each answer.
plain = quire.attend(q, cache, batch.with_prefixes(None))
torch.testing.assert_close(out, plain, atol=4e-3, rtol=2e-2)

# A layer with a window does not need all keys of a prompt: it reads each answer by itself, and `explain` says so.
windowed = quire.Options(window=128)
quire.attend(q, cache, batch, windowed)
assert "window" in str(quire.explain(q, cache, batch, windowed))

# A batch of another engine: the same prefixes, found in the page table.
other = quire.Batch(batch.page_table, batch.kv_lens, batch.q_starts, page_size=16)
found = quire.Prefixes.find(other)
assert found.listed == batch.prefixes.listed
