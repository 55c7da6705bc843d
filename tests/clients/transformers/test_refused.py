"""What Quire does not compute is refused with the name of the argument, never computed as something else."""

from __future__ import annotations

import copy
import os
import re
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from quire.errors import ArgumentError
from quire.integrations.engines import ENGINES, EngineError
from quire.integrations.transformers import FLASH, NAME, register, use_quire, visible_keys
from support.transformers_models import CONFIGS, SIZES, batched, generated, model, padded, prompts

IDS = padded(12, 12)["input_ids"]


@torch.no_grad()
def test_a_mask_of_queries_and_keys() -> None:
    with pytest.raises(ArgumentError, match=r"attention_mask.*no mask of queries and keys"):
        model("llama", "quire")(input_ids=IDS, attention_mask=torch.ones(2, 1, 12, 12, dtype=torch.bool))


@pytest.mark.parametrize("row", [[1] * 9 + [0] * 3, [1] * 4 + [0] * 2 + [1] * 6], ids=["right", "inside"])
@torch.no_grad()
def test_padding_that_is_not_at_the_left(row: list[int]) -> None:
    mask = torch.tensor([[1] * 12, row])
    with pytest.raises(ArgumentError, match=r"attention_mask.*sequence 1.*left"):
        model("llama", "quire")(input_ids=IDS, attention_mask=mask)


def test_padding_on_a_device_is_not_read() -> None:
    """There, a sequence whose padding is not at the left gets pages that do not exist, for which kernels give NaN."""
    mask = torch.tensor([[0, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0]])
    starts = visible_keys._starts(mask, 4, read_values=False)
    assert starts.tolist() == [1, visible_keys.NOWHERE, 4]
    for queries in (1, 4):
        batch = visible_keys.DenseVisibility((3, queries, 4), 4, starts, True, None, torch.device("cpu")).token_batch(8)
        table, lens = batch.page_table.view(3, -1, 4)[1], batch.kv_lens.view(3, -1)[1]
        assert int(table[-1].max()) < 0 and int(lens[-1]) > 4


@torch.no_grad()
def test_packed_sequences() -> None:
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    with pytest.raises(ArgumentError, match=r"mask_function.*packed"):
        model("llama", "quire")(input_ids=IDS[:1], position_ids=positions, use_cache=False)


@torch.no_grad()
def test_chunked_attention() -> None:
    config = transformers.Llama4TextConfig(
        **SIZES, intermediate_size_mlp=96, attention_chunk_size=8, num_local_experts=2, head_dim=8
    )
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="quire").eval()
    with pytest.raises(ArgumentError, match=r"mask_function.*chunks"):
        made(input_ids=IDS)


@torch.no_grad()
def test_dropout() -> None:
    config = CONFIGS["llama"]()
    config.attention_dropout = 0.1
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="quire").train()
    with pytest.raises(ArgumentError, match=r"dropout.*0\.1"):
        made(input_ids=IDS)


def test_gradients() -> None:
    with pytest.raises(ArgumentError, match=r"query.*no_grad"):
        model("llama", "quire")(input_ids=IDS)


@torch.no_grad()
def test_attention_weights() -> None:
    with pytest.raises((ArgumentError, ValueError), match="output_attentions"):
        model("llama", "quire").generate(IDS, output_attentions=True, return_dict_in_generate=True, max_new_tokens=2)
    with pytest.raises(ArgumentError, match="output_attentions"):
        model("bloom", "quire")(input_ids=IDS, output_attentions=True)


OWN_CODE = {
    "bloom": CONFIGS["bloom"],
    "mpt": CONFIGS["mpt"],
    "codegen": lambda: transformers.CodeGenConfig(n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=512, vocab_size=300),
}
"""Models that call no function of `AttentionInterface`."""


NOT_IN_BATCHES: dict[str, tuple[Any, str]] = {
    "stablelm": (lambda: transformers.StableLmConfig(**SIZES), "layers do not pass their keyword arguments on"),
    "nemotron": (lambda: transformers.NemotronConfig(**SIZES), "layers do not pass their keyword arguments on"),
    "deepseek_v3": (
        lambda: transformers.DeepseekV3Config(
            **{**SIZES, "num_key_value_heads": 8},
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
        ),
        "keys have 8 heads of 24, .*made for 8 of 8",
    ),
    "jetmoe": (
        lambda: transformers.JetMoeConfig(**SIZES, kv_channels=16, num_local_experts=4),
        "keys have 4 heads of 16, .*made for 2 of 16",
    ),
}
"""Models whose cache in `generate_batch` does not arrive at attention, or is made for keys of other sizes."""


def errors_of_batch(made: Any) -> list[str]:
    """The errors of two requests: transformers reports what a forward pass raises as the error of each request."""
    how = transformers.GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = transformers.ContinuousBatchingConfig(page_size=16, num_blocks=16, max_batch_tokens=64)
    out = made.generate_batch(prompts(5, 3), generation_config=how, continuous_batching_config=sizes, progress_bar=False)
    assert len(out) == 2
    return [str(request.error) for request in out.values()]


@pytest.mark.parametrize("implementation", [NAME, FLASH])
@pytest.mark.parametrize("name", OWN_CODE)
@torch.no_grad()
def test_models_with_attention_code_of_their_own(name: str, implementation: str) -> None:
    made = transformers.AutoModelForCausalLM.from_config(OWN_CODE[name](), attn_implementation=implementation).eval()
    message = rf"{name} computes attention in its own code.*'quire'.*use_quire\(model\)"
    for inputs in (padded(12), padded(5, 12)):
        with pytest.raises(EngineError, match=message):
            generated(made, inputs, 2)
    if implementation == FLASH:
        assert all(re.match(message, error) for error in errors_of_batch(made))


@pytest.mark.parametrize("name", NOT_IN_BATCHES)
@torch.no_grad()
def test_models_that_generate_batch_cannot_serve(name: str) -> None:
    """Each request gets an error that names the layer and the model, none gets tokens; `generate` works under both names."""
    config, reason = NOT_IN_BATCHES[name]
    made = {how: from_config(config(), how) for how in ("eager", NAME, FLASH)}
    message = rf"layer 0 of {name} \(\w+Attention\).*{reason}.*use generate"
    assert all(re.match(message, error) for error in errors_of_batch(made[FLASH]))
    expected = generated(made["eager"], padded(9), 8)
    assert generated(made[NAME], padded(9), 8) == expected and generated(made[FLASH], padded(9), 8) == expected


def from_config(config: Any, implementation: str) -> Any:
    """A model with the same weights for every implementation."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize("name", ["bloom", "mpt"])
@torch.no_grad()
def test_use_quire_with_the_name_for_continuous_batching(name: str) -> None:
    """Its layers need the mask of "quire": without one, they would see the tokens of other requests."""
    made = use_quire(transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=FLASH).eval())
    message = f"{name} computes attention in its own code"
    with pytest.raises(EngineError, match=message):
        generated(made, padded(12), 2)
    assert all(re.match(message, error) for error in errors_of_batch(made))


BY_NAME: dict[str, Any] = {
    "gptj": lambda: transformers.GPTJConfig(n_embd=64, n_layer=2, n_head=4, rotary_dim=8, vocab_size=300),
    "falcon": lambda: transformers.FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=300),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], vocab_size=300
    ),
}
"""Models that have a dictionary of attention classes."""


@pytest.mark.parametrize("implementation", [NAME, FLASH])
@pytest.mark.parametrize("name", BY_NAME)
def test_models_that_choose_a_class_by_name(name: str, implementation: str) -> None:
    """They are refused by name when they are made; other implementations are not."""
    with pytest.raises(EngineError, match=f"{name} computes attention in its own code.*choose another attn_implementation"):
        transformers.AutoModelForCausalLM.from_config(BY_NAME[name](), attn_implementation=implementation)
    transformers.AutoModelForCausalLM.from_config(BY_NAME[name](), attn_implementation="eager")


@torch.no_grad()
def test_a_window_of_one() -> None:
    """transformers' dynamic cache keeps all keys for it, its static cache one."""
    config = transformers.MistralConfig(**SIZES, sliding_window=1, head_dim=8)
    with pytest.raises(ArgumentError, match=r"sliding_window.*dynamic cache of transformers keeps all keys"):
        generated(from_config(config, NAME), padded(9), 4)
    got, expected = (generated(from_config(config, how), padded(9), 4, cache_implementation="static") for how in (NAME, "eager"))
    assert got == expected


def test_use_quire_of_another_model() -> None:
    with pytest.raises(EngineError, match="attn_implementation='quire' is enough"):
        use_quire(model("llama", "quire"))


@pytest.mark.parametrize("name", ["bloom", "mpt"])
@torch.no_grad()
def test_nothing_can_be_computed_with_the_mask(name: str) -> None:
    """A model that is not recognised, and adds the mask to its logits or fills logits by it, is refused: torch computes
    nothing with this type, and the mask converts to no other."""
    made = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="quire").eval()
    with mock.patch.object(visible_keys, "require_interface"):
        for length in (1, 2, 3, 12):
            with pytest.raises(EngineError, match=r"computes with its attention mask.*torch's \w+.*choose another"):
                made(input_ids=IDS[:, :length])


@pytest.mark.parametrize("name", ["bloom", "mpt"])
@torch.no_grad()
def test_use_quire_needs_the_implementation(name: str) -> None:
    made = use_quire(transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval())
    with pytest.raises(ArgumentError, match="attention_mask"):
        made(input_ids=IDS)


def test_continuous_batching_refuses_the_name_for_generate() -> None:
    with pytest.raises(ValueError, match="quire is not supported for continuous batching"):
        batched(model("llama", "quire"), prompts(5))


def test_another_version_of_transformers() -> None:
    with mock.patch.object(type(ENGINES["transformers"]), "installed", lambda engine: "5.23.0"):
        with pytest.raises(EngineError, match=r"transformers 5\.23\.0 is not supported.*5\.22 or newer, before 5\.23"):
            register()
    with mock.patch.object(type(ENGINES["transformers"]), "installed", lambda engine: None):
        with pytest.raises(EngineError, match=r"pip install 'quire\[transformers\]'"):
            register()


def test_registration_keeps_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", "some/kernel=/some/path")
    register()
    entries = dict(entry.split("=") for entry in os.environ["LOCAL_KERNELS"].split(":"))
    assert entries["some/kernel"] == "/some/path" and "quire/flash-attn2" in entries


def test_the_checks_let_plain_calls_pass() -> None:
    """The control: none of these refusals is raised by a plain call."""
    assert generated(model("llama", "quire"), padded(5), 3) == generated(model("llama", "eager"), copy.deepcopy(padded(5)), 3)
