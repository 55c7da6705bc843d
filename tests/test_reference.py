"""The oracle itself, against something even plainer: one query, one head, one number at a time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from quire import reference


def by_hand(q, k, v, t, h, group, see, scale, softcap=None, slope=0.0, sink=None):
    """Query t of head h, in Python floats."""
    logits = []
    for j in range(len(k)):
        s = sum(float(a) * float(b) for a, b in zip(q[t, h], k[j, h // group])) * scale
        if softcap:
            s = softcap * math.tanh(s / softcap)
        logits.append(s - slope * abs(len(k) - len(q) + t - j) if see(t, j) else None)
    total = sum(math.exp(s) for s in logits if s is not None) + (math.exp(sink) if sink is not None else 0.0)
    out = [
        sum(math.exp(s) / total * float(v[j, h // group, d]) for j, s in enumerate(logits) if s is not None)
        for d in range(v.shape[2])
    ]
    return out, math.log(total)


@pytest.mark.parametrize("feature", ["causal", "window", "two-sided", "softcap", "alibi", "sink", "tree"])
def test_by_hand(feature: str) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 4, 5), torch.randn(7, 2, 5), torch.randn(7, 2, 6)
    alibi, sinks = torch.rand(4), torch.randn(4)
    mask = torch.tensor([[True, False, False, True], [True, True, False, True], [False, False, True, True]])
    options, see, extra = {
        "causal": ({}, lambda t, j: j <= 4 + t, {}),
        "window": ({"window": (2, None)}, lambda t, j: 0 <= 4 + t - j <= 2, {}),
        "two-sided": ({"window": (1, 1), "causal": False}, lambda t, j: abs(4 + t - j) <= 1, {}),
        "softcap": ({"softcap": 0.7}, lambda t, j: j <= 4 + t, {"softcap": 0.7}),
        "alibi": ({"alibi": alibi}, lambda t, j: j <= 4 + t, {}),
        "sink": ({"sinks": sinks}, lambda t, j: j <= 4 + t, {}),
        "tree": ({"mask": mask}, lambda t, j: j < 4 or bool(mask[t, j - 4]), {}),
    }[feature]
    out, lse = reference.attention(q, k, v, scale=0.4, **options)
    for t in range(3):
        for h in range(4):
            slope = float(alibi[h]) if feature == "alibi" else 0.0
            sink = float(sinks[h]) if feature == "sink" else None
            want, want_lse = by_hand(q, k, v, t, h, 2, see, 0.4, slope=slope, sink=sink, **extra)
            assert out[t, h].tolist() == pytest.approx(want, rel=1e-9)
            assert float(lse[t, h]) == pytest.approx(want_lse, rel=1e-9)


def test_it_is_short_and_imports_only_torch() -> None:
    text = Path(reference.__file__).read_text()
    assert len(text.splitlines()) <= 60
    imports = [line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert set(imports) <= {"math", "torch"}
