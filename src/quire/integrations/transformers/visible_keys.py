"""Which keys each sequence of a forward pass sees: what a mask becomes for Quire, computed once for all layers.

transformers asks the mask function of an attention implementation for a mask and passes it, unchanged, to every layer. Quire needs
no matrix: the first visible key of each sequence, the position of the last query, causality and a window say the same.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils

from quire.batch import Batch
from quire.errors import ArgumentError, describe
from quire.integrations.engines import EngineError

OPAQUE = torch.float8_e5m2
"""The type of the tensor that a mask becomes. torch refuses arithmetic with it, so a model that computes attention by itself, and
would add the mask to its logits, is refused instead of computing something else."""

NOWHERE = -(2**40)
"""The start of a sequence whose padding is not supported, where that is found out on a device: no page is there."""


class VisibleKeysMask(torch.Tensor):
    """The tensor that carries a `DenseVisibility` through a model. A copy in another type would say nothing, and MPT converts
    its mask to bool: `to` returns the mask itself."""

    visible_keys: DenseVisibility | None = None
    """None in what torch makes of the mask, such as a part of it."""

    def to(self, *args: Any, **named: Any) -> VisibleKeysMask:
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_function__(function, types, args, kwargs)
        except RuntimeError as error:
            what = f"the model computes with its attention mask in its own code (torch's {function.__name__})"
            raise EngineError(f"{what}: Quire's mask has no values; choose another attn_implementation") from error


changed_configs: dict[int, weakref.ref[Any]] = {}
"""By identity: the configs of models that `use_quire` has changed."""


class DenseVisibility:
    """The visible keys of a batch `[seqs]`, as indices into the keys that a layer's cache returns."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        end: int | torch.Tensor,
        starts: torch.Tensor | None,
        causal: bool,
        window: int | tuple[int, int] | None,
        device: torch.device,
    ):
        self.seqs, self.q_len, self.keys = sizes
        self.end = end
        """One past the key of the last query: an int, or a tensor [] of a static cache."""
        self.starts = starts
        """The first visible key of each sequence, [seqs]; None if nothing is padded."""
        self.causal, self.window, self.device = causal, window, device
        self._batches: dict[tuple[int, ...], Batch] = {}

    @property
    def is_static(self) -> bool:
        """Whether the keys are a buffer of a fixed size."""
        return isinstance(self.end, torch.Tensor)

    def batch(self) -> Batch:
        """The batch for keys in which a sequence is one page; only without padding."""
        if () not in self._batches:
            counted = torch.arange(self.seqs + 1, dtype=torch.int32, device=self.device)
            kv_lens, q_starts, pages = torch.zeros_like(counted[1:]) + self.end, counted * self.q_len, counted[:-1, None]
            hint = None if isinstance(self.end, torch.Tensor) else self.end
            self._batches[()] = Batch(pages, kv_lens.to(torch.int32), q_starts, max_q_len=self.q_len, max_kv_len=hint)
        return self._batches[()]

    def token_batch(self, token_distance: int) -> Batch:
        """The batch for keys in which a page is one token, and a sequence begins `token_distance` pages after the one before it.

        Every row of q belongs to a sequence. A row of padding therefore attends to the padding before it: its result is finite, and
        no row that is not padding depends on it."""
        if (token_distance,) not in self._batches:
            assert self.starts is not None
            first_query = self.end - self.q_len
            starts = self.starts.long()
            padded = (starts - first_query).clamp(0, self.q_len)
            q_lens = [padded, self.q_len - padded]
            kv_lens = [(padded > 0) * starts, (padded < self.q_len) * (self.end - starts)]
            first = torch.arange(self.seqs, device=self.device) * token_distance
            firsts = [first, first + starts]
            if self.q_len == 1:
                # No sequence is empty: a query of padding sees itself.
                starts = starts.clamp(max=self.end - 1)
                q_lens, kv_lens, firsts = [torch.ones_like(padded)], [self.end - starts], [first + starts]
            lens = torch.stack(q_lens, 1).flatten()
            q_starts = torch.zeros(lens.shape[0] + 1, dtype=torch.long, device=self.device)
            torch.cumsum(lens, 0, out=q_starts[1:])
            table = torch.stack(firsts, 1).flatten()[:, None] + torch.arange(self.keys, device=self.device)
            kv = torch.stack(kv_lens, 1).flatten()
            self._batches[token_distance,] = Batch(table, kv, q_starts, max_q_len=self.q_len, max_kv_len=self.keys)
        return self._batches[token_distance,]

    def as_mask(self) -> VisibleKeysMask:
        """A tensor of four axes that carries this object through a model: transformers passes such a mask on as it is."""
        mask = torch.empty((self.seqs, 1, 1, 3), dtype=OPAQUE, device=self.device).as_subclass(VisibleKeysMask)
        mask.visible_keys = self
        return mask


def visible_keys_of(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, causal: bool) -> DenseVisibility:
    """What `visible_keys_mask` made; without a mask all keys are visible.

    Raises:
        ArgumentError: The mask was made by something else, or for other sizes.
    """
    sizes = q.shape[0], q.shape[2], k.shape[2]
    if mask is None:
        if causal and sizes[1] not in (1, sizes[2]):
            allowed = "a mask: without one, causal queries must be one, or as many as keys"
            raise ArgumentError("attention_mask", f"None for {sizes[1]} queries and {sizes[2]} keys", allowed)
        return DenseVisibility(sizes, sizes[2], None, causal, None, q.device)
    found = mask.visible_keys if isinstance(mask, VisibleKeysMask) else None
    if found is None:
        allowed = "None, or the padding of each sequence as [batch, keys]: Quire takes no mask of queries and keys"
        raise ArgumentError("attention_mask", describe(mask), allowed)
    if found.window == 1 and found.keys < sizes[2]:
        allowed = "2 or more, or a static cache: the dynamic cache of transformers keeps all keys for a window of 1"
        raise ArgumentError("sliding_window", 1, allowed)
    if (found.seqs, found.q_len, found.keys) != sizes:
        text = "{} sequences, {} queries and {} keys"
        given = f"a mask of {text.format(found.seqs, found.q_len, found.keys)}"
        raise ArgumentError("attention_mask", given, f"one of {text.format(*sizes)}, those of the layer")
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def visible_keys_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **given: Any,
) -> torch.Tensor:
    """The mask function of "quire", called by transformers once for each kind of layer in a forward pass.

    Raises:
        ArgumentError: The mask is not causal, a causal window or without causality; or the padding is not at the left.
        EngineError: The model computes attention in its own code.
    """
    require_interface(given.get("config"))
    causal, window = _meaning(mask_function, local_size)
    end = q_offset + q_length - kv_offset if causal else kv_length
    if isinstance(end, torch.Tensor) and end.device.type == "cpu":
        # Nothing waits for a read in host memory, and kernels are chosen better by known lengths.
        end = int(end)
    starts = None
    if attention_mask is not None:
        starts = _starts(attention_mask, end + kv_offset, attention_mask.device.type == "cpu")
        if starts is not None:
            starts = torch.where(starts == NOWHERE, starts, (starts - kv_offset).clamp(min=0))
    return DenseVisibility((batch_size, q_length, kv_length), end, starts, causal, window, torch.device(device)).as_mask()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def flash_mask(*args: Any, **given: Any) -> torch.Tensor | None:
    """The mask function of "quire/flash-attn2": transformers' own for FlashAttention, for models that ask `AttentionInterface` for
    their attention. It makes no causal mask, without which a model that computes attention by itself sees later tokens.

    Raises:
        EngineError: The model computes attention in its own code, also after `use_quire`, whose layers need the mask of "quire".
    """
    require_interface(given.get("config"), accept_changed=False)
    return masking_utils.flash_attention_mask(*args, **given)


def require_interface(config: Any, *, accept_changed: bool = True) -> None:
    """Raises unless the model of a config asks `AttentionInterface` for its attention, or `use_quire` has changed it."""
    modeling = sys.modules.get(type(config).__module__.replace(".configuration_", ".modeling_"))
    changed = accept_changed and changed_configs.get(id(config), lambda: None)() is config
    if modeling is None or hasattr(modeling, "ALL_ATTENTION_FUNCTIONS") or changed or config is None:
        return
    what = f"{config.model_type} computes attention in its own code, not through transformers' AttentionInterface"
    own = "for Bloom or MPT and generate, use attn_implementation='quire' and call quire.integrations.transformers.use_quire(model)"
    raise EngineError(f"{what}: {own}; for other models choose another attn_implementation")


def _meaning(mask_function: Callable[..., Any], size: int | None) -> tuple[bool, int | tuple[int, int] | None]:
    """Causality and window of a mask, by comparison with the functions that transformers makes for them."""
    if mask_function is masking_utils.causal_mask_function:
        return True, None
    if mask_function is masking_utils.bidirectional_mask_function:
        return False, None
    if size is not None:
        if _is_same(mask_function, masking_utils.sliding_window_causal_mask_function(size)):
            return True, size
        if _is_same(mask_function, masking_utils.sliding_window_bidirectional_mask_function(size)):
            return False, (size, size)
    allowed = "causal, a causal window, or all keys; not chunks, packed sequences, images or functions of a model's own"
    raise ArgumentError("mask_function", getattr(mask_function, "__qualname__", describe(mask_function)), allowed)


def _is_same(a: object, b: object) -> bool:
    """Whether two functions have the same code over the same values."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if not (callable(a) and callable(b)):
        return type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b
    if getattr(a, "__code__", a) is not getattr(b, "__code__", b):
        return False
    cells = [tuple(cell.cell_contents for cell in getattr(f, "__closure__", None) or ()) for f in (a, b)]
    return _is_same(*cells)


def _starts(padding: torch.Tensor, end: int | torch.Tensor, read_values: bool) -> torch.Tensor | None:
    """The first token of each sequence [seqs], from a mask [seqs, tokens] that is False for padding; None if nothing is padded. A
    sequence of padding alone, as in the first chunk of a prompt, begins at `end`."""
    if padding.dim() != 2:
        raise ArgumentError("attention_mask", describe(padding), "a mask [batch, tokens] of padding, or None")
    padding = padding.bool()
    if isinstance(end, int):
        if padding.shape[1] < end:
            raise ArgumentError("attention_mask", describe(padding), f"{end} tokens, those of the cache and the new ones")
        padding = padding[:, :end]
    tokens = padding.shape[1]
    starts = torch.where(padding.any(1), padding.int().argmax(1), tokens)
    is_left = padding.sum(1) == tokens - starts
    if not read_values:
        # A read would wait for the device. A sequence with other padding gets a start that no page has: its result is NaN.
        return torch.where(is_left, starts, NOWHERE)
    if not bool(is_left.all()):
        given = f"padding inside or after sequence {int((~is_left).int().argmax())}"
        raise ArgumentError("attention_mask", given, "padding to the left of each sequence: padding_side='left'")
    return starts if bool(starts.any()) else None
