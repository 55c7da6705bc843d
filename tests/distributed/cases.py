"""The layers that are run on ranks: each with another feature, and together with all."""

from __future__ import annotations

import torch

from distributed.layer import Layer

LONG = ((70, 3), (1, 20), (9, 1), (1, 1))
"""A long and a short sequence: with an interleave of 16 some ranks hold no key of the short one."""

LAYERS = {
    "plain": Layer(),
    "bf16": Layer(dtype=torch.bfloat16, format="bf16", seed=1),
    "window": Layer(steps=LONG, options={"window": 13}, seed=2),
    "alibi": Layer(steps=LONG, options={"alibi": True}, seed=3),
    "sinks": Layer(steps=LONG, options={"sinks": True}, seed=4),
    "softcap": Layer(options={"softcap": 2.0, "scale": 0.7}, seed=5),
    "not-causal": Layer(options={"causal": False, "window": (9, 4)}, seed=6),
    "fp8-tensor": Layer(dtype=torch.bfloat16, format="e4m3fn", scales="tensor", seed=7),
    "fp8-head": Layer(format="e5m2", scales="head", options={"sinks": True}, seed=8),
    "int8-token": Layer(dtype=torch.float16, format="int8", scales="token", seed=9),
    "fp8-queries": Layer(
        dtype=torch.float8_e4m3fn, format="e4m3fn", scales="head", options={"q_scale": 0.25, "out_scale": 0.01}, seed=10
    ),
    "padding": Layer(padding=5, steps=LONG, options={"window": 30, "alibi": True, "sinks": True}, seed=11),
    "all": Layer(
        dtype=torch.bfloat16, format="e4m3fn", scales="head", padding=2, steps=LONG, seed=12,
        options={"window": 40, "alibi": True, "sinks": True, "softcap": 3.0},
    ),
    "one-token": Layer(steps=((1,), (1,), (1,)), options={"sinks": True, "alibi": True}, seed=13),
    "causal-per-sequence": Layer(options={"causal": torch.tensor([True, False, True]), "sinks": True}, seed=14),
    "tree": Layer(steps=((30, 9), (5, 7)), padding=1, options={"mask": True}, seed=15),
    "ledger": Layer(ledger=True, steps=LONG, options={"window": 20}, seed=16),
    "odd-sizes": Layer(q_heads=8, kv_heads=2, head_dim=24, page_size=5, steps=LONG, seed=17),
}  # fmt: skip
