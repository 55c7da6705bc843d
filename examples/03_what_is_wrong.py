"""Typical mistakes in an engine, and the violations that Quire reports before a kernel runs."""

import torch

import quire

torch.manual_seed(0)
pool = quire.PagePool(pages=8, page_size=4)
cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=16, dtype=torch.float32, ledger=True)
q, k, v = torch.randn(3, 10, 1, 16)

# The decode token is attended to, but was never written.
a, b = pool.sequence(), pool.sequence()
quire.step(q, k, v, cache, pool.step({a: 6, b: 4}))
batch = pool.step({a: 1}).clone()  # a copy: the pool changes below
found = quire.check(q[:1], cache, batch)
print("A forgotten write:", *found, "", sep="\n")
assert [violation.rule for violation in found] == ["residency"] and "never written" in found[0].given
quire.write(k[:1], v[:1], cache, batch)
assert quire.check(q[:1], cache, batch) == []

# A table still points at a page that was freed, and then given to another sequence. `check` returns all violations, `checked`
# raises.
stale = b.pages[0]
pool.free(b)
batch.page_table[0, 0] = stale
found = quire.check(q[:1], cache, batch)
print("A stale page:", found[0], f"  and {len(found) - 1} more\n", sep="\n")
assert all("stale" in violation.given for violation in found)
quire.step(q[:4], k[:4], v[:4], cache, pool.step({pool.sequence(): 4}))
try:
    with quire.checked():
        quire.attend(q[:1], cache, batch)
except quire.ContractError as error:
    print("And now another sequence's:", error.violations[0], "", sep="\n")

# A page that does not exist. Nothing is written, not even the tokens whose pages do exist.
own = quire.KVCache.wrap(torch.zeros(8, 4, 1, 16), torch.zeros(8, 4, 1, 16), layout="nhd")
try:
    quire.step(q[:9], k[:9], v[:9], own, quire.Batch(torch.tensor([[0, 3, 71]]), torch.tensor([9]), torch.tensor([0, 9])))
except quire.ContractError as error:
    print(error, "\n")
assert not own.k.any()

# And one that is no mistake: torch.cumsum turns int32 into int64. Each index tensor is read in its own type;
# examples/rocm_story shows what happens in a kernel that reads it as int32.
lens = torch.tensor([3, 1, 2], dtype=torch.int32)
starts = torch.cat((torch.zeros(1, dtype=torch.int32), lens.cumsum(0)))
outs = [quire.step(q[:6], k[:6], v[:6], own, quire.Batch(torch.arange(3)[:, None], lens, s)) for s in (starts, starts.int())]
print(f"q_starts as {starts.dtype} and as {starts.int().dtype}: the same bits")
assert torch.equal(*outs)
