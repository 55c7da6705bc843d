"""Your own kernel before the judge. The function in the middle is the whole adapter; from a shell:

quire conform examples/05_is_my_kernel_right.py:attention --level smoke --html report.html
pytest --quire-target examples/05_is_my_kernel_right.py:attention
"""

from functools import wraps

import torch

from quire.conformance.case import Case
from quire.conformance.run import examine
from quire.conformance.target import wrap

SUPPORTS = {"q_dtype": ("fp16", "bf16", "fp32"), "format": ("fp16", "bf16", "fp32"), "v_head_dim": range(8, 513)}
"""What it is not made for: cases beyond it must raise or be right. Features it has no argument for are not asked of it."""


def attention(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, window):
    """Gathers the pages of each sequence and asks torch: slow, and easy to see right."""
    for seq, kv_len in enumerate(kv_lens.tolist()):
        start, end = q_starts[seq].item(), q_starts[seq + 1].item()
        if start == end:
            continue
        at = torch.arange(kv_len, device=q.device)
        distance = at[kv_len - (end - start) :, None] - at
        seen = (distance >= 0) & (distance <= (kv_len if window[0] is None else window[0]))
        needed = at[seen.any(0)]  # what no query sees may hold anything, NaN too
        pages, slots = page_table[seq].long()[needed // k_pages.shape[1]], needed % k_pages.shape[1]
        k, v = (x[pages, slots].float().repeat_interleave(q.shape[1] // x.shape[2], 1).transpose(0, 1) for x in (k_pages, v_pages))
        rows = q[start:end].float().transpose(0, 1)
        mask = seen[:, needed]
        out[start:end] = (
            torch.nn.functional.scaled_dot_product_attention(rows, k, v, mask, scale=scale).transpose(0, 1).to(out.dtype)
        )


@wraps(attention)
def one_key_short(**call):
    """The same with an old mistake: a window of W keys taken for W - 1."""
    left, right = call.pop("window")
    attention(**call, window=(left - 1 if left else left, right))


@wraps(attention)
def two_rows_in_one(**call):
    """And another: rows that share a tile get each other's results."""
    attention(**call)
    out = call["out"]
    out[[1, 2]] = out[[2, 1]]


CASES = (Case("plain"), Case("window", window=(7, 0)), Case("hnd pages", layout="hnd"))

if __name__ == "__main__":
    for name, function in {"right": attention, "one key short": one_key_short, "rows swapped": two_rows_in_one}.items():
        target = wrap(function, name, supports=SUPPORTS)
        for result in (examine(case, target) for case in CASES):
            print(f"{name:14} {result.case.name:10} {result.status:12}", *result.findings[:1], result.reason)
