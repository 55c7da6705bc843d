"""Text generation with vLLM and Quire's attention:

    QUIRE_VLLM_OVERRIDE=CPU_ATTN python examples/integrations/vllm_generate.py [MODEL]        on a CPU
    python examples/integrations/vllm_generate.py --attention-backend QUIRE MODEL             on a GPU

Without MODEL a small one with random weights is made, which shows that everything runs and generates random tokens.
"""

import argparse
import os
import tempfile

# The engine runs in this process, so that the example can show which attention it uses.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams


def random_model(folder: str) -> str:
    """Writes a Llama of two layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="a folder, or a name on a model hub")
parser.add_argument("--attention-backend")
asked = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    arguments = {"attention_backend": asked.attention_backend} if asked.attention_backend else {}
    if asked.model is None:
        llm = LLM(
            random_model(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=512, **arguments
        )
        prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 70, 200)]
    else:
        llm = LLM(asked.model, **arguments)
        prompts = ["The pages of a book", "Attention is"]
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=16, detokenize=asked.model is not None), use_tqdm=False
    )

for output in outputs:
    print(output.outputs[0].text or list(output.outputs[0].token_ids))
layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
print("attention:", ", ".join(sorted({type(layer.impl).__qualname__ for layer in layers if hasattr(layer, "impl")})))
