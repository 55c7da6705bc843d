"""Runs requests through a vLLM engine and writes what came out. Started as a process of its own, so that the stock backend and
Quire never share a process:

    python engine_run.py REQUEST.json RESULT.pt
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

# One thread: these models are small, and threads that wait for each other would make a busy machine much slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from faults import FAULTS, layers_of
from vllm import LLM, SamplingParams

SHARED_PREFIX = 96
"""Tokens that every third prompt starts with: pages that later requests find in the prefix cache."""


def prompts_of(count: int, longest: int, seed: int) -> list[list[int]]:
    """Prompts of many lengths. Some share a prefix, and all repeat parts of themselves, so that n-gram speculation finds drafts."""
    rng = random.Random(seed)
    prefix = [rng.randrange(3, 256) for _ in range(SHARED_PREFIX)]
    prompts = []
    for i in range(count):
        phrase = [rng.randrange(3, 256) for _ in range(rng.randint(2, 12))]
        body = phrase * rng.randint(1, max(1, (longest - SHARED_PREFIX) // len(phrase)))
        prompts.append((prefix if i % 3 == 0 else []) + body[: longest - SHARED_PREFIX])
    return prompts


class Trace:
    """Counts what the scheduler did, from its own output."""

    def __init__(self, scheduler: Any):
        self.counts: Counter[str] = Counter()
        self.schedule = scheduler.schedule
        scheduler.schedule = self.traced
        self.scheduler = scheduler

    def traced(self, *args: Any, **kwargs: Any) -> Any:
        waiting = {r.request_id: r.num_preemptions for r in self.scheduler.requests.values()}
        output = self.schedule(*args, **kwargs)
        prefills = decodes = 0
        for id, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[id]
            # The scheduler has advanced num_computed_tokens by what it scheduled.
            before = request.num_computed_tokens - tokens
            if before < request.num_prompt_tokens:
                prefills += 1
                self.counts["chunks"] += request.num_computed_tokens < request.num_prompt_tokens
            else:
                decodes += 1
        self.counts["steps"] += bool(output.num_scheduled_tokens)
        self.counts["mixed"] += bool(prefills and decodes)
        self.counts["drafts"] += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        self.counts["preemptions"] += sum(
            r.num_preemptions - waiting.get(r.request_id, 0) for r in self.scheduler.requests.values()
        )
        return output


def count_calls(counts: Counter[str]) -> None:
    """Counts the calls of Quire's operators by the plugin."""
    from quire.integrations.vllm import impl

    def counting(name: str, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        return counted

    for name in ("attend", "write"):
        setattr(impl, name, counting(name, getattr(impl, name)))


def logits_of(output: Any, vocabulary: int) -> torch.Tensor:
    """The logits from which each token was taken, `[tokens, vocabulary]`."""
    logits = torch.full((len(output.token_ids), vocabulary), float("nan"), dtype=torch.float64)
    for row, by_token in zip(logits, output.logprobs):
        for token, value in by_token.items():
            row[token] = value.logprob
    return logits


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Runs the requests, each added at its step, until all are finished."""
    counts: Counter[str] = Counter()
    if "QUIRE_VLLM_OVERRIDE" in os.environ:
        count_calls(counts)
    llm = LLM(**request["engine"], skip_tokenizer_init=True, logprobs_mode="raw_logits", max_logprobs=-1)
    engine = llm.llm_engine
    for layer in layers_of(engine):
        backend = layer.get_attn_backend()
        counts[f"backend {backend.__module__}.{backend.__name__}"] += 1
    fault = request.get("fault")
    if fault is not None:
        FAULTS[fault](engine)
    trace = Trace(engine.engine_core.engine_core.scheduler)
    sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, logprobs=-1, max_tokens=request["max_tokens"])
    prompts = prompts_of(request["requests"], request["longest"], request["seed"])
    arrivals = {i: i * request["every"] for i in range(len(prompts))}
    finished: dict[int, Any] = {}
    lengths: dict[str, int] = {}
    step = 0
    while len(finished) < len(prompts):
        for i in [i for i, at in arrivals.items() if at <= step]:
            engine.add_request(str(i), {"prompt_token_ids": prompts[i]}, sampling)
            del arrivals[i]
        for output in engine.step():
            have = len(output.outputs[0].token_ids)
            # A step gives a sequence one token, and more only if drafts were accepted.
            counts["accepted"] += max(0, have - lengths.get(output.request_id, 0) - 1)
            lengths[output.request_id] = have
            if output.finished:
                finished[int(output.request_id)] = output
        step += 1
    counts.update(trace.counts)
    results = []
    for i, prompt in enumerate(prompts):
        output = finished[i]
        chosen = output.outputs[0]
        results.append({"prompt": prompt, "tokens": list(chosen.token_ids), "logits": logits_of(chosen, request["vocabulary"])})
        counts["cached"] += output.num_cached_tokens or 0
        counts["generated"] += len(chosen.token_ids)
    return {"results": results, "counts": dict(counts)}


if __name__ == "__main__":
    torch.save(run(json.loads(Path(sys.argv[1]).read_text())), sys.argv[2])
