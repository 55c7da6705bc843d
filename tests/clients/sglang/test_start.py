"""How SGLang finds the backend, and what is refused when an engine starts."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

import pytest
import torch

from clients.sglang.scene import Scene
from quire.integrations.engines import EngineError
from quire.integrations.sglang import register


def test_the_entry_point_makes_the_name_known(runner: Any) -> None:
    """SGLang's own loader found it: the runner was started with attention_backend="quire"."""
    from sglang.srt import server_args

    assert type(runner.attn_backend).__module__ == "quire.integrations.sglang.backend"
    assert runner.attn_backend.prefill_attention_backend_str == runner.attn_backend.decode_attention_backend_str == "quire"
    register()  # again: no name twice
    for choices in (
        server_args.ATTENTION_BACKEND_CHOICES,
        server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        assert choices.count("quire") == 1


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.6.1"])
def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(EngineError, match=rf"sglang {re.escape(version)} is not supported"):
        register()


LAYERS: dict[str, tuple[str, Any, str]] = {
    "temperature": ("xai_temperature_len", 1024, "xai_temperature_len 1024"),
    "capping": ("logit_capping_method", "erf", "logit_capping_method 'erf'"),
    "positions": ("pos_encoding_mode", "ALIBI", "pos_encoding_mode 'ALIBI'"),
    "heads": ("qk_head_dim", 576, "heads of 576"),
}


@pytest.mark.parametrize("name, value, message", LAYERS.values(), ids=LAYERS)
def test_layers_are_refused_by_name(runner: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, message: str) -> None:
    layer = runner.model.model.layers[1].self_attn.attn
    monkeypatch.setattr(layer, "logit_cap", 30.0)
    monkeypatch.setattr(layer, name, value)
    with pytest.raises(EngineError, match=f"layer 1: {message}"):
        Scene(runner).backend()


def test_settings_are_refused_by_name(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(runner, page_size=16)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "use_mla_backend", True)
        with pytest.raises(EngineError, match="MLA"):
            scene.backend()
    with monkeypatch.context() as patch:
        patch.setattr(runner.model_config, "is_encoder_decoder", True)
        with pytest.raises(EngineError, match="page_size 16 for an encoder-decoder"):
            scene.backend()
    scene.backend()


def test_pools_are_refused_by_name(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    scene = Scene(runner)
    latent = MLATokenToKVPool(64, 1, torch.float32, 32, 16, 1, "cpu", False)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "token_to_kv_pool", latent)
        with pytest.raises(EngineError, match="the KV pool MLATokenToKVPool"):
            scene.backend()
    monkeypatch.setattr(scene.pool, "kv_cache_layout", "page_major")
    with pytest.raises(EngineError, match="the KV layout 'page_major'"):
        scene.backend()
