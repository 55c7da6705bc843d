"""Tokens per second of vLLM on the CPU, with its own attention and with Quire's, on a model in which attention dominates: few
layers, small matrices, long contexts. "Attention alone" counts only the seconds in the layers' attention, without cache writes, the
rest of the model and the scheduler. The two are measured in turn, each in a process of its own; the best of several rounds counts,
because other programs on the machine only make a round slower:

    python tests/clients/vllm/throughput.py [--context 8192] [--sequences 4] [--dtype float32] [--kv-cache-dtype auto] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PREFILL, DECODE = "prefill", "decode"
ALONE = ", attention alone"
FIGURES = (PREFILL, PREFILL + ALONE, DECODE, DECODE + ALONE)


def time_attention() -> list[float]:
    """Makes the layers append the seconds of each attention to the returned list."""
    if "QUIRE_VLLM_OVERRIDE" in os.environ:
        from quire.integrations.vllm.impl import QuireImpl as Impl
    else:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Impl
    forward, seconds = Impl.forward, []

    def timed(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = forward(*given, **named)
        seconds.append(time.perf_counter() - began)
        return result

    Impl.forward = timed
    return seconds


def measure(asked: dict[str, Any]) -> dict[str, float]:
    """Tokens per second of prefill and of decode, the best of several repetitions in this process."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    from vllm import LLM, SamplingParams

    context, sequences, new = asked["context"], asked["sequences"], asked["new"]
    llm = LLM(
        asked["model"],
        skip_tokenizer_init=True,
        dtype=asked["dtype"],
        kv_cache_dtype=asked["kv_cache_dtype"],
        enforce_eager=True,
        max_model_len=context + 2 * new,
        max_num_seqs=sequences,
        max_num_batched_tokens=2048,
    )
    attention = time_attention()
    torch.manual_seed(1)
    prompts = [{"prompt_token_ids": row} for row in torch.randint(3, 256, (sequences, context)).tolist()]

    def seconds(tokens: int) -> tuple[float, float]:
        """Seconds to generate some tokens for each prompt: of the engine, and of attention."""
        attention.clear()
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        whole = time.perf_counter() - began
        return whole, sum(attention)

    best = dict.fromkeys(FIGURES, 0.0)
    for _ in range(asked["repetitions"]):
        llm.reset_prefix_cache()
        prefill = seconds(1)
        # Prompts are in the prefix cache now, except for their last page. The first step computes it again and is subtracted.
        first, whole = seconds(1), seconds(new)
        found = [sequences * context / part for part in prefill]
        found += [sequences * (new - 1) / (part - start) for part, start in zip(whole, first)]
        best = {name: max(best[name], value) for name, value in zip(FIGURES, found)}
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--new", type=int, default=64, help="tokens generated for each sequence")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=2, help="in each round")
    asked = vars(parser.parse_args())
    best = {name: dict.fromkeys(FIGURES, 0.0) for name in ("stock", "quire")}
    with tempfile.TemporaryDirectory() as folder:
        from models import write_model

        sizes = {"num_attention_heads": asked["heads"], "num_key_value_heads": asked["kv_heads"]}
        sizes["head_dim"] = asked["head_size"]
        asked["model"] = str(
            write_model("llama", Path(folder), num_hidden_layers=2, max_position_embeddings=2 * asked["context"], **sizes)
        )
        for _ in range(asked["rounds"]):
            for name, figures in best.items():
                environment = {key: value for key, value in os.environ.items() if key != "QUIRE_VLLM_OVERRIDE"}
                if name == "quire":
                    environment["QUIRE_VLLM_OVERRIDE"] = "CPU_ATTN"
                command = (sys.executable, __file__, "--measure", json.dumps(asked))
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stderr[-4000:])
                for phase, value in json.loads(done.stdout.splitlines()[-1]).items():
                    figures[phase] = max(figures[phase], value)
    for phase in FIGURES:
        stock, quire = best["stock"][phase], best["quire"][phase]
        print(f"{phase}: stock {stock:.0f} tokens/s, quire {quire:.0f} tokens/s, {quire / stock:.2f} times")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(json.loads(sys.argv[2]))))
    else:
        main()
