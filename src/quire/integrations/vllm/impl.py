"""One attention layer of vLLM: writes new keys and values with `quire.write` and attends with `quire.attend`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kFp8StaticTensorSym
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from quire.attend import attend
from quire.cache.kv_cache import KVCache
from quire.checked import checked
from quire.errors import QuireError
from quire.integrations.engines import EngineError
from quire.integrations.vllm import checking
from quire.integrations.vllm.cache_view import PER_TENSOR, cache_view, layer_scale
from quire.integrations.vllm.context_parallel import attend_sharded, sharded_options
from quire.integrations.vllm.metadata import QuireMetadata
from quire.integrations.vllm.settings import Settings
from quire.integrations.vllm.spans import LayerView
from quire.integrations.vllm.unsupported import refuse_layer
from quire.options import Options
from quire.write import write

ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
ARGUMENTS = (
    *("num_kv_heads", "alibi_slopes", "sliding_window"),
    *("kv_cache_dtype", "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"),
)
"""The arguments of a layer after its sizes, in vLLM's order."""
UNWATCHED: AbstractContextManager[None] = nullcontext()


class QuireImpl(AttentionImpl[QuireMetadata]):
    """One layer. Its cache view and its options are made once and reused in every step."""

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(self, num_heads: int, head_size: int, scale: float, *given: Any, **named: Any) -> None:
        """Called by vLLM with the arguments of `AttentionImpl.__init__`, in its order, and `sinks` where a model has them."""
        extra = dict(zip(ARGUMENTS, given, strict=False)) | named
        num_kv_heads, alibi_slopes, sliding_window = (extra.pop(name, None) for name in ARGUMENTS[:3])
        kv_cache_dtype, logits_soft_cap = extra.pop("kv_cache_dtype", "auto"), extra.pop("logits_soft_cap", None)
        attn_type = extra.pop("attn_type", AttentionType.DECODER)
        kv_sharing_target_layer_name, sinks = extra.pop("kv_sharing_target_layer_name", None), extra.pop("sinks", None)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        # vLLM makes its layers with the model's device as the default.
        device = torch.get_default_device()
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device=device)
        self.sliding_window, self.sinks = sliding_window, sinks
        self.chunk_lookback = extra.pop("chunk_lookback", -1)
        # vLLM writes no cap as None or 0.
        self.logits_soft_cap = logits_soft_cap or None
        self.is_encoder, self.is_cross = attn_type in ENCODERS, attn_type == AttentionType.ENCODER_DECODER
        self.has_layer_scales = kv_cache_dtype in PER_TENSOR
        self.settings = Settings.read()
        refuse_layer(self, extra, get_current_vllm_config_or_none())
        self._pages: torch.Tensor | None = None
        self._scales: tuple[torch.Tensor, ...] = ()
        self._cache: KVCache | None = None
        self._options: dict[tuple[Any, ...], tuple[Options, tuple[Any, ...]]] = {}

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """Whether the attention itself can store its output as fp8. Ranks combine outputs that are not quantised."""
        return bool(quant_key == kFp8StaticTensorSym) and self.dcp_world_size == 1

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: QuireMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the attention of the step's tokens to `output [tokens, heads, head_size]`."""
        if output_block_scale is not None:
            raise EngineError("output_block_scale: got a tensor; Quire supports only None: one scale for the whole output")
        if attn_metadata is None:
            # vLLM measures memory without any sequence.
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        q, out = (query, output) if query.shape[0] == tokens else (query[:tokens], output[:tokens])
        try:
            if self.settings.checked and not self.is_encoder and not self.is_cross and checking.is_dummy(attn_metadata):
                cache = checking.without_ledger(self.cache_of(layer, kv_cache))
                attend(q, cache, attn_metadata.batch, self.options_of(layer, attn_metadata, q, output_scale), out=out)
                return output
            with self.watch():
                batch = attn_metadata.batch if self.is_encoder or self.is_cross else attn_metadata.batch_for(self.view_of(layer))
                options = self.options_of(layer, attn_metadata, q, output_scale, batch.spans is not None)
                if self.is_encoder:
                    new = (key[:tokens], value[:tokens])
                    attend(q, self.encoder_cache(key, value), attn_metadata.batch, options, new=new, out=out)
                elif self.dcp_world_size > 1:
                    attend_sharded(q, self.cache_of(layer, kv_cache), batch, options, out)
                else:
                    attend(q, self.cache_of(layer, kv_cache), batch, options, out=out)
        except QuireError as error:
            raise located(error, layer, "attention") from error
        return output

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Writes new keys and values `[tokens, kv_heads, head_size]` to their slots; -1 skips a token."""
        if self.is_encoder:
            return
        tokens = slot_mapping.shape[0]
        if key.shape[0] != tokens:
            key, value = key[:tokens], value[:tokens]
        batch = None
        if self.settings.checked and not self.is_cross:
            batch = checking.batch_of_write(layer)
        try:
            with self.watch():
                write(key, value, self.cache_of(layer, kv_cache), batch, slots=slot_mapping)
        except QuireError as error:
            raise located(error, layer, "cache write") from error

    def watch(self) -> AbstractContextManager[None]:
        """The context of every operation: `quire.checked()` if the user asked for it."""
        return checked(results=self.settings.results) if self.settings.checked else UNWATCHED

    def cache_of(self, layer: Any, pages: torch.Tensor) -> KVCache:
        """The layer's cache. It is made again if vLLM replaces the tensor, and gets other scales if vLLM replaces them."""
        cache = self._cache
        if pages is not self._pages or cache is None:
            scales = (layer._k_scale, layer._v_scale)
            fp8, ledger = current_platform.fp8_dtype(), self.settings.checked
            cache = self._cache = cache_view(pages, self.kv_cache_dtype, self.head_size, scales, fp8, ledger)
            checking.share_ledger(cache, pages)
            self._pages, self._scales = pages, scales
        elif self.has_layer_scales and not (layer._k_scale is self._scales[0] and layer._v_scale is self._scales[1]):
            self._scales = (layer._k_scale, layer._v_scale)
            cache.k_scale = layer_scale("k_scale", layer._k_scale, cache.kv_heads)
            cache.v_scale = layer_scale("v_scale", layer._v_scale, cache.kv_heads)
        return cache

    def encoder_cache(self, key: torch.Tensor, value: torch.Tensor) -> KVCache:
        """A cache without tokens: an encoder's keys and values come with the call."""
        if self._cache is None:
            shape = (1, 1, self.num_kv_heads)
            k, v = key.new_zeros((*shape, key.shape[-1])), value.new_zeros((*shape, value.shape[-1]))
            self._cache = KVCache.wrap(k, v, layout="nhd")
        return self._cache

    def view_of(self, layer: Any) -> LayerView:
        """What the layer's queries see. As in vLLM, chunks without a window are none."""
        lookback = -1 if self.sliding_window is None else self.chunk_lookback
        return LayerView(self.sliding_window, lookback, getattr(layer, "mm_prefix_clamp_sliding_window", False))

    def options_of(
        self, layer: Any, metadata: QuireMetadata, q: torch.Tensor, output_scale: torch.Tensor | None, spans: bool = False
    ) -> Options:
        """The options of a call: those of the layer, and what depends on the step. Made once for each combination. Spans
        replace the window."""
        causal, quantised = metadata.causal, q.dtype.itemsize == 1
        key = (id(causal), id(output_scale), quantised, spans)
        known = self._options.get(key)
        if known is not None:
            return known[0]
        options = Options(
            window=None if spans else self.sliding_window,
            softcap=self.logits_soft_cap,
            alibi=self.alibi_slopes,
            sinks=self.sinks,
            scale=self.scale,
            causal=causal,
            q_scale=layer._q_scale.view(()) if quantised else None,
            out_scale=None if output_scale is None else output_scale.view(()),
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )
        if self.dcp_world_size > 1:
            options = sharded_options(options)
        if not isinstance(causal, torch.Tensor):
            # The tensors are kept with the options: another tensor could get the same id. A tensor for `causal` is another one in
            # every step, so that nothing would be gained.
            self._options[key] = options, (causal, output_scale)
        return options


def located(error: QuireError, layer: Any, operation: str) -> EngineError:
    """The error with the layer and the operation of vLLM in which it occurred."""
    return EngineError(f"{operation} of layer {getattr(layer, 'layer_name', '(without a name)')}: {error}")
