"""torch's FlexAttention with its `PagedAttention`: masks and biases as functions of positions, mapped to pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo

from quire.conformance.cases.call import KernelCall
from quire.conformance.runner.target import Target
from quire.conformance.targets.peer import Rules, View, cannot_view, peer

LARGEST_TILE = 64
RECOMPILES = 4096
"""More than the number of cases. Beyond its limit, by default eight, torch falls back to another, uncompiled kernel."""
MOST = 2**27
"""The most scores of an uncompiled call, which holds all of them in memory."""
RULES: Rules = {
    "queries in fp32, fp16 or bf16, and a cache of the same type": lambda p: (
        p.q_dtype in ("fp32", "fp16", "bf16") and p.format == p.q_dtype
    ),
}
COMPILED_RULES: Rules = {**RULES, "page_size in multiples of 16, its smallest tile": lambda p: p.page_size % 16 == 0}


def target(name: str, device: str | None) -> Target:
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    compiled = torch.device(where).type != "cpu"
    attention: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention

    def run(call: View) -> None:
        """Queries are padded to [seqs, longest]; the padding sees no key, and its output is discarded."""
        k, v = call.token_major
        longest, width = call.max_q, max(call.max_kv, 1)
        if not longest:
            return
        pages = paged(PagedAttention, call)
        lens, q_lens, starts = call.kv_lens.long(), call.q_lens.long(), call.q_starts.long()
        is_visible, bias = mask_and_bias(call, lens, q_lens, where)
        mask = create_block_mask(is_visible, call.seqs, None, longest, width, device=where, BLOCK_SIZE=(128, call.page_size))
        padded = call.q.new_zeros(call.seqs, longest, *call.q.shape[1:])
        rows = [slice(int(starts[i]), int(starts[i + 1])) for i in range(call.seqs)]
        for i, row in enumerate(rows):
            padded[i, : row.stop - row.start] = call.q[row]
        tile = min(call.page_size & -call.page_size, LARGEST_TILE)
        attend = partial(
            attention,
            padded.transpose(1, 2),
            k.flatten(0, 1).transpose(0, 1)[None],
            v.flatten(0, 1).transpose(0, 1)[None],
            score_mod=pages.get_score_mod(bias, lens),
            block_mask=pages.convert_logical_block_mask(mask, kv_len=lens),
            scale=call.scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
            kernel_options={"BLOCK_N": tile} if compiled else None,
        )
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES, accumulated_recompile_limit=RECOMPILES):
            out, aux = attend()
        for i, row in enumerate(rows):
            call.out[row] = out[i, :, : row.stop - row.start].transpose(0, 1)
            if call.lse is not None:
                call.lse[row] = aux.lse[i, :, : row.stop - row.start].T

    def cannot(call: KernelCall) -> str | None:
        for seq, columns in enumerate(needed(call)):
            ids = call.page_table[seq, columns]
            if len(ids.unique()) < len(ids):
                return "a page that occurs twice in one sequence"
        longest = int(call.q_starts.diff().max()) if call.seqs else 0
        scores = call.seqs * call.q_heads * longest * call.pages * call.page_size
        return f"{scores} scores in memory at once" if scores > MOST and not compiled else cannot_view(call)

    takes = "window softcap alibi causal lse"
    version = torch.__version__ if compiled else f"{torch.__version__}, not compiled"
    rules = COMPILED_RULES if compiled else RULES
    return peer(name, run, where, takes=takes, rules=rules, cannot=cannot, version=version)


def mask_and_bias(
    call: View, lens: torch.Tensor, q_lens: torch.Tensor, device: str
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The mask and the bias of a call, as functions of batch, head and the indices of query and key."""
    context, alibi = lens - q_lens, call.alibi
    # Numbers are passed as tensors: the compiler makes a changing Python number a symbol, and then cannot lower the function.
    left, right, cap = (None if n is None else torch.tensor(n, device=device) for n in (*call.window, call.softcap))
    causal = call.causal if isinstance(call.causal, torch.Tensor) else torch.full_like(lens, call.causal, dtype=torch.bool)

    def is_visible(b: Any, h: Any, q: Any, key: Any) -> Any:
        distance = context[b] + q - key
        seen = (q < q_lens[b]) & (key < lens[b]) & ((distance >= 0) | ~causal[b])
        if left is not None:
            seen = seen & (distance <= left)
        return seen if right is None else seen & (distance >= -right)

    def bias(score: Any, b: Any, h: Any, q: Any, key: Any) -> Any:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if alibi is None else score - alibi[h] * (context[b] + q - key).abs()

    return is_visible, bias


def paged(kind: Any, call: View) -> Any:
    """torch's page table with the pages of the call, and the inverse mapping from a page to its index in each sequence."""
    pages = kind(call.pages, call.page_size, call.seqs, device=str(call.device))
    for seq, columns in enumerate(needed(call.call)):
        ids = call.page_table[seq, columns].long()
        pages.page_table[seq, columns] = ids
        pages.physical_to_logical[seq, ids] = torch.arange(columns.start, columns.stop, device=call.device)
        pages.capacity[seq] = columns.stop * call.page_size
    return pages


def needed(call: KernelCall) -> list[slice]:
    """The columns of the page table that each sequence needs: pages left of the window may belong to other sequences."""
    left, found = call.window[0], []
    for kv_len, q_len in zip(call.kv_lens.tolist(), call.q_starts.diff().tolist()):
        first = 0 if left is None else max(0, kv_len - q_len - left) // call.page_size
        found.append(slice(first, max(first, -(-kv_len // call.page_size)) if q_len else first))
    return found
