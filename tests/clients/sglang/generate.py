"""Starts a real SGLang engine and generates greedily: `python generate.py SETTINGS.json RESULT.json`. In a process of its own: an
engine starts processes of its own and ends them."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    import sglang

    asked = json.loads(Path(sys.argv[1]).read_text())
    engine = sglang.Engine(
        device="cpu", dtype="float32", skip_tokenizer_init=True, mem_fraction_static=0.1, sampling_backend="pytorch",
        grammar_backend="none", disable_cuda_graph=True, log_level="error", **asked["settings"],
    )  # fmt: skip
    try:
        sampling = {"max_new_tokens": asked["tokens"], "temperature": 0, "ignore_eos": True}
        rounds = []
        for prompts in asked["rounds"]:
            made = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
            chosen = [[value for value, _, _ in one["meta_info"]["output_token_logprobs"]] for one in made]
            cached = [one["meta_info"]["cached_tokens"] for one in made]
            tokens = [[token for _, token, _ in one["meta_info"]["output_token_logprobs"]] for one in made]
            rounds.append({"tokens": tokens, "logprobs": chosen, "cached": cached})
        Path(sys.argv[2]).write_text(json.dumps(rounds))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
