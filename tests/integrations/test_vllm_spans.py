"""The spans of the vLLM plugin, which needs no vLLM for them: images and chunks as vLLM's kernels mask them, key by key."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch

from quire.batch import Batch
from quire.integrations.vllm.spans import LayerView, image_ranges, spans_of


def sees(q: int, k: int, view: LayerView, images: list[tuple[int, int]]) -> bool:
    """vLLM's `compute_kv_seq_mask` for one query and one key of a causal sequence."""
    near = view.window is None or q - k < view.window
    seen = k <= q and near
    if view.window is not None and view.lookback >= 0:
        size = view.window // (view.lookback + 1)
        seen = k <= q and q // size - k // size <= view.lookback
    return seen or any(a <= q <= b and a <= k <= b and a < b and (near or not view.clamps) for a, b in images)


def test_spans_are_what_vllm_masks() -> None:
    r = random.Random(1)
    for _ in range(300):
        lens = [r.randint(1, 30) for _ in range(r.randint(1, 3))]
        new = [r.randint(0, n) for n in lens]
        images: dict[int, list[tuple[int, int]]] = {}
        for seq, n in enumerate(lens):
            at = r.randint(0, 5)
            while at < n and r.random() < 0.7:
                stop = at + r.choice([0, 1, 5, 12])
                images.setdefault(seq, []).append((at, stop))
                at = stop + r.randint(1, 6)
        window = r.choice([None, 1, 4, 9])
        view = LayerView(window, r.choice([-1, 0, 1]) if window and window > 1 else -1, r.random() < 0.5)
        starts = torch.tensor([0, *new]).cumsum(0).int()
        batch = Batch(torch.zeros(len(lens), 1, dtype=torch.int32), torch.tensor(lens).int(), starts)
        ranges = image_ranges(SimpleNamespace(mm_req_doc_ranges=images, num_reqs=len(lens), seq_lens=batch.kv_lens))
        spans = spans_of(batch, sum(new) + 2, ranges, view)
        assert spans.dtype is torch.int32 and spans.shape == (sum(new) + 2, 2)
        for seq, (n, q_len) in enumerate(zip(lens, new)):
            for row in range(q_len):
                begin, end = spans[int(starts[seq]) + row].tolist()
                at = n - q_len + row
                assert 0 <= begin < end <= n
                wanted = [k for k in range(n) if sees(at, k, view, images.get(seq, []))]
                assert wanted == list(range(begin, end)), (view, images, at)
