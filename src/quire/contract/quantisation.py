"""What a quantising write loses: elements that saturate, and tokens of which nothing is left."""

from __future__ import annotations

import warnings

import torch

from quire.cache.format import Format
from quire.contract.call import Call
from quire.errors import QuantisationWarning


def warn_of_losses(call: Call) -> None:
    """Warns once for each loss in the keys or values that a call stores."""
    cache = call.cache
    if not cache.quantised or call.k is None or call.v is None:
        return
    slots = call.batch.slots_of_tokens(call.k.shape[0], cache.page_size, call.slots)
    k, v = stored_rows(call)
    parts = [(k, cache.k_scale, cache.k_format), (v, cache.v_scale, cache.v_format)]
    if cache.v_in_k is not None:
        parts = [(torch.cat((k, v), -1), cache.k_scale, cache.k_format)]
    for name, (x, scale, format) in zip("kv", parts):
        for message in losses(name, x[slots >= 0], scale, format) if format.scaled else ():
            warnings.warn(message, QuantisationWarning, stacklevel=4)


def stored_rows(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values, or both parts of keys, that a write stores: rotated, if it rotates them."""
    assert call.k is not None and call.v is not None
    if call.rope is None:
        return call.k, call.v
    tokens, batch, at = call.k.shape[0], call.batch, call.rope_positions
    at = batch.positions_of_tokens(tokens) if at is None else at
    return call.rope.rotate_rows(call.k, call.v, at, call.cache.v_in_k)


def losses(name: str, x: torch.Tensor, scale: torch.Tensor | None, format: Format) -> list[str]:
    """What storing the rows `x` `[tokens, heads, dim]` loses, each in one sentence that begins with its name: `saturation` or
    `underflow`. A scale for each token fits that token, so nothing saturates then."""
    found = []
    per_token = scale is not None and scale.dim() == 3
    assert format.largest is not None
    if per_token:
        divisor = format.token_scale(x).unsqueeze(-1)
    else:
        divisor = torch.ones((), device=x.device) if scale is None else scale.float().reshape(-1, 1)
    scaled = x.float() / divisor
    beyond = scaled.abs() > format.largest * (1 + torch.finfo(torch.float32).eps)
    if not per_token and bool(beyond.any()):
        factor = float((scaled.abs() / format.largest).nan_to_num(0.0, posinf=torch.inf).max())
        found.append(
            f"saturation: {int(beyond.sum())} of {x.numel()} elements of {name} are beyond {format.largest:g} times {name}_scale, "
            f"the largest number of {format}, by up to {factor:.3g} times, and are stored as that number"
        )
    stored, zero = format.quantise(x, divisor), format.parts_of(divisor)[1]
    numbers = format.unpack(stored).float() if format.group or zero is not None else stored.float()
    empty = (numbers == (0 if zero is None else zero)).all(-1) & (x != 0).any(-1)
    if bool(empty.any()):
        found.append(
            f"underflow: {int(empty.sum())} of {empty.numel()} vectors of {name} (one for each token and head) are stored as 0: "
            f"all their elements are too small for {format} with this {name}_scale"
        )
    return found
