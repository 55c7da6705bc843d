"""Tests a cache write of your own with the conformance kit, fused with RoPE: correct, and with two faults.

The function `write` is the whole adapter. From a shell:

quire conform examples/14_is_my_write_right.py:write --level standard
pytest --quire-target examples/14_is_my_write_right.py:write
"""

from functools import wraps

import torch

from quire.conformance.cases.case import Case
from quire.conformance.runner.run import examine
from quire.conformance.runner.target import wrap

FORMATS = ("fp16", "bf16", "e4m3fn")
SUPPORTS = {"format": FORMATS, "v_format": FORMATS, "scales": ("none", "tensor", "head")}
"""Its limits: beyond them it must raise or be correct. Cases that need an argument it does not have are skipped."""
REFUSES = False  # it is not called there


def write(*, k, v, k_pages, v_pages, slots, k_scale, v_scale, cos, sin, positions, q):
    """Rotates q and k in the half-split style, quantises k and v with one scale each or one for each head, and stores them."""
    if cos is not None:
        k, q = (None if x is None else rotated(x, cos[positions.long()], sin[positions.long()]) for x in (k, q))
    kept = (slots >= 0).nonzero().flatten()  # a slot of -1: padding, or a token that is not stored
    page, offset = slots[kept] // k_pages.shape[1], slots[kept] % k_pages.shape[1]
    for x, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        x = x[kept].float()
        if scale is not None:
            largest = torch.finfo(pages.dtype).max
            x = (x / scale.reshape(-1, 1)).clamp(-largest, largest)
        bits = {1: torch.uint8, 2: torch.int16}[pages.dtype.itemsize]  # torch does not index fp8
        pages.view(bits)[page, offset] = x.to(pages.dtype).view(bits)
    return q  # or write `q_out`


def rotated(x, cos, sin):
    """The first elements of each head, as many as the tables have, times two."""
    half = cos.shape[1]
    a, b, rest = x.float().split((half, half, x.shape[2] - 2 * half), 2)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), 2)


@wraps(write)
def position_in_batch(**call):
    """The same with a common fault: the row of a token is taken for its position."""
    return write(**call | {"positions": torch.arange(call["k"].shape[0])})


@wraps(write)
def one_scale(**call):
    """Another fault: values are divided by the scale of keys."""
    return write(**call | {"v_scale": call["k_scale"]})


CASES = (
    Case("plain", operation="write"),
    Case("skipped", operation="write", slots="skipped", rope="half-split", q_dtype="bf16", format="bf16"),
    Case("fp8", operation="write", format="e4m3fn", scales="head", rope="half-split", rotary_dim=32),
)

if __name__ == "__main__":
    for name, function in {"correct": write, "position in batch": position_in_batch, "one scale": one_scale}.items():
        target = wrap(function, name, supports=SUPPORTS, refuses=REFUSES)
        for result in (examine(case, target) for case in CASES):
            print(f"{name:18} {result.case.name:8} {result.status:8}", *result.findings[:1], result.reason)
