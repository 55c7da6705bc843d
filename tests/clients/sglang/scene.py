"""Forward passes of SGLang's own classes: a real model runner, its pools, request table, layers and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SLOTS, REQUESTS, CONTEXT = 640, 8, 512


def start_runner(model: Path) -> Any:
    """Starts SGLang's model runner in this process, as its own benchmark of one batch does, with the backend "quire"."""
    from sglang.benchmark.one_batch import SpawnRanks, _init_process_global_configs, spawn_world_rank
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import get_device, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    args = ServerArgs(
        model_path=str(model), device="cpu", dtype="float32", attention_backend="quire", skip_tokenizer_init=True,
        disable_cuda_graph=True, mem_fraction_static=0.1, max_total_tokens=SLOTS, max_running_requests=REQUESTS,
        sampling_backend="pytorch", grammar_backend="none",
    )  # fmt: skip
    args.resolve_once()
    ports = PortArgs.init_new(args)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0))
    _init_process_global_configs()
    config = ModelConfig.from_server_args(args)
    bootstrap.init_parallel_runtime(server_args=args, device=get_device().device, dist_port=ports.nccl_port)
    bootstrap.init_layer_runtime(model_config=config)
    runner = ModelRunner(
        model_config=config, mem_fraction_static=0.1, gpu_id=0, nccl_port=ports.nccl_port, server_args=args
    )  # fmt: skip
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    return runner


class Scene:
    """Sequences in SGLang's pools, one layer, and the forward passes over them. Tokens are in scattered slots or pages."""

    def __init__(
        self,
        runner: Any,
        *,
        page_size: int = 1,
        dtype: torch.dtype = torch.float32,
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (32, 32),
        window_pool: bool = False,
        **layer: Any,
    ):
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

        torch.manual_seed(page_size + sum(heads) + sum(dims))
        self.runner, self.page_size, self.dims, self.heads = runner, page_size, dims, heads
        self.layer = RadixAttention(
            heads[0], dims[0], dims[0] ** -0.5, heads[1], layer_id=0, v_head_dim=dims[1], **layer
        )  # fmt: skip
        self.requests = ReqToTokenPool(REQUESTS, CONTEXT, "cpu", False)
        if window_pool:
            self.pool = self._window_pool(dtype)
        else:
            self.pool = MHATokenToKVPool(SLOTS, page_size, dtype, heads[1], dims[0], 1, "cpu", False, v_head_dim=dims[1])
        runner.req_to_token_pool, runner.token_to_kv_pool, runner.page_size = self.requests, self.pool, page_size
        runner.init_kv_index_translator()
        # Page 0 is SGLang's padding page. What no sequence holds is NaN.
        self.free = (torch.randperm(SLOTS // page_size - 1) + 1).tolist()
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        if dtype is torch.float32:
            for buffer in (*self.pool.get_kv_buffer(0),):
                buffer.fill_(torch.nan)

    def _window_pool(self, dtype: torch.dtype) -> Any:
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        pool = SWAKVPool(
            SLOTS, SLOTS, self.page_size, dtype, self.heads[1], self.dims[0], swa_attention_layer_ids=[0],
            full_attention_layer_ids=[1], device="cpu",
        )  # fmt: skip
        pages = torch.randperm(SLOTS // self.page_size - 1) + 1
        slots = (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
        mapping = torch.zeros(SLOTS + self.page_size + 1, dtype=torch.int64)
        mapping[self.page_size : SLOTS] = slots
        mapping[-1] = -1
        pool.register_mapping(mapping)
        return pool

    def backend(self, name: str = "quire") -> Any:
        """A backend over these pools, by its name in SGLang's registry."""
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

        return ATTENTION_BACKENDS[name](self.runner)

    def _slots(self, sequence: int, start: int, count: int) -> torch.Tensor:
        row = self.requests.req_to_token[sequence + 1]
        for position in range(start, start + count):
            if position % self.page_size == 0:
                page = self.free.pop()
                row[position : position + self.page_size] = torch.arange(self.page_size) + page * self.page_size
        return row[start : start + count].to(torch.int64)

    def extend(self, lens: list[int], mode: str = "EXTEND", **fields: Any) -> tuple[Any, ...]:
        """A batch in which the sequences get these many new tokens; returns it with its q, k and v. Sequences are made as they
        are needed; their tokens so far are the prefix."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        while len(self.keys) < len(lens):
            self.keys.append(torch.empty(0, self.heads[1], self.dims[0]))
            self.values.append(torch.empty(0, self.heads[1], self.dims[1]))
        tokens = sum(lens)
        q = torch.randn(tokens, self.heads[0], self.dims[0])
        k, v = (torch.randn(tokens, self.heads[1], dim) for dim in self.dims)
        prefix = [keys.shape[0] for keys in self.keys[: len(lens)]]
        slots = torch.cat([self._slots(i, before, new) for i, (before, new) in enumerate(zip(prefix, lens))])
        for i, (a, b) in enumerate(zip(k.split(lens), v.split(lens))):
            self.keys[i], self.values[i] = torch.cat((self.keys[i], a)), torch.cat((self.values[i], b))
        total = torch.tensor([a + b for a, b in zip(prefix, lens)])
        seq_lens = torch.tensor(prefix) if mode == "TARGET_VERIFY" else total
        positions = torch.cat([torch.arange(a, a + b) for a, b in zip(prefix, lens)])
        batch = ForwardBatch(
            forward_mode=ForwardMode[mode], batch_size=len(lens), input_ids=torch.zeros(tokens, dtype=torch.int64),
            req_pool_indices=torch.arange(len(lens)) + 1, seq_lens=seq_lens, out_cache_loc=slots,
            seq_lens_sum=int(seq_lens.sum()), seq_lens_cpu=seq_lens.clone(), positions=positions,
            **({} if mode in ("DECODE", "TARGET_VERIFY") else {
                "extend_num_tokens": tokens, "extend_seq_lens": torch.tensor(lens), "extend_prefix_lens": torch.tensor(prefix),
                "extend_seq_lens_cpu": lens, "extend_prefix_lens_cpu": prefix,
            }),
        )  # fmt: skip
        for name, value in fields.items():
            setattr(batch, name, value)
        self.runner.kv_index_translator.bind_own_plan(batch)
        return batch, q, k, v

    def run(self, backend: Any, batch: Any, q: torch.Tensor, k: Any, v: Any, **features: Any) -> torch.Tensor:
        """One layer of a pass through SGLang's own entry, `[tokens, q_heads, v_head_dim]`. The tensors are copied: pools may
        change them."""
        backend.init_forward_metadata(batch)
        flat = (None if t is None else t.clone() for t in (k, v))
        out = backend.forward(q.flatten(1).clone(), *flat, self.layer, batch, **features)
        return out if isinstance(out, tuple) else out.view(-1, self.heads[0], self.dims[1])
