"""A strip: a few consecutive queries of one sequence, which attend to one tile of keys after the other."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from quire.kernels.torch.features import VisibleKeys, add_sink, alibi_penalty, cap_scores, changes_scores, softmax_share
from quire.options import Options
from quire.problem import is_fp8

FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""torch's fused attention of one dense tile, with its LSE: one operator instead of eight. In fp32 it multiplies in fp32."""

HELD = 1 << 19
"""The numbers that a strip keeps before it merges partial results: the small ones of a decode are merged many at a time."""


class PartialResult(NamedTuple):
    """Attention over some of the keys: `out [parts, kv_heads, rows, v_head_dim]` and `lse [parts, kv_heads, rows, 1]`, fp32. A row
    is one query token of one query head of the group. A tile gives one part or several."""

    out: torch.Tensor
    lse: torch.Tensor


class Strip:
    """The queries of a few consecutive tokens, and their partial results."""

    def __init__(self, q: torch.Tensor, tokens: slice, keys: VisibleKeys, kv_heads: int, options: Options, buffer: torch.Tensor):
        self.tokens, self.keys, self.options = tokens, keys, options
        self.rows = _rows_of(q[tokens], kv_heads, options, buffer)
        self.held: list[PartialResult] = []
        """Results of tiles that are not merged yet."""

    def attend_tile(self, k: torch.Tensor, v: torch.Tensor, low: int, high: int) -> None:
        """Attends to the visible ones of keys [low, high); k and v are `[parts, kv_heads, keys / parts, dim]`."""
        first, last = max(low, self.keys.low), min(high, self.keys.high)
        if first >= last:
            return
        if (first, last) != (low, high):
            k, v = k[:, :, first - low : last - low], v[:, :, first - low : last - low]
        visible = self.keys.visible(first, last, k.device)
        if self.keys.by_key and visible is not None:
            # A key may be hidden from every query: then 0 * NaN must not reach them.
            unseen = ~visible.any(0).view(1, 1, -1, 1)
            k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
        bias = self._bias(first, last, visible)
        if bias is not None:
            bias = bias.unflatten(2, (k.shape[0], -1)).permute(2, 0, 1, 3)
        rows = self.rows.expand(k.shape[0], -1, -1, -1)
        fused = not changes_scores(self.options) and k.shape[3] == v.shape[3] and k.device.type == "cpu"
        part = _fused(rows, k, v, bias) if fused else _plain(rows, k, v, bias, self.options)
        if visible is not None:
            # A query that sees none of these keys gets zeros, whatever the products gave.
            blind = ~visible.any(1)
            if bool(blind.any()):
                blind = blind.repeat_interleave(part.out.shape[2] // self.keys.count).view(1, 1, -1, 1)
                part = PartialResult(part.out.masked_fill(blind, 0.0), part.lse.masked_fill(blind, -math.inf))
        self.held.append(part)
        if len(self.held) * part.out.numel() > HELD:
            self.held = [_merged(self.held)]

    def _bias(self, low: int, high: int, visible: torch.Tensor | None) -> torch.Tensor | None:
        """What is added to the logits, `[kv_heads or 1, rows, keys]`: -inf for keys a query does not see, ALiBi's penalty."""
        bias = None
        if visible is not None:
            bias = torch.zeros(visible.shape, dtype=torch.float32, device=visible.device).masked_fill_(~visible, -math.inf)
        kv_heads, rows = self.rows.shape[:2]
        penalty = alibi_penalty(self.options, self.keys, low, high, kv_heads)
        if penalty is not None:
            bias = -penalty if bias is None else bias.unsqueeze(1) - penalty
            return bias.view(kv_heads, rows, high - low)
        if bias is None:
            return None
        return bias.unsqueeze(1).expand(-1, rows // self.keys.count, -1).reshape(1, rows, high - low)

    def store(self, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Applies the sink, and stores rows as tokens and heads."""
        kv_heads = self.rows.shape[0]
        to = out[self.tokens].unflatten(1, (kv_heads, -1))  # [tokens, kv_heads, group, v_head_dim]
        rows, rows_lse = (x[0].unflatten(1, (to.shape[0], -1)) for x in _merged(self.held)) if self.held else _no_keys(to)
        rows, rows_lse = add_sink(rows, rows_lse, self.options)
        if self.options.out_scale is not None:
            rows = rows / self.options.out_scale
        if is_fp8(out.dtype):
            largest = torch.finfo(out.dtype).max
            rows = rows.clamp(-largest, largest)
        to.copy_(rows.transpose(0, 1))
        if lse is not None:
            lse[self.tokens].unflatten(1, (kv_heads, -1)).copy_(rows_lse.squeeze(3).transpose(0, 1))


def _rows_of(q: torch.Tensor, kv_heads: int, options: Options, buffer: torch.Tensor) -> torch.Tensor:
    """Queries `[tokens, q_heads, head_dim]` as scaled fp32 rows `[kv_heads, tokens * group, head_dim]`, in `buffer`."""
    scale = q.shape[2] ** -0.5 if options.scale is None else options.scale
    if options.q_scale is not None:
        scale = scale * options.q_scale
    by_group = q.unflatten(1, (kv_heads, -1)).transpose(0, 1)
    rows = buffer.view(by_group.shape).copy_(by_group).mul_(scale)
    return rows.view(kv_heads, -1, q.shape[2])


def _fused(rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> PartialResult:
    """Attention of rows over the parts of a tile, in one operator."""
    out, lse = FUSED(rows, k, v, 0.0, False, attn_mask=bias, scale=1.0)
    return PartialResult(out, lse.unsqueeze(-1))


def _plain(rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, options: Options) -> PartialResult:
    """The same in several operators: what the fused one does not support (changed scores, values of another size, other
    devices)."""
    scores = cap_scores(rows @ k.transpose(2, 3), options)
    if bias is not None:
        scores += bias
    lse = torch.logsumexp(scores, -1, keepdim=True)
    return PartialResult(scores.sub_(lse).exp_() @ v, lse)


def _merged(parts: list[PartialResult]) -> PartialResult:
    """Merges partial results, each weighted by its share of the softmax."""
    if len(parts) == 1 and parts[0].lse.shape[0] == 1:
        return parts[0]
    if len(parts) == 2 and all(part.lse.shape[0] == 1 for part in parts):
        total, part = parts
        lse = torch.logaddexp(total.lse, part.lse)
        return PartialResult(total.out.mul_(softmax_share(total.lse, lse)).addcmul_(part.out, softmax_share(part.lse, lse)), lse)
    outs, lses = (torch.cat(x) for x in zip(*parts))
    lse = torch.logsumexp(lses, 0, keepdim=True)
    return PartialResult((outs * softmax_share(lses, lse)).sum(0, keepdim=True), lse)


def _no_keys(to: torch.Tensor) -> PartialResult:
    """The result of queries without visible keys: zeros, and an LSE of -inf."""
    shape = (to.shape[1], to.shape[0], to.shape[2])
    zeros = torch.zeros(*shape, to.shape[3], dtype=torch.float32, device=to.device)
    return PartialResult(zeros, torch.full((*shape, 1), -math.inf, dtype=torch.float32, device=to.device))
