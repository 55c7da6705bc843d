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
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.checked import checked
from quire.errors import QuireError
from quire.integrations.engines import EngineError
from quire.integrations.vllm import context_parallel
from quire.integrations.vllm.cache_view import cache_view
from quire.integrations.vllm.metadata import QuireMetadata
from quire.integrations.vllm.settings import Settings
from quire.integrations.vllm.unsupported import refuse_layer
from quire.options import Options
from quire.write import write

ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class QuireImpl(AttentionImpl[QuireMetadata]):
    """One layer. Its cache view and its options are made once and reused in every step."""

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window, self.sinks = sliding_window, sinks
        # vLLM writes no cap as None or 0.
        self.logits_soft_cap = logits_soft_cap or None
        self.is_encoder = attn_type in ENCODERS
        self.settings = Settings.read()
        refuse_layer(self, extra, get_current_vllm_config_or_none())
        self._pages: torch.Tensor | None = None
        self._cache: KVCache | None = None
        self._options: dict[tuple[int, ...], tuple[tuple[Any, ...], Options]] = {}

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """Whether the output can be stored as fp8 by the attention itself."""
        return bool(quant_key == kFp8StaticTensorSym)

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
            raise EngineError("output_block_scale: got a tensor; Quire supports only None: a scale for the whole output")
        if attn_metadata is None:
            # vLLM measures memory without any sequence.
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        q, out = (query, output) if query.shape[0] == tokens else (query[:tokens], output[:tokens])
        batch = attn_metadata.batch
        options = self.options(layer, attn_metadata.causal, q, output_scale)
        try:
            with self.watch():
                if self.is_encoder:
                    attend(q, self.encoder_cache(key, value), batch, options, new=(key[:tokens], value[:tokens]), out=out)
                elif self.dcp_world_size > 1:
                    context_parallel.attend_sharded(self, q, self.cache_of(layer, kv_cache), batch, options, out)
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
        try:
            with self.watch():
                write(key, value, self.cache_of(layer, kv_cache), self.batch_of(layer), slots=slot_mapping)
        except QuireError as error:
            raise located(error, layer, "cache write") from error

    def watch(self) -> AbstractContextManager[None]:
        """The context of every operation: `quire.checked()` if the user asked for it."""
        return checked(results=self.settings.results) if self.settings.checked else nullcontext()

    def batch_of(self, layer: torch.nn.Module) -> Batch | None:
        """The batch of a write. Only a ledger needs it, for the positions of the tokens."""
        return None

    def cache_of(self, layer: Any, pages: torch.Tensor) -> KVCache:
        """The layer's cache. It is made again if vLLM replaces the tensor."""
        if pages is not self._pages:
            scales = (layer._k_scale, layer._v_scale)
            self._cache = cache_view(pages, self.kv_cache_dtype, self.head_size, scales, current_platform.fp8_dtype())
            self._pages = pages
        assert self._cache is not None
        return self._cache

    def encoder_cache(self, key: torch.Tensor, value: torch.Tensor) -> KVCache:
        """A cache without tokens: an encoder's keys and values come with the call."""
        if self._cache is None:
            shape = (1, 1, self.num_kv_heads)
            k, v = key.new_zeros((*shape, key.shape[-1])), value.new_zeros((*shape, value.shape[-1]))
            self._cache = KVCache.wrap(k, v, layout="nhd")
        return self._cache

    def options(
        self, layer: Any, causal: bool | torch.Tensor, q: torch.Tensor, output_scale: torch.Tensor | None
    ) -> Options:
        """The options of a call: those of the layer, and what depends on the step."""
        key = (id(causal), id(output_scale), q.dtype.itemsize == 1)
        known = self._options.get(key)
        if known is not None:
            return known[1]
        options = Options(
            window=self.sliding_window,
            softcap=self.logits_soft_cap,
            alibi=self.alibi_slopes,
            sinks=self.sinks,
            scale=self.scale,
            causal=causal,
            q_scale=layer._q_scale.view(()) if q.dtype.itemsize == 1 else None,
            out_scale=None if output_scale is None else output_scale.view(()),
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )
        if isinstance(causal, torch.Tensor):
            # It is another tensor in every step; nothing is gained by keeping it.
            return options
        self._options[key] = (causal, output_scale), options
        return options


def located(error: QuireError, layer: Any, operation: str) -> EngineError:
    """The error with the layer and the operation of vLLM in which it occurred."""
    return EngineError(f"{operation} of layer {getattr(layer, 'layer_name', '(without a name)')}: {error}")
