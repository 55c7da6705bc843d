"""The tests can fail: each fault that is planted in a kernel here makes the scenario that guards against it red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import quire
from quire.cache.format import Format
from quire.kernels.torch import features, read, strip
from support.kernels import kernel
from support.scenario import build

Patch = Callable[[pytest.MonkeyPatch], None]
LENS = {"q_lens": [1, 9, 20], "kv_lens": [50, 40, 75]}


def wrap(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """Replaces `owner.name` by `change(original, *args)`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kw: change(original, *args, **kw))

    return plant


def _visible_keys(**changes: Callable[[Any], Any]) -> Patch:
    def change(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        for name, new in changes.items():
            setattr(self, name, new(self))

    return wrap(features.VisibleKeys, "__init__", change)


def _tile_lost(original: Any, parts: Any) -> Any:
    return original(parts[:1])


def _averaged(original: Any, parts: Any) -> Any:
    outs = torch.cat([part.out for part in parts])
    return strip.PartialResult(outs.mean(0, keepdim=True), original(parts).lse)


def _neighbour(original: Any, self: Any, pages: torch.Tensor, *args: Any, **kw: Any) -> Any:
    return original(self, torch.where(pages > 0, pages - 1, pages), *args, **kw)


def _cast_without_saturation(self: Format, x: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
    return (x * 2).to(self.dtype)


FAULTS: dict[str, tuple[Patch, dict[str, Any]]] = {
    "causal off by one": (_visible_keys(high=lambda s: min(s.high, s.first + s.count - 1) if s.right == 0 else s.high), {}),
    "window off by one": (_visible_keys(left=lambda s: s.left and s.left - 1), {"window": 8}),
    "window ignored": (_visible_keys(left=lambda s: None, low=lambda s: 0), {"window": 8, "poison": 0.5, "bad_id": 0}),
    "a tile lost": (wrap(strip, "_merged", _tile_lost), {"kv_lens": [50, 3000, 75]}),
    "tiles averaged": (wrap(strip, "_merged", _averaged), {"kv_lens": [50, 3000, 75]}),
    "neighbour's page": (wrap(read.Reader, "read", _neighbour), {"poison": 0.5}),
    "scale of K not applied": (wrap(read.Reader, "_scale_of", lambda f, *a: f(*a) * 0 + 1), {"format": "e4m3fn"}),
    "softmax scale missing": (wrap(strip, "_rows_of", lambda f, q, *a: f(q, *a) * q.shape[2] ** 0.5), {}),
    "heads reversed": (wrap(strip, "_rows_of", lambda f, q, *a: f(q.flip(1), *a)), {}),
    "sink missing": (wrap(strip, "add_sink", lambda f, out, lse, options: (out, lse)), {"sinks": True}),
    "softcap missing": (wrap(strip, "cap_scores", lambda f, scores, options: scores), {"softcap": 0.5}),
    "alibi missing": (wrap(strip, "alibi_penalty", lambda f, *a: None), {"alibi": True}),
    "output row never written": (wrap(strip.Strip, "store", lambda f, self, out, lse: None), {}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, spec = FAULTS[name]
    s = build(40, **(LENS | spec))
    s.check(quire.attend(s.q, s.cache, s.batch, s.options, out=torch.full_like(s.q, torch.nan), kernel="torch"))
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="wrong, first at"):
        s.check(quire.attend(s.q, s.cache, s.batch, s.options, out=torch.full_like(s.q, torch.nan), kernel="torch"))


def test_planted_faults_of_the_writer_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import test_write as tests

    for owner, name, fault in (
        (Format, "encode", _cast_without_saturation),
        (Format, "token_scale", lambda format, x: torch.ones(x.shape[:2])),
        (quire.Batch, "slots_of_tokens", lambda self, tokens, page_size, slots=None: torch.arange(tokens)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault)
            with pytest.raises((AssertionError, quire.ContractError)), kernel("torch"):
                tests.test_what_is_written_is_read_back("aiter", "int8", "token")
