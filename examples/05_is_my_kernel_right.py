"""Tests a kernel of your own with the conformance kit: correct, and with two faults.

The function `attention` is the whole adapter. From a shell:

quire conform examples/05_is_my_kernel_right.py:attention --level smoke --html report.html
pytest --quire-target examples/05_is_my_kernel_right.py:attention
"""

from functools import wraps

import torch

from quire.conformance.cases.case import Case
from quire.conformance.runner.run import examine
from quire.conformance.runner.target import wrap

SUPPORTS = {"q_dtype": ("fp16", "bf16", "fp32"), "format": ("fp16", "bf16", "fp32"), "v_head_dim": range(8, 513)}
"""Its limits: beyond them it must raise or be correct. Cases that need an argument it does not have are skipped."""


def attention(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, window):
    """Gathers the pages of each sequence and calls torch's attention: slow and simple."""
    for seq, kv_len in enumerate(kv_lens.tolist()):
        start, end = q_starts[seq].item(), q_starts[seq + 1].item()
        if start == end:
            continue
        at = torch.arange(kv_len, device=q.device)
        distance = at[kv_len - (end - start) :, None] - at
        seen = (distance >= 0) & (distance <= (kv_len if window[0] is None else window[0]))
        needed = at[seen.any(0)]  # slots that no query sees may hold NaN
        pages, slots = page_table[seq].long()[needed // k_pages.shape[1]], needed % k_pages.shape[1]
        k, v = (x[pages, slots].float().repeat_interleave(q.shape[1] // x.shape[2], 1).transpose(0, 1) for x in (k_pages, v_pages))
        rows = q[start:end].float().transpose(0, 1)
        mask = seen[:, needed]
        out[start:end] = (
            torch.nn.functional.scaled_dot_product_attention(rows, k, v, mask, scale=scale).transpose(0, 1).to(out.dtype)
        )


@wraps(attention)
def one_key_short(**call):
    """The same with a common fault: a window of W keys is taken as W - 1."""
    left, right = call.pop("window")
    attention(**call, window=(left - 1 if left else left, right))


@wraps(attention)
def rows_swapped(**call):
    """Another fault: two rows of the output are swapped."""
    attention(**call)
    out = call["out"]
    out[[1, 2]] = out[[2, 1]]


CASES = (Case("plain"), Case("window", window=(7, 0)), Case("hnd pages", layout="hnd"))

if __name__ == "__main__":
    for name, function in {"correct": attention, "one key short": one_key_short, "rows swapped": rows_swapped}.items():
        target = wrap(function, name, supports=SUPPORTS)
        for result in (examine(case, target) for case in CASES):
            print(f"{name:14} {result.case.name:10} {result.status:12}", *result.findings[:1], result.reason)
