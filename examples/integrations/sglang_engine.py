"""SGLang with Quire: `python sglang_engine.py MODEL [cpu]`. The plugin is installed with Quire; the engine only gets the name."""

import sys


def main(model: str, device: str | None) -> None:
    import sglang

    here = {} if device is None else {"device": device, "dtype": "float32", "disable_cuda_graph": True, "max_total_tokens": 512}
    engine = sglang.Engine(
        model_path=model,
        attention_backend="quire",  # the line that changes
        skip_tokenizer_init=True,
        grammar_backend="none",
        log_level="error",
        **here,
    )
    try:
        prompts = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9]]
        for answer in engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 8, "temperature": 0}):
            print("tokens", answer["output_ids"])
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
