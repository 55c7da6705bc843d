"""Multi-head latent attention (DeepSeek, Kimi): one latent per token is the cache. Prompts expand it to keys and values of each
head, decodes absorb that into the queries; both give what plain multi-head attention gives."""

import torch

import quire

torch.manual_seed(0)
HEADS, LATENT, NOPE, ROPE, VALUE = 16, 512, 128, 64, 128  # the sizes of DeepSeek-V3, with fewer heads
scale = quire.Options(scale=(NOPE + ROPE) ** -0.5)
rope = quire.Rope.make(head_dim=ROPE, max_positions=4096, interleaved=True)  # of the last 64 elements of keys and queries
to_key = torch.randn(HEADS, NOPE, LATENT) * LATENT**-0.5
to_value = torch.randn(HEADS, VALUE, LATENT) * LATENT**-0.5

pool = quire.PagePool(pages=32, page_size=16)
cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=LATENT + ROPE, v_in_k=LATENT, dtype=torch.float32)
# Expanded keys and values of a prompt are not kept: a cache of their sizes with one page, which no call below reads or writes.
unused = quire.KVCache.allocate(quire.PagePool(1, 16), kv_heads=HEADS, head_dim=NOPE + ROPE, v_head_dim=VALUE, dtype=torch.float32)
no_pages = torch.zeros(1, 0, dtype=torch.int32)


def expanded(latent, rotated):
    """The key and the value of each head, from latents [tokens, 1, LATENT] and rotated parts [tokens, 1, ROPE]."""
    k = torch.cat((torch.einsum("hnl,tkl->thn", to_key, latent), rotated.expand(-1, HEADS, -1)), -1)
    return k, torch.einsum("hvl,tkl->thv", to_value, latent)


def absorbed(q):
    """Queries over latents: q·(W c) = (W^T q)·c."""
    return torch.cat((torch.einsum("thn,hnl->thl", q[..., :NOPE], to_key), q[..., NOPE:]), -1)


def values_of(out):
    """The output of each head, from attention over latents."""
    return torch.einsum("thl,hvl->thv", out, to_value)


def prefill(q, latent, part, batch):
    """A chunk of one prompt: its own keys are expanded, the context is absorbed, and the two results are merged."""
    rotated = quire.write((latent, part), None, cache, batch, rope=rope, q=absorbed(q))
    chunk = quire.Batch(no_pages, batch.q_starts[1:], batch.q_starts)  # as if the sequence had no context
    q, new = torch.cat((q[..., :NOPE], rotated[..., LATENT:]), -1), expanded(latent, rope.rotate(part, batch.positions))
    own, own_lse = quire.attend(q, unused, chunk, scale, new=new, lse=True)
    context = quire.Batch(batch.page_table, batch.kv_lens - batch.q_starts[1:], batch.q_starts)
    everything = quire.Options(scale=scale.scale, causal=False)  # each new token sees the whole context
    past, past_lse = quire.attend(rotated, cache, context, everything, lse=True)
    return quire.merge([own, values_of(past)], [own_lse, past_lse])[0]


def plain(q, latent, part):
    """Multi-head attention of the last tokens over all of them, in float64."""
    at = torch.arange(len(part))
    q = torch.cat((q[..., :NOPE], rope.rotate(q[..., NOPE:], at[-len(q) :])), -1)
    k, v = (x.double() for x in expanded(latent, rope.rotate(part, at)))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * scale.scale
    later = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
    return torch.einsum("hqk,khv->qhv", logits.masked_fill(later, -torch.inf).softmax(-1), v)


sequence, latents, parts = pool.sequence(), torch.randn(70, 1, LATENT), torch.randn(70, 1, ROPE)
done = 0
for tokens, how in ((40, prefill), (29, prefill), (1, None)):  # two chunks of a prompt, then a decode of one token
    rows, done = slice(done, done + tokens), done + tokens
    q, latent, part, batch = torch.randn(tokens, HEADS, NOPE + ROPE), latents[rows], parts[rows], pool.step({sequence: tokens})
    if how:
        out = how(q, latent, part, batch)
    else:
        out = values_of(quire.step(absorbed(q), (latent, part), None, cache, batch, scale, rope=rope))
    error = (out - plain(q, latents[:done], parts[:done])).abs().max().item()
    print(f"{tokens:2} new tokens of {done}: largest difference from plain attention {error:.1e}")
    assert error < 1e-4

of_heads = HEADS * (NOPE + ROPE + VALUE)
print(f"{LATENT + ROPE} numbers of a token are cached, in place of {of_heads}")
