"""A complete decoder step as one graph: `torch.compile(fullgraph=True)`, without graph breaks. Lengths grow and batches change, and
nothing is compiled again. Runs on the CPU, and on a GPU if there is one."""

from typing import Any

import torch
from torch import nn

import quire

torch.manual_seed(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, WIDTH, LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 512, 128, 2, 8, 2, 16
GRAPHS = 2  # sizes of the first step are constants of its graph, those of the second become symbols


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE: turns pairs of elements of each head by angles that grow with the token's position."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angle = positions[:, None, None] * frequencies
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


class Layer(nn.Module):
    """Attention over the layer's own paged cache, and an MLP."""

    def __init__(self, pool: quire.PagePool):
        super().__init__()
        self.cache = quire.KVCache.allocate(pool, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32, device=DEVICE)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(Q_HEADS * HEAD_DIM, WIDTH, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*size, bias=False) for size in ((WIDTH, 256), (WIDTH, 256), (256, WIDTH)))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, batch: quire.Batch) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM)).split((Q_HEADS, KV_HEADS, KV_HEADS), dim=1)
        attended = quire.step(rotate(q, positions), rotate(k, positions), v, self.cache, batch)  # an operator of the graph
        x = x + self.out(attended.flatten(1))
        h = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Token ids in, the next token of each sequence out."""

    def __init__(self, pool: quire.PagePool):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(pool) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, batch: quire.Batch) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions, batch)
        last = batch.q_starts[1:] - 1
        return self.head(self.norm(x[last])).argmax(-1)


pool = quire.PagePool(pages=64, page_size=16, device=DEVICE)
plain, twin = Decoder(pool).to(DEVICE), Decoder(pool).to(DEVICE)  # the same weights, each with its own caches
twin.load_state_dict(plain.state_dict())
graphs: list[torch.fx.GraphModule] = []


def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    """torch's default backend, after counting the graph."""
    graphs.append(graph)
    return torch._inductor.compile(graph, inputs)


compiled = torch.compile(twin, fullgraph=True, backend=backend)

# Each step: how many prompt tokens each new request has. Running requests decode one token, request 1 ends after step 4.
arrivals = [{0: 21, 1: 5}, {2: 40}, {}, {3: 7, 4: 1}, {}, {5: 60}, {}, {}]
running: dict[int, tuple[Any, torch.Tensor]] = {}  # the sequence of each request, and its new tokens
with torch.no_grad():
    for number, prompts in enumerate(arrivals):
        if number == 4:
            pool.free(running.pop(1)[0])
        for request, length in prompts.items():
            running[request] = pool.sequence(), torch.randint(VOCABULARY, (length,), device=DEVICE)
        batch = pool.step({sequence: len(tokens) for sequence, tokens in running.values()})
        tokens = torch.cat([tokens for _, tokens in running.values()])
        nexts = compiled(tokens, batch.positions, batch)
        assert torch.equal(nexts, plain(tokens, batch.positions, batch)), f"step {number}"
        print(f"step {number}: lengths {batch.kv_lens.tolist()}, next tokens {nexts.tolist()}, graphs so far {len(graphs)}")
        running = {request: (sequence, token[None]) for (request, (sequence, _)), token in zip(running.items(), nexts)}

names = {str(node.target) for node in graphs[-1].graph.nodes}
print(f"\n{len(graphs)} graphs for {len(arrivals)} steps; attention in them: {sorted(name for name in names if 'quire' in name)}")
assert len(graphs) <= GRAPHS
