"""Attention of one sequence in float64: the definition that all kernels are tested against."""

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, causal: bool = True,
    window: tuple[int | None, int | None] = (None, None), softcap: float | None = None, alibi: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, mask: torch.Tensor | None = None, positions: torch.Tensor | None = None,
    shard: tuple[int, int, int] | None = None, spans: torch.Tensor | None = None, select: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Dense attention of q [q_len, q_heads, head_dim] over k, v [kv_len, kv_heads, dim]; the queries are the last tokens. Returns
    out [q_len, q_heads, v_head_dim] and the LSE (natural log) [q_len, q_heads], both float64. Options as in `quire.Options`, but
    `window` is (left, right), None where unbounded, and `mask` is [q_len, q_len or more]. `shard` hides the keys of other ranks.
    With `spans` [q_len, 2] a query sees the keys [begin, end), regardless of `causal`; with `select` [q_len, kv_heads or 1, n]
    only keys at its positions; -1 is none.

    >>> attention(torch.zeros(1, 1, 2), torch.zeros(2, 1, 2), torch.tensor([[[1.0]], [[3.0]]]))[0].tolist()  # the mean of 1 and 3
    [[[2.0]]]
    """
    q, k, v = q.double(), k.double(), v.double()
    (q_len, q_heads, head_dim), (kv_len, kv_heads, _) = q.shape, k.shape
    context = kv_len - q_len

    # Positions: the queries are the last tokens of the sequence; with a tree mask positions are given.
    q_at = torch.arange(context, kv_len, device=q.device) if positions is None else positions.long()
    k_at = torch.arange(kv_len, device=q.device) if positions is None else torch.cat((torch.arange(context, device=q.device), q_at))
    distance = q_at[:, None] - k_at[None, :]

    # Which key is visible to which query.
    left, right = (torch.inf if side is None else side for side in window)
    visible = (distance <= left) & (distance >= -right)
    if mask is not None:
        visible[:, context:] &= mask[:, :q_len]
    elif spans is not None:
        visible &= (spans[:, :1] <= k_at) & (k_at < spans[:, 1:])
    elif causal:
        visible &= distance >= 0
    if shard is not None:
        visible &= torch.arange(kv_len, device=q.device) // shard[2] % shard[1] == shard[0]
    if select is not None:  # [kv_heads or 1, q_len, kv_len]; column kv_len stands for -1
        at = torch.where(select < 0, kv_len, select).long().transpose(0, 1)
        visible = visible & at.new_zeros(at.shape[0], q_len, kv_len + 1).bool().scatter(2, at, True)[..., :kv_len]

    # The heads of a group share their keys. A key that no query sees has no influence, even if it is NaN.
    visible = visible.expand(kv_heads, -1, -1).repeat_interleave(q_heads // kv_heads, dim=0)
    k, v = (torch.where(visible.any(1).T[..., None], x.repeat_interleave(q_heads // kv_heads, dim=1), 0.0) for x in (k, v))

    # Scale, softcap, mask, ALiBi; a sink is one more logit, without a value.
    logits = torch.einsum("qhd,khd->hqk", q, k) * (head_dim**-0.5 if scale is None else scale)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible, -torch.inf)
    logits = logits if alibi is None else logits - alibi.double()[:, None, None] * distance.abs()
    sink = torch.full((q_heads,), -torch.inf, device=q.device) if sinks is None else sinks
    lse = torch.cat((logits, sink.double()[:, None, None].expand(-1, q_len, 1)), dim=-1).logsumexp(-1)

    # A query that sees no key gives zeros and an LSE of -inf, or of the sink.
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T
