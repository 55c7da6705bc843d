"""transformers with Quire: `generate` and continuous batching, compared with transformers' own attention.

python examples/integrations/transformers_generate.py                      a tiny model with generated weights
python examples/integrations/transformers_generate.py --model PATH         a model on disk
"""

import argparse
import logging
from importlib import metadata

import torch
import transformers

import quire.integrations.transformers  # noqa: F401  # makes both names below known to transformers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a model that transformers can load")
asked = parser.parse_args()
transformers.logging.set_verbosity_error()
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)


def load(attention: str) -> transformers.PreTrainedModel:
    """The model, with one of the attention implementations: the only argument that changes."""
    if asked.model:
        return transformers.AutoModelForCausalLM.from_pretrained(asked.model, attn_implementation=attention).eval()
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=1000, sliding_window=32,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def compare(what: str, tokens: list[list[int]]) -> None:
    if tokens != expected:
        raise SystemExit(f"{what}: tokens differ from those of eager attention")
    print(f"{what}: {sum(map(len, tokens))} tokens, those of eager attention")


prompts = [torch.randint(5, 900, (length,)).tolist() for length in (40, 11, 25)]
longest = max(map(len, prompts))
ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
how = transformers.GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)

expected = load("eager").generate(**inputs, generation_config=how)[:, longest:].tolist()
tokens = load("quire").generate(**inputs, generation_config=how)[:, longest:].tolist()
compare("generate, a batch with padding", tokens)

try:
    metadata.version("kernels")
except metadata.PackageNotFoundError:
    print("generate_batch needs the package kernels: pip install 'quire[transformers]'")
else:
    batching = transformers.ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64)
    model = load("quire/flash-attn2")
    out = model.generate_batch(prompts, generation_config=how, continuous_batching_config=batching, progress_bar=False)
    compare("generate_batch, prompts and decode steps together", [out[name].generated_tokens for name in sorted(out)])
