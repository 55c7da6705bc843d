"""Spans: the tokens of an image see each other, text is causal with a window, a prefix is seen both ways. One step, 3 layers."""

import torch

import quire

torch.manual_seed(0)
pool = quire.PagePool(pages=32, page_size=16)
caches = [quire.KVCache.allocate(pool, kv_heads=2, head_dim=64, dtype=torch.float32) for _ in range(3)]

# Two prompts: one with an image at positions 12 to 35, one of text.
IMAGE, WINDOW, PREFIX = (12, 36), 8, 10
batch = pool.step({pool.sequence(): 60, pool.sequence(): 20})
at, first = batch.positions, torch.arange(80) < 60

# Layer 0 sees all earlier text, layer 1 the last WINDOW tokens; in both, image tokens see their whole image.
in_image = first & (at >= IMAGE[0]) & (at < IMAGE[1])
end = torch.where(in_image, IMAGE[1], at + 1)
wide = batch.with_spans(torch.stack((torch.zeros_like(at), end), dim=1))
begin = torch.where(in_image, (at - WINDOW + 1).clamp(max=IMAGE[0]), at - WINDOW + 1).clamp(min=0)
local = batch.with_spans(torch.stack((begin, end), dim=1))
# Layer 2: the first PREFIX tokens of each prompt see each other, as in a prefix LM.
prefix = batch.with_spans(torch.stack((torch.zeros_like(at), (at + 1).clamp(min=PREFIX)), dim=1))

q, k, v = torch.randn(80, 12, 64).split((8, 2, 2), dim=1)
for name, layer, cache in zip(("all earlier tokens", "a window", "a prefix"), (wide, local, prefix), caches):
    out = quire.step(q, k, v, cache, layer)
    assert layer.spans is not None
    want, _ = quire.reference.attention(q[:60], k[:60], v[:60], spans=layer.spans[:60])
    assert torch.allclose(out[:60].double(), want, atol=1e-5)
    print(f"{name:20} text token 40 sees {layer.spans[40].tolist()}, image token 20 sees {layer.spans[20].tolist()}")

# A span has to lie in its sequence: `check` names the token that it belongs to.
wrong = local.with_spans(torch.stack((begin, end + 30), dim=1))
print(quire.check(q, caches[1], wrong)[0])
