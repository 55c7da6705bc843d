"""What a FlashInfer wrapper was planned and run with.

A definition of FlashInfer leaves out most of it: the length of the last page, causality, window, softcap, scales and masks are
arguments of `plan()` or `run()` that a solution is not given. Without them a solution would be silently wrong, so they are read
from the call that is under way, and anything that Quire cannot honour is refused by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from quire.errors import ArgumentError, describe
from quire.integrations.engines import EngineError

ANY: Any = object()
"""Every value is allowed: the argument changes speed, or repeats what is known."""
PLAN = {
    "indptr": ANY, "indices": ANY, "last_page_len": ANY, "qo_indptr": ANY, "kv_indptr": ANY, "paged_kv_indptr": ANY,
    "paged_kv_indices": ANY, "paged_kv_last_page_len": ANY, "num_qo_heads": ANY, "num_kv_heads": ANY, "head_dim": ANY,
    "head_dim_qk": ANY, "head_dim_vo": ANY, "page_size": ANY, "q_data_type": ANY, "kv_data_type": ANY, "data_type": ANY,
    "o_data_type": ANY, "sm_scale": ANY, "causal": ANY, "is_causal": ANY, "window_left": ANY, "logits_soft_cap": ANY,
    "non_blocking": ANY, "fixed_split_size": ANY, "disable_split_kv": ANY, "seq_lens": ANY, "seq_lens_q": ANY,
    "block_tables": ANY, "max_token_per_sequence": ANY, "max_sequence_kv": ANY, "rope_scale": ANY, "rope_theta": ANY,
    "deprecated_positional_args": (), "window_right": (None, 0), "q_len_per_req": (None, 1), "pos_encoding_mode": (None, "NONE"),
    "use_fp16_qk_reduction": (None, False), "token_pos_in_items_len": (None, 0),
}  # fmt: skip
"""Arguments of `plan()`: those that are allowed, or their allowed values. Others must be None."""
RUN = {
    "self": ANY, "q": ANY, "k": ANY, "v": ANY, "paged_kv_cache": ANY, "out": ANY, "lse": ANY, "return_lse": ANY,
    "enable_pdl": ANY, "window_left": ANY, "k_scale": ANY, "v_scale": ANY, "q_len_per_req": (None, 1), "args": ((),),
    "lse_base": ("log2",), "lse_layout": ("NH",),
}  # fmt: skip
"""Likewise, of `run()`."""


class WrapperCall:
    """One call of a wrapper: the wrapper, the arguments of its `run()` and of its `plan()`."""

    def __init__(self, namespace: Mapping[str, Any], planned: Mapping[str, Any], given: Mapping[str, Any]):
        self.run = {name: value for name, value in namespace.items() if name not in given or name in RUN}
        plan = dict(planned)
        self.plan: dict[str, Any] = {**plan.pop("kwargs", {}), **plan}
        self.wrapper = namespace["self"]
        _refuse("run()", self.run, RUN)
        _refuse("plan()", self.plan, PLAN)
        if getattr(self.wrapper, "is_cuda_graph_enabled", False):
            raise ArgumentError("use_cuda_graph", "True", "False: FlashInfer's plan changes arrays that a graph would have to read")

    @classmethod
    def current(cls, given: Mapping[str, Any]) -> WrapperCall:
        """The call that FlashInfer is applying a solution to; `given` is what it passed to the solution."""
        namespace = _applied(sys._getframe(2))
        from flashinfer.trace_apply import plan_capture

        planned = plan_capture.fetch_plan_kwargs(namespace["self"])
        if not planned:
            raise EngineError(
                f"{type(namespace['self']).__name__}.run was called without the public plan(): window, softcap and the length of "
                "the last page are unknown"
            )
        return cls(namespace, planned, given)


FUNCTION = {
    "query": ANY, "kv_cache": ANY, "workspace_buffer": ANY, "block_tables": ANY, "seq_lens": ANY, "max_seq_len": ANY,
    "max_q_len": ANY, "max_kv_len": ANY, "batch_size": ANY, "cum_seq_lens_q": ANY, "cum_seq_lens_kv": ANY, "bmm1_scale": ANY,
    "bmm2_scale": ANY, "window_left": ANY, "out": ANY, "out_dtype": ANY, "kv_layout": ANY, "enable_pdl": ANY, "backend": ANY,
    "causal": ANY, "multi_ctas_kv_counter_buffer": ANY, "q_len_per_req": (None, 1), "o_scale": (None, 1.0),
    "uses_shared_paged_kv_idx": (True,), "return_lse": (False,), "enable_block_sparse_attention": (False,), "cp_world": (1,),
    "cp_rank": (0,),
}  # fmt: skip
"""Likewise, of the functions `trtllm_batch_*_with_kv_cache`."""


def function_call() -> dict[str, Any]:
    """The arguments of the function that FlashInfer is applying a solution to."""
    arguments = dict(_applied(sys._getframe(2)))
    _refuse("a function", arguments, FUNCTION)
    return arguments


def _applied(frame: FrameType) -> Mapping[str, Any]:
    """All arguments of the call, from the function of FlashInfer that called the solution."""
    namespace = frame.f_locals.get("namespace")
    if frame.f_globals.get("__name__") != "flashinfer.trace_apply.adapt" or not isinstance(namespace, Mapping):
        raise EngineError("a solution of quire.integrations.flashinfer is called by flashinfer.trace_apply only")
    return namespace


def _refuse(method: str, arguments: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        values = allowed.get(name, (None,))
        if (
            values is ANY
            or value is None
            or any(value is other or (isinstance(value, type(other)) and value == other) for other in values)
        ):
            continue
        if name == "deprecated_positional_args" and not value:
            continue
        known = ", ".join(repr(other) for other in values) or "nothing"
        raise ArgumentError(name, describe(value), f"{known}: {method} of FlashInfer, on Quire")
