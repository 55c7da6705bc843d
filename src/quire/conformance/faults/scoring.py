"""Faults of scoring: scale, softcap, masks, ALiBi, sinks, heads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from quire.conformance import exact as x
from quire.conformance.build import alibi_slopes
from quire.conformance.call import Call
from quire.conformance.exact import PLAIN, Part, Row, Stages, Work
from quire.conformance.faults import solve
from quire.conformance.faults.fault import Fault

LN2 = math.log(2)
TILES = (16, 32, 64, 128, 8)
"""Sizes that tiles of keys have in kernels, the usual ones first."""


def _scaled(scale: Any) -> Stages:
    """Another softmax scale: `scale(w)`."""

    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return x.capped(w, x.products(x.factor(w, q, scale(w)), w.rounded(k), heads))

    return PLAIN.replace(score=score)


def _logits(change: Any) -> Stages:
    """Another way from products to logits: `change(w, products)`, the products not scaled yet."""

    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return change(w, x.products(q, w.rounded(k), heads))

    return PLAIN.replace(score=score)


def _tanh(cap: float, logits: torch.Tensor) -> torch.Tensor:
    return cap * torch.tanh(logits / cap)


def _has(name: str) -> Any:
    return lambda call: getattr(call, name) is not None


def _softcap_over_bias() -> Stages:
    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return x.products(q * w.call.scale, k, heads)

    def weigh(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
        hidden = logits == -torch.inf
        return x.weigh(w, x.capped(w, logits.masked_fill(hidden, 0.0)).masked_fill(hidden, -torch.inf), v, heads)

    return PLAIN.replace(score=score, weigh=weigh)


def _softcap_over_mask() -> Stages:
    """A hidden key's -inf becomes -softcap: every key of the sequence takes part a little."""

    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return x.products(q * w.call.scale, k, heads)

    def weigh(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
        return x.weigh(w, x.capped(w, logits), v, heads)

    return PLAIN.replace(score=score, weigh=weigh, keep_unseen=True)


def _shallow(fill: float, tile: int) -> Stages:
    """Hidden keys get a finite score in place of their product, and the scale makes it small: they keep a weight. So do the slots
    between a sequence's end and that of its tile, whose values are zero. The scale of the keys is a part of the softmax's."""

    def weigh(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
        kept = fill * w.call.scale * float(w.call.k_scale)  # type: ignore[arg-type]
        logits = logits.masked_fill(logits == -torch.inf, kept)
        behind = -(-v.shape[0] // tile) * tile - v.shape[0]
        logits = torch.cat((logits, logits.new_full((*logits.shape[:2], behind), kept)), -1)
        return x.weigh(w, logits, torch.cat((v, v.new_zeros(behind, *v.shape[1:]))), heads)

    return PLAIN.replace(weigh=weigh, keep_unseen=True)


def _shrinks_masks(call: Call) -> bool:
    """Whether a product of -50000 would not be hidden: its weight would show beside others."""
    return call.k_scale is not None and call.k_scale.dim() == 0 and 5e4 * call.scale * float(call.k_scale) < 6


def _see(change: Any) -> Stages:
    """Another sight: `change(w, row, far)` by distances [queries, keys]."""

    def see(w: Work, row: Row, keys: int) -> torch.Tensor:
        q_at, k_at = x.places(w, row, keys)
        return change(w, row, q_at[:, None] - k_at[None, :])

    return PLAIN.replace(see=see)


def _window(change: Any, now: int = 0) -> Stages:
    return _see(lambda w, row, far: x.within(w, row, far, change(*w.call.window), now))


def _left(by: int) -> Stages:
    return _window(lambda left, right: (None if left is None else max(left + by, -1), right))


def _right(by: int) -> Stages:
    return _window(lambda left, right: (left, None if right is None else right + by))


def _has_left(call: Call) -> bool:
    return call.window[0] is not None


def _looks_right(call: Call) -> bool:
    """Whether some row's right edge is the window's."""
    causal = bool(call.causal.all()) if isinstance(call.causal, torch.Tensor) else call.causal
    return call.window[1] is not None and not causal


def _left_by_tile(tile: int) -> Stages:
    """The window's left edge is that of a tile: keys of the same tile left of it are not masked."""

    def change(w: Work, row: Row, far: torch.Tensor) -> torch.Tensor:
        left, right = w.call.window
        assert left is not None
        visible = x.within(w, row, far, (None, right))
        keys = torch.arange(far.shape[1])
        q_at = far[:, :1] if far.shape[1] else far.new_zeros(far.shape[0], 1)
        first = (q_at - left).clamp(min=0) // tile * tile
        return visible & (keys[None, :] >= first)

    return _see(change)


def _causal_by_tile(tile: int) -> Stages:
    """Keys of the query's own tile are not masked."""

    def change(w: Work, row: Row, far: torch.Tensor) -> torch.Tensor:
        visible = x.within(w, row, far, w.call.window)
        keys = torch.arange(far.shape[1])
        q_at = far[:, :1] if far.shape[1] else far.new_zeros(far.shape[0], 1)
        return visible | ((keys // tile)[None, :] == q_at // tile) & (far < 0)

    return _see(change)


def _is_causal(call: Call) -> bool:
    return call.causal is True and call.mask is None


def _has_causal(call: Call) -> bool:
    return call.mask is None and (bool(call.causal.any()) if isinstance(call.causal, torch.Tensor) else call.causal)


def _now(by: int) -> Stages:
    return _see(lambda w, row, far: x.within(w, row, far, w.call.window, by if x.is_causal(w, row) else 0))


def _top_left() -> Stages:
    """Query i sees keys up to i, whatever context there is."""

    def change(w: Work, row: Row, far: torch.Tensor) -> torch.Tensor:
        return x.within(w, row, far - row.context, w.call.window)

    return _see(change)


def _all_causal(value: bool) -> Stages:
    def change(w: Work, row: Row, far: torch.Tensor) -> torch.Tensor:
        left, right = w.call.window
        visible = torch.ones(far.shape, dtype=torch.bool)
        if left is not None:
            visible &= far <= left
        if right is not None:
            visible &= far >= -right
        return visible & (far >= 0) if value else visible

    return _see(change)


def _hidden(which: Any) -> Stages:
    """Some keys are not seen: `which(w, row, far)` is True for them."""

    def change(w: Work, row: Row, far: torch.Tensor) -> torch.Tensor:
        return x.within(w, row, far, w.call.window) & ~which(w, row, far)

    return _see(change)


def _key_at(position: Any) -> Stages:
    def which(w: Work, row: Row, far: torch.Tensor) -> torch.Tensor:
        return (torch.arange(far.shape[1]) == position(row))[None, :].expand(far.shape)

    return _hidden(which)


def _keys_between(first: int, last: int) -> Stages:
    def which(w: Work, row: Row, far: torch.Tensor) -> torch.Tensor:
        keys = torch.arange(far.shape[1])
        return ((keys >= first) & (keys < last))[None, :].expand(far.shape)

    return _hidden(which)


def _without_last_tile(tile: int, spared: bool) -> Stages:
    """Only whole tiles are seen; a sequence that is shorter than one may be spared."""

    def which(w: Work, row: Row, far: torch.Tensor) -> torch.Tensor:
        n = far.shape[1]
        end = n if spared and n < tile else n // tile * tile
        return (torch.arange(n) >= end)[None, :].expand(far.shape)

    return _hidden(which)


def _part_tiles(call: Call) -> list[int]:
    """Sizes of tiles that some sequence with queries fills at least one of, and ends within another."""
    asked = call.kv_lens[call.q_starts.diff() > 0].tolist()
    return [tile for tile in TILES if any(n > tile and n % tile for n in asked)]


def _by_distance(distance: int) -> Stages:
    return _hidden(lambda w, row, far: far == distance)


def _counted(first: int, last: int, from_end: bool = False) -> Stages:
    """Keys of a range weigh twice."""

    def bias(w: Work, row: Row, keys: int) -> torch.Tensor | float:
        at = torch.arange(keys)
        lo, hi = (row.kv_len - last, row.kv_len - first) if from_end else (first, last)
        twice = torch.where((at >= lo) & (at < hi), math.log(2.0), 0.0).to(w.number)
        return x.bias(w, row, keys) + twice

    return PLAIN.replace(bias=bias)


def _plain_causal() -> Stages:
    """A tree mask is ignored: the drafts are taken for a line."""
    return _see(lambda w, row, far: _line(w, row, far))


def _line(w: Work, row: Row, far: torch.Tensor) -> torch.Tensor:
    q_at, k_at = torch.arange(row.context, row.kv_len), torch.arange(far.shape[1])
    visible = (q_at[:, None] >= k_at[None, :]).clone()
    left = w.call.window[0]
    return visible if left is None else visible & (far <= left)


def _mask_transposed() -> Stages:
    def change(w: Work, row: Row, far: torch.Tensor) -> torch.Tensor:
        visible = x.within(w, row, far, w.call.window)
        tree = w.call.mask[row.first : row.first + row.q_len, : row.q_len].cpu()  # type: ignore[index]
        visible[:, row.context :] = tree.T
        return visible

    return _see(change)


def _mask_hides_context() -> Stages:
    def change(w: Work, row: Row, far: torch.Tensor) -> torch.Tensor:
        visible = x.within(w, row, far, w.call.window)
        visible[:, : row.context] = False
        return visible

    return _see(change)


def _alibi(change: Any) -> Stages:
    """Another bias: `change(w, q_at [queries, 1], k_at [1, keys])`, with slopes."""

    def bias(w: Work, row: Row, keys: int) -> torch.Tensor | float:
        q_at, k_at = x.places(w, row, keys)
        return change(w, q_at[:, None], k_at[None, :])

    return PLAIN.replace(bias=bias)


def _local_slopes(heads: Any) -> Stages:
    def change(w: Work, q_at: torch.Tensor, k_at: torch.Tensor) -> torch.Tensor:
        return -alibi_slopes(heads(w.call))[: w.call.q_heads].to(w.number)[:, None, None] * (q_at - k_at).abs()

    return _alibi(change)


def _sink(change: Any) -> Stages:
    """Another sink: `change(w, sinks [q_heads, 1, 1], logits)`; -inf is none."""

    def weigh(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
        extra = change(w, x.sink(w), logits).expand(*logits.shape[:2], 1)
        full = x.weigh(_without_sink(w), torch.cat((logits, extra), -1), torch.cat((v, torch.zeros_like(v[:1]))), heads)
        return full

    return PLAIN.replace(weigh=weigh)


def _without_sink(w: Work) -> Work:
    bare = Work(dataclasses.replace(w.call, sinks=None), w.number, w.factors)
    return bare


def _valued_sink(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
    """The sink's weight falls on the first key's value."""
    extra = x.sink(w)
    assert extra is not None
    first = v[:1] if v.shape[0] else v.new_zeros(1, *v.shape[1:])
    return x.weigh(_without_sink(w), torch.cat((logits, extra.expand(*logits.shape[:2], 1)), -1), torch.cat((v, first)), heads)


def _cut_sink(w: Work, sinks: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A query whose window does not reach the first key gets no sink."""
    if not logits.shape[-1]:
        return sinks
    return sinks.expand(*logits.shape[:2], 1).masked_fill(logits[..., :1] == -torch.inf, -torch.inf)


def _heads(change: Any) -> Stages:
    """Another kv head for each query head: `change(call) -> [q_heads]`."""
    return PLAIN.replace(kv_head=lambda w: change(w.call))


def _query(by: int) -> Stages:
    """Each row's query is the next one's, seen from its own place."""

    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        at = (torch.arange(q.shape[0]) + by).clamp(0, q.shape[0] - 1)
        return x.score(w, q[at], k, heads)

    return PLAIN.replace(score=score)


def _q_heads_as(change: Any) -> Stages:
    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return x.score(w, q[:, change(w.call)], k, heads)

    return PLAIN.replace(score=score)


def _dims(keep: Any) -> Stages:
    """Only some dims of q and k are multiplied: `keep(head_dim) -> index`."""

    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        at = keep(q.shape[2])
        return x.score(w, q[..., at], k[..., at], heads)

    return PLAIN.replace(score=score)


def _several_heads(call: Call) -> bool:
    return call.kv_heads > 1


def _groups(call: Call) -> bool:
    return call.kv_heads > 1 and call.q_heads > call.kv_heads


def _long(call: Call) -> bool:
    return call.seqs > 0 and int(call.q_starts.diff().max()) > 1


DIMS: dict[str, Callable[[Call], float]] = {
    "2 head_dim": lambda call: 2 * call.q.shape[2],
    "head_dim / 2": lambda call: max(call.q.shape[2] / 2, 1),
    "v_head_dim": lambda call: call.out.shape[2],
    "padded head_dim": lambda call: 1 << (call.q.shape[2] - 1).bit_length(),
    "q_heads": lambda call: call.q_heads,
}
ORDERS: dict[str, Callable[[Call], torch.Tensor]] = {
    "kv head": lambda call: torch.arange(call.q_heads) // (call.q_heads // call.kv_heads),
    "within group": lambda call: torch.arange(call.q_heads) % (call.q_heads // call.kv_heads),
    "reversed": lambda call: torch.arange(call.q_heads).flip(0),
    "first": lambda call: torch.zeros(call.q_heads, dtype=torch.long),
    "reversed in group": lambda call: torch.arange(call.q_heads).view(call.kv_heads, -1).flip(1).reshape(-1),
    "group first": lambda call: torch.arange(call.q_heads).view(call.kv_heads, -1).T.reshape(-1),
    "kv head first": lambda call: torch.arange(call.q_heads).view(-1, call.kv_heads).T.reshape(-1),
}
KEPT: dict[str, Callable[[int], torch.Tensor]] = {
    "all but last": lambda d: torch.arange(d - 1),
    "all but first": lambda d: torch.arange(1, d),
    "first half": lambda d: torch.arange(max(d // 2, 1)),
    "whole 16s": lambda d: torch.arange(max(d // 16 * 16 if d % 16 else d - 16, 1)),
    "whole 32s": lambda d: torch.arange(max(d // 32 * 32 if d % 32 else d - 32, 1)),
    "power of two": lambda d: torch.arange(1 << (d.bit_length() - 1)),
}

SCORING = (
    Fault(
        "scale-missing",
        "scale",
        "the softmax is far too sharp",
        "the caller was to multiply q, or the kernel was",
        lambda: _scaled(lambda w: 1.0),
        lambda call: call.scale != 1.0,
    ),
    Fault(
        "scale-twice",
        "scale",
        "the softmax is far too flat",
        "q was already multiplied by the scale; vLLM's reference does it in place",
        lambda: _scaled(lambda w: w.call.scale**2),
        lambda call: call.scale != 1.0,
        issues=("vLLM ref_paged_attn: q *= scale",),
    ),
    Fault(
        "scale-doubled",
        "scale",
        "the softmax is too sharp by a factor of two",
        "a factor that belongs to one of two paths is applied on both",
        lambda: _scaled(lambda w: w.call.scale * 2),
    ),
    Fault(
        "scale-of-wrong-dim",
        "scale",
        "the softmax is somewhat too flat or too sharp",
        "1/sqrt of the padded head_dim, of v_head_dim, of q_heads",
        lambda dim: _scaled(lambda w: DIMS[dim](w.call) ** -0.5),
        lambda call: abs(call.scale - call.q.shape[2] ** -0.5) < 1e-9,
        ({"dim": "2 head_dim"}, {"dim": "head_dim / 2"}, {"dim": "v_head_dim"}, {"dim": "padded head_dim"}, {"dim": "q_heads"}),
        issues=("FlashInfer #4014",),
    ),
    Fault(
        "scale-ignored",
        "scale",
        "a scale of the caller's own is replaced by 1/sqrt(head_dim)",
        "a cached plan or graph that leaves the scale out of its key",
        lambda: _scaled(lambda w: w.call.q.shape[2] ** -0.5),
        lambda call: abs(call.scale - call.q.shape[2] ** -0.5) > 1e-9,
        issues=("FlashInfer #4014",),
    ),
    Fault(
        "exp2-without-log2e",
        "scale",
        "the softmax is too flat by ln 2",
        "exp2 is faster than exp; log2(e) must be in the scale, and in whatever is added to logits",
        lambda: PLAIN.replace(weigh=_exp2),
    ),
    Fault(
        "scale-off-by-factor",
        "scale",
        "the softmax is too flat or too sharp by one factor everywhere",
        "some other factor is in the scale",
        lambda factor: _scaled(lambda w: w.call.scale * factor),
        tries=(),
        solve=solve.score_factor,
        plant=lambda call: {"factor": 1.25},
    ),
    Fault(
        "q-scale-missing",
        "scale",
        "logits are off by the scale of fp8 queries",
        "the scale is folded into the softmax scale on one path only",
        lambda: _scaled(lambda w: w.call.scale / w.call.q_scale),
        _has("q_scale"),
    ),
    Fault(
        "softcap-missing",
        "softcap",
        "large logits are too large",
        "an option that is accepted and never passed on",
        lambda: _logits(lambda w, s: s * w.call.scale),
        _has("softcap"),
        issues=("vLLM ROCM_ATTN accepts and drops it",),
    ),
    Fault(
        "softcap-before-scale",
        "softcap",
        "logits are capped too early and then shrunk",
        "the cap is applied to q·k, the scale afterwards",
        lambda: _logits(lambda w, s: _tanh(w.call.softcap, s) * w.call.scale),
        _has("softcap"),
    ),
    Fault(
        "softcap-without-factor",
        "softcap",
        "logits stay between -1 and 1",
        "tanh(logit / cap) without multiplying by cap again",
        lambda: _logits(lambda w, s: torch.tanh(s * w.call.scale / w.call.softcap)),
        _has("softcap"),
    ),
    Fault(
        "softcap-after-mask",
        "softcap",
        "hidden keys take part a little: their -inf became -softcap",
        "the mask is added before the tanh",
        _softcap_over_mask,
        _has("softcap"),
    ),
    Fault(
        "softcap-on-bias",
        "softcap",
        "far keys weigh too much: their bias was capped too",
        "ALiBi is added before the tanh",
        _softcap_over_bias,
        lambda call: call.softcap is not None and call.alibi is not None,
    ),
    Fault(
        "window-left-off",
        "window",
        "one key too many or too few at the left edge",
        "W counts the query's own key in one convention and not in the other",
        lambda by: _left(by),
        _has_left,
        ({"by": -1}, {"by": 1}, {"by": -2}, {"by": 2}),
        issues=("vLLM ROCM_ATTN passes W-1", "transformers #41184", "vLLM #3385"),
    ),
    Fault(
        "window-right-off",
        "window",
        "one key too many or too few at the right edge",
        "two-sided windows are rare, and their right edge is tested by nobody",
        lambda by: _right(by),
        _looks_right,
        ({"by": -1}, {"by": 1}, {"by": -2}, {"by": 2}),
    ),
    Fault(
        "window-ignored",
        "window",
        "everything to the left is seen",
        "an option that is not passed, or -1 that means something else elsewhere",
        lambda: _window(lambda left, right: (None, right)),
        _has_left,
        issues=("pytorch #173469", "AITER #3158", "mistral.rs #2094"),
    ),
    Fault(
        "window-right-ignored",
        "window",
        "everything to the right is seen",
        "a kernel whose window has only a left side",
        lambda: _window(lambda left, right: (left, None)),
        _looks_right,
    ),
    Fault(
        "window-one-sided",
        "window",
        "nothing to the right is seen",
        "a two-sided window is taken for a causal one",
        lambda: _see(lambda w, row, far: x.within(w, row, far, (w.call.window[0], 0))),
        _looks_right,
    ),
    Fault(
        "window-left-by-tile",
        "window",
        "keys left of the window are seen if they share a tile with its edge",
        "tiles outside the window are skipped, and the first one is not masked",
        lambda tile: _left_by_tile(tile),
        _has_left,
        tuple({"tile": n} for n in TILES),
        issues=("mistral.rs #2094",),
    ),
    Fault(
        "window-cuts-sink",
        "window",
        "rows whose window does not begin at the first key lose their sink",
        "the sink is put in with the first tile, which the window skips",
        lambda: _sink(_cut_sink),
        lambda call: call.sinks is not None and _has_left(call),
    ),
    Fault(
        "causal-off-by-one",
        "causality",
        "each query sees the next key, or not its own",
        "< where <= was meant, or the other way round",
        lambda by: _now(by),
        _has_causal,
        ({"by": 1}, {"by": -1}),
    ),
    Fault(
        "causal-top-left",
        "causality",
        "queries behind a context see almost nothing of it",
        "the mask is aligned to the first key instead of the last",
        _top_left,
        _has_causal,
        issues=("FlashAttention 2.1 changed the alignment",),
    ),
    Fault(
        "causal-ignored",
        "causality",
        "a prefill sees its own future",
        "a flag that is not passed",
        lambda: _all_causal(False),
        _has_causal,
    ),
    Fault(
        "causal-where-not-asked",
        "causality",
        "an encoder's rows see nothing to the right",
        "a kernel that knows only causal attention, and does not say so",
        lambda: _all_causal(True),
        lambda call: call.causal is not True and call.mask is None,
        issues=("AITER unified_attention is causal only",),
    ),
    Fault(
        "causal-by-tile",
        "causality",
        "queries see later keys of their own tile",
        "the diagonal tile is not masked",
        lambda tile: _causal_by_tile(tile),
        _is_causal,
        tuple({"tile": n} for n in TILES),
    ),
    Fault(
        "mask-too-shallow",
        "keys",
        "keys beyond the end, and hidden ones, keep a little weight",
        "hidden scores become -50000 before the scale is applied, and a small scale of the keys is in it",
        lambda fill, tile: _shallow(fill, tile),
        _shrinks_masks,
        tuple({"fill": fill, "tile": tile} for fill in (-5e4, -3e4, -1e4) for tile in (128, 64, 32, 16, 1)),
        issues=("FlashInfer 0.6.12: math::inf is 5e4, k_scale is folded into sm_scale",),
    ),
    Fault(
        "last-token-missing",
        "keys",
        "the newest key of each sequence is not seen",
        "kv_len - 1 somewhere, or a cache that was not written yet",
        lambda: _key_at(lambda row: row.kv_len - 1),
        issues=("FlashInfer plan() not re-run: TRT-LLM #18769",),
    ),
    Fault(
        "first-token-missing",
        "keys",
        "the first key of each sequence is not seen",
        "a loop that starts at 1",
        lambda: _key_at(lambda row: 0),
    ),
    Fault(
        "own-token-missing",
        "keys",
        "no query sees its own key",
        "the diagonal is masked",
        lambda: _by_distance(0),
    ),
    Fault(
        "token-missing",
        "keys",
        "one key is not seen",
        "a slot that was skipped or never written",
        lambda position: _key_at(lambda row: position),
        tries=(),
        solve=solve.missing_token,
        plant=lambda call: {"position": int(call.kv_lens.max()) // 2},
    ),
    Fault(
        "token-missing-from-end",
        "keys",
        "the key a few places before the end is not seen",
        "speculative tokens that were accepted and not written",
        lambda back: _key_at(lambda row: row.kv_len - back),
        tries=(),
        solve=solve.missing_from_end,
        plant=lambda call: {"back": 2},
    ),
    Fault(
        "token-missing-at-distance",
        "keys",
        "no query sees the key that lies a certain way to its left",
        "the border between two tiles or two loops",
        lambda distance: _by_distance(distance),
        tries=(),
        solve=solve.missing_at_distance,
        plant=lambda call: {"distance": 1},
    ),
    Fault(
        "keys-missing",
        "keys",
        "a run of keys is not seen: a page, a tile, a split, or all beyond some point",
        "a tile that is skipped, a loop that ends too early, a split that is dropped",
        lambda first, last: _keys_between(first, last),
        tries=(),
        solve=solve.missing_keys,
        plant=lambda call: {"first": call.page_size, "last": 2 * call.page_size},
        issues=("FlashInfer #3219",),
    ),
    Fault(
        "last-tile-dropped",
        "keys",
        "keys of a tile that a sequence does not fill are not seen",
        "the number of tiles is rounded down; a sequence of less than one tile may be spared, or see nothing",
        lambda tile, spared: _without_last_tile(tile, spared),
        lambda call: bool(_part_tiles(call)),
        tuple({"tile": n, "spared": spared} for n in TILES for spared in (True, False)),
        plant=lambda call: {"tile": _part_tiles(call)[0], "spared": True},
    ),
    Fault(
        "keys-counted-twice",
        "keys",
        "a run of keys weighs twice",
        "tiles of two loops overlap; a page is in two splits",
        lambda first, last: _counted(first, last),
        tries=(),
        solve=solve.doubled_keys,
        plant=lambda call: {"first": 0, "last": call.page_size},
    ),
    Fault(
        "last-token-counted-twice",
        "keys",
        "the newest key weighs twice",
        "it is read from the cache and from k as well",
        lambda: _counted(0, 1, from_end=True),
    ),
    Fault(
        "new-tokens-counted-twice",
        "keys",
        "the new keys weigh twice",
        "they are read from the cache and from k as well",
        lambda: PLAIN.replace(bias=_new_twice),
    ),
    Fault(
        "tree-ignored",
        "tree",
        "drafts see their siblings",
        "a mask that is not passed: the drafts are taken for a line",
        _plain_causal,
        _has("mask"),
    ),
    Fault(
        "tree-transposed",
        "tree",
        "drafts see their children instead of their parents",
        "rows and columns of the mask change places",
        _mask_transposed,
        _has("mask"),
    ),
    Fault(
        "tree-hides-context",
        "tree",
        "drafts see only each other",
        "the mask is taken for all keys, not for the new ones",
        _mask_hides_context,
        _has("mask"),
    ),
    Fault(
        "positions-ignored",
        "tree",
        "biases and windows of drafts follow their rows, not their depth",
        "positions are counted instead of read",
        lambda: PLAIN.replace(bias=_counted_bias, see=_counted_see),
        _has("positions"),
    ),
    Fault(
        "alibi-missing",
        "alibi",
        "far keys weigh too much",
        "a kernel that does not know ALiBi and does not say so",
        lambda: _alibi(lambda w, q_at, k_at: 0.0),
        _has("alibi"),
        issues=("vLLM #57614",),
    ),
    Fault(
        "alibi-sign",
        "alibi",
        "far keys weigh more than near ones",
        "slope * (q - k) added instead of subtracted",
        lambda: _alibi(lambda w, q_at, k_at: x.slopes(w) * (q_at - k_at).abs()),
        _has("alibi"),
    ),
    Fault(
        "alibi-slopes-of-local-heads",
        "alibi",
        "every head has the slope of another",
        "slopes are derived from the number of heads on this GPU",
        lambda times: _local_slopes(lambda call: call.q_heads * times),
        _has("alibi"),
        ({"times": 1}, {"times": 2}),
        issues=("FlashInfer #1606", "FlashInfer #5101"),
    ),
    Fault(
        "alibi-from-wrong-end",
        "alibi",
        "early keys weigh more than late ones",
        "the bias is taken from the key's own position instead of its distance",
        lambda: _alibi(lambda w, q_at, k_at: -x.slopes(w) * k_at),
        _has("alibi"),
    ),
    Fault(
        "alibi-scaled",
        "alibi",
        "far keys weigh too much",
        "the bias is added before the scale is applied",
        lambda: _alibi(lambda w, q_at, k_at: -x.slopes(w) * w.call.scale * (q_at - k_at).abs()),
        _has("alibi"),
    ),
    Fault(
        "alibi-not-relative",
        "alibi",
        "only rows with a sink, and every LSE, are off",
        "slope * k_pos without the query's position: a constant for each row, until something else is in the sum",
        lambda to: _alibi(lambda w, q_at, k_at: x.slopes(w) * (k_at - (0 if to == "first key" else q_at[:1]))),
        lambda call: call.alibi is not None and (call.sinks is not None or call.lse is not None),
        ({"to": "first key"}, {"to": "first new token"}),
        issues=("vLLM unified_attention: slope * (k_pos - context)",),
    ),
    Fault(
        "sink-missing",
        "sinks",
        "outputs are too large",
        "an option that is not passed",
        lambda: _sink(lambda w, sinks, logits: torch.full_like(sinks, -torch.inf)),
        _has("sinks"),
    ),
    Fault(
        "sink-scaled",
        "sinks",
        "outputs are off by the weight of a sink that is too small or too large",
        "the sink is put in before the scale is applied, or in the other base",
        lambda by: _sink(lambda w, sinks, logits: sinks * {"scale": w.call.scale, "ln 2": LN2, "1 / ln 2": 1 / LN2}[by]),
        _has("sinks"),
        tuple({"by": factor} for factor in ("scale", "ln 2", "1 / ln 2")),
    ),
    Fault(
        "sink-with-value",
        "sinks",
        "some of the first token's value is mixed in",
        "the sink is taken for a token",
        lambda: PLAIN.replace(weigh=_valued_sink),
        _has("sinks"),
    ),
    Fault(
        "sink-in-every-split",
        "sinks",
        "outputs are too small, the more so the more splits there are",
        "each split adds the sink, and the combination adds them up",
        lambda splits: _sink(lambda w, sinks, logits: sinks + math.log(splits)),
        _has("sinks"),
        tuple({"splits": n} for n in (2, 4, 8, 16, 3)),
    ),
    Fault(
        "sink-of-another-head",
        "sinks",
        "each head has the sink of another",
        "sinks indexed within the group, or in another order",
        lambda order: _sink(lambda w, sinks, logits: sinks[ORDERS[order](w.call)]),
        _has("sinks"),
        ({"order": "kv head"}, {"order": "within group"}, {"order": "reversed"}, {"order": "first"}),
    ),
    Fault(
        "kv-heads-interleaved",
        "heads",
        "most heads read another head's keys",
        "query head h reads kv head h % kv_heads instead of h // group",
        lambda: _heads(lambda call: torch.arange(call.q_heads) % call.kv_heads),
        _groups,
    ),
    Fault(
        "kv-head-wrong",
        "heads",
        "some heads read another head's keys and values",
        "an index of heads that is local to something else",
        lambda heads: _heads(lambda call: torch.tensor(heads)),
        _several_heads,
        tries=(),
        solve=solve.head_map,
        plant=lambda call: {"heads": [0] * call.q_heads},
    ),
    Fault(
        "query-off-by-one",
        "heads",
        "each row is computed with the next one's query",
        "an index into q that counts from 1",
        lambda by: _query(by),
        _long,
        ({"by": 1}, {"by": -1}),
    ),
    Fault(
        "query-heads-reversed",
        "heads",
        "each head is computed with another's query",
        "heads of a group are packed in another order than they are unpacked",
        lambda order: _q_heads_as(ORDERS[order]),
        lambda call: call.q_heads > 1,
        ({"order": "reversed"}, {"order": "reversed in group"}, {"order": "group first"}, {"order": "kv head first"}),
    ),
    Fault(
        "dims-cut",
        "heads",
        "logits miss the last dims",
        "a head_dim that is no multiple of the tile is rounded down",
        lambda keep: _dims(KEPT[keep]),
        lambda call: call.q.shape[2] > 1,
        tuple({"keep": name} for name in ("all but last", "first half", "whole 16s", "whole 32s", "power of two", "all but first")),
        issues=("vLLM #16808", "vLLM #12656"),
    ),
)


def _exp2(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
    ln2 = math.log(2.0)
    sinks = None if w.call.sinks is None else w.call.sinks * ln2
    return x.weigh(Work(dataclasses.replace(w.call, sinks=sinks), w.number, w.factors), logits * ln2, v, heads)


def _new_twice(w: Work, row: Row, keys: int) -> torch.Tensor | float:
    twice = torch.where(torch.arange(keys) >= row.context, math.log(2.0), 0.0).to(w.number)
    return x.bias(w, row, keys) + twice


def _counted_bias(w: Work, row: Row, keys: int) -> torch.Tensor | float:
    if w.call.alibi is None:
        return 0.0
    q_at = torch.arange(row.context, row.kv_len)
    return -x.slopes(w) * (q_at[:, None] - torch.arange(keys)[None, :]).abs()


def _counted_see(w: Work, row: Row, keys: int) -> torch.Tensor:
    q_at = torch.arange(row.context, row.kv_len)
    return x.within(w, row, q_at[:, None] - torch.arange(keys)[None, :], w.call.window)
