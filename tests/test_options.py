"""Options: a frozen value, validated once, that prints what was asked for and refuses the rest by name."""

import dataclasses
import math

import pytest
import torch

from quire.errors import ArgumentError
from quire.options import PLAIN, Options

MASK, ONES = torch.ones(3, 4, dtype=torch.bool), torch.ones(8)


def test_default_options():
    assert repr(PLAIN) == repr(Options()) == "Options()"
    assert (PLAIN.sides, PLAIN.causal, PLAIN.batch_invariant) == ((None, None), True, False)


@pytest.mark.parametrize(
    ("window", "sides"),
    [(None, (None, None)), (1, (0, 0)), (4096, (4095, 4095)), ((3, 0), (3, 0)), ((None, 2), (None, 2)), ((5, None), (5, None))],
    ids=str,
)
def test_a_window_has_two_sides(window, sides):
    assert Options(window=window).sides == sides


def test_everything_at_once_prints_itself():
    options = Options(
        window=(7, None),
        softcap=50,
        alibi=ONES,
        sinks=ONES.half(),
        scale=-0.25,
        causal=False,
        mask=MASK,
        positions=torch.arange(3),
        q_scale=2,
        out_scale=torch.tensor(0.5),
        batch_invariant=True,
    )
    assert repr(options) == (
        "Options(window=(7, None), softcap=50, alibi=float32[8] on cpu, sinks=float16[8] on cpu, scale=-0.25, causal=False, "
        "mask=bool[3, 4] on cpu, positions=int64[3] on cpu, q_scale=2, out_scale=float32[] on cpu, batch_invariant=True)"
    )
    assert repr(Options(causal=torch.tensor([True, False]))) == "Options(causal=bool[2] on cpu)"


@pytest.mark.parametrize(
    "given",
    [
        {"mask": MASK},
        {"mask": MASK, "softcap": 30.0},
        {"mask": MASK, "window": 4, "positions": torch.arange(3, dtype=torch.int32)},
        {"mask": MASK, "alibi": ONES, "positions": torch.arange(3)},
        {"scale": 0},
        {"q_scale": 0.5, "out_scale": 1},
        {"scale": -(2.0**100), "softcap": 2.0**-26, "out_scale": 2.0**-100},
        {"scale": 2.0**-100, "softcap": 2.0**100, "q_scale": 2.0**100, "out_scale": 2.0**100},
    ],
    ids=["mask", "mask-softcap", "mask-window", "mask-alibi", "scale-0", "scales", "large", "small"],
)
def test_what_goes_together(given):
    Options(**given)


def test_options_are_frozen_and_equal_only_to_themselves():
    options = Options(window=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.window = 4
    assert options != Options(window=3) and len({options, options}) == 1


WINDOW_SIDES = "(left, right), each 0 or more keys, or None where it is unbounded"
CAUSAL = "True, False or a bool tensor [seqs]"
RANGE = "from 2^-100 to 2^100 (7.9e-31 to 1.3e+30)"
SCALE = f"a finite number above 0, {RANGE}, or an fp32 tensor []"
FACTOR = f"a finite number, 0 or of magnitude {RANGE}, or None"
CAP = f"a finite number above 0, {RANGE}, or None for no cap"
SLOPES = "a tensor [q_heads] of float64, float32, float16 or bfloat16, or None"

REFUSED = {
    "window-0": ({"window": 0}, "window: given 0; allowed: 1 or more keys, the query's own included; None for no window"),
    "window-negative": ({"window": -1}, "window: given -1; allowed: 1 or more keys, the query's own included; None for no window"),
    "window-float": ({"window": 4.0}, "window: given 4.0; allowed: an int, a pair (left, right), or None"),
    "window-bool": ({"window": True}, "window: given True; allowed: an int, a pair (left, right), or None"),
    "window-three": ({"window": (1, 2, 3)}, "window: given (1, 2, 3); allowed: an int, a pair (left, right), or None"),
    "window-left": ({"window": (-1, 0)}, f"window: given (-1, 0); allowed: {WINDOW_SIDES}"),
    "window-right": ({"window": (1, 0.5)}, f"window: given (1, 0.5); allowed: {WINDOW_SIDES}"),
    "softcap-0": ({"softcap": 0}, f"softcap: given 0; allowed: {CAP}"),
    "softcap-nan": ({"softcap": math.nan}, f"softcap: given nan; allowed: {CAP}"),
    "softcap-text": ({"softcap": "50"}, f"softcap: given '50'; allowed: {CAP}"),
    "scale-inf": ({"scale": math.inf}, f"scale: given inf; allowed: {FACTOR}"),
    "scale-tensor": ({"scale": torch.tensor(1.0)}, f"scale: given float32[] on cpu; allowed: {FACTOR}"),
    "softcap-beyond-fp32": ({"softcap": 1e39}, f"softcap: given 1e+39; allowed: {CAP}"),
    "softcap-times-log2e-beyond-fp32": ({"softcap": 3e38}, f"softcap: given 3e+38; allowed: {CAP}"),
    "softcap-below-fp32": ({"softcap": 1e-300}, f"softcap: given 1e-300; allowed: {CAP}"),
    "softcap-int-beyond-a-float": ({"softcap": 10**400}, f"softcap: given 1{'0' * 159}... (401 characters); allowed: {CAP}"),
    "scale-beyond-fp32": ({"scale": -1e39}, f"scale: given -1e+39; allowed: {FACTOR}"),
    "scale-below-fp32": ({"scale": 1e-50}, f"scale: given 1e-50; allowed: {FACTOR}"),
    "q-scale-beyond-fp32": ({"q_scale": 1e300}, f"q_scale: given 1e+300; allowed: {SCALE}"),
    "out-scale-below-fp32": ({"out_scale": 1e-50}, f"out_scale: given 1e-50; allowed: {SCALE}"),
    "scale-times-q-scale": (
        {"scale": 1e20, "q_scale": 1e20},
        "q_scale: given 1e+20, times the scale 1e+20; allowed: a product of at most 2^100 (1.3e+30)",
    ),
    "scale-over-softcap": (
        {"scale": 1e30, "softcap": 1e-30},
        "scale: given 1e+30 times the q_scale 1.0, over the softcap 1e-30; allowed: a ratio of at most 2^126 (8.5e+37)",
    ),
    "alibi-list": ({"alibi": [1.0]}, f"alibi: given [1.0]; allowed: {SLOPES}"),
    "alibi-axes": ({"alibi": torch.ones(2, 2)}, f"alibi: given float32[2, 2] on cpu; allowed: {SLOPES}"),
    "sinks-int": ({"sinks": torch.ones(2).long()}, f"sinks: given int64[2] on cpu; allowed: {SLOPES}"),
    "causal-int": ({"causal": 1}, f"causal: given 1; allowed: {CAUSAL}"),
    "causal-int-tensor": ({"causal": torch.ones(2).int()}, f"causal: given int32[2] on cpu; allowed: {CAUSAL}"),
    "causal-axes": ({"causal": MASK}, f"causal: given bool[3, 4] on cpu; allowed: {CAUSAL}"),
    "causal-beside-mask": (
        {"causal": MASK[0], "mask": MASK},
        "causal: given a tensor, together with a mask; allowed: a bool: the mask replaces causality",
    ),
    "mask-float": ({"mask": MASK.float()}, "mask: given float32[3, 4] on cpu; allowed: a bool tensor [tokens, M] or None"),
    "mask-axes": ({"mask": MASK[0]}, "mask: given bool[4] on cpu; allowed: a bool tensor [tokens, M] or None"),
    "positions-alone": (
        {"positions": torch.arange(3)},
        "positions: given a tensor, without a mask; allowed: None: only a tree mask needs positions",
    ),
    "positions-type": (
        {"mask": MASK, "positions": torch.ones(3)},
        "positions: given float32[3] on cpu; allowed: an int32 or int64 tensor [tokens]",
    ),
    "positions-axes": (
        {"mask": MASK, "positions": torch.ones(3, 1).int()},
        "positions: given int32[3, 1] on cpu; allowed: an int32 or int64 tensor [tokens]",
    ),
    "mask-window": (
        {"mask": MASK, "window": 4},
        "positions: given nothing, with mask and window; allowed: integers [tokens]: the branches of a tree share positions",
    ),
    "mask-alibi": (
        {"mask": MASK, "alibi": ONES},
        "positions: given nothing, with mask and alibi; allowed: integers [tokens]: the branches of a tree share positions",
    ),
    "q-scale-0": ({"q_scale": 0}, f"q_scale: given 0; allowed: {SCALE}"),
    "q-scale-bool": ({"q_scale": True}, f"q_scale: given True; allowed: {SCALE}"),
    "out-scale-nan": ({"out_scale": math.nan}, f"out_scale: given nan; allowed: {SCALE}"),
    "out-scale-half": (
        {"out_scale": torch.tensor(1.0).half()},
        "out_scale: given float16[] on cpu; allowed: a number, or an fp32 tensor []",
    ),
    "q-scale-vector": ({"q_scale": torch.ones(2)}, "q_scale: given float32[2] on cpu; allowed: a number, or an fp32 tensor []"),
    "invariant-int": ({"batch_invariant": 1}, "batch_invariant: given 1; allowed: True or False"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(given, message):
    with pytest.raises(ArgumentError) as caught:
        Options(**given)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["alibi", "sinks"])
@pytest.mark.parametrize("given", [torch.ones(2).to(torch.float8_e4m3fn), torch._neg_view(torch.ones(2))], ids=["fp8", "negated"])
def test_numbers_that_kernels_would_misread(name: str, given: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match=name):
        Options(**{name: given})
