"""The upstream matrix with power: its shapes and lengths, numbers that matter, and poison.

On a GPU the lengths and heads are the upstream test's; on a CPU both are scaled down. The host's maxima are too low, as upstream's.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from compat.case import Case, build
from quire.compat.vllm import chunked_prefill_paged_decode, context_attention_fwd

QUERY_LENS = [880, 410, 792, 927, 446, 57, 281, 1004, 539, 1]
CTX_LENS = [430, 956, 818, 865, 326, 1007, 504, 382, 613, 929]
SHRINK = {"cpu": 16, "cuda": 1}
HEADS = {"cpu": 8, "cuda": 64}

FORMS = {"chunked": (chunked_prefill_paged_decode, 2), "context": (context_attention_fwd, 1), "cached": (context_attention_fwd, 0)}
"""The operator, and from how many new tokens on a row brings them along: chunked reads decodes from the cache."""


class Entry(NamedTuple):
    form: str
    window: int
    alibi: bool
    kv_cache_dtype: str
    head_dim: int
    shared: bool
    """Whether all query heads share one kv head; otherwise each has its own."""
    page_size: int

    def __str__(self) -> str:
        heads = "one-kv-head" if self.shared else "own-kv-heads"
        alibi = "-alibi" if self.alibi else ""
        return f"{self.form}-window{self.window}{alibi}-{self.kv_cache_dtype}-{heads}-dim{self.head_dim}-page{self.page_size}"


def entries() -> list[Entry]:
    """Every combination, but for the page sizes: each of them meets each pair of the others."""
    axes: tuple[tuple[Any, ...], ...] = (
        tuple(FORMS),
        (0, 16, 2048),
        (False, True),
        ("auto", "fp8", "fp8_e5m2"),
        (24, 128),
        (False, True),
    )
    found = []
    for choice in product(*(range(len(axis)) for axis in axes)):
        values = [axis[i] for axis, i in zip(axes, choice)]
        if values[0] != "cached" or not values[2]:  # which upstream refuses, and so does compat
            found.append(Entry(*values, page_size=(16, 32, 544)[sum(choice) % 3]))
    return found


def case_of(entry: Entry, device: str) -> Case:
    small = SHRINK[device]
    q_lens = [max(1, n // small) for n in QUERY_LENS]
    seq_lens = [q_len + n // small for q_len, n in zip(q_lens, CTX_LENS)]
    return build(
        device,
        q_lens,
        seq_lens,
        heads=HEADS[device],
        kv_heads=1 if entry.shared else HEADS[device],
        head_dim=entry.head_dim,
        page_size=entry.page_size,
        kv_cache_dtype=entry.kv_cache_dtype,
        dense_from=FORMS[entry.form][1],
        window=entry.window,
        alibi=entry.alibi,
        hints=(1024 // small, 1024 // small),
    )


@pytest.mark.parametrize("entry", entries(), ids=str)
def test_matrix(entry: Entry, device: str) -> None:
    case = case_of(entry, device)
    case.run(FORMS[entry.form][0])
    case.check()


# The matrix can fail: each fault below is one that the upstream test accepts in some or all of its cases.


def no_output(case: Case) -> None:
    case.output.zero_()


def token_missing(case: Case) -> None:
    """The seeds' theory: the cache lacks the decode row's own token."""
    row = len(case.pages) - 1
    at = int(case.arguments["seq_lens"][row]) - 1
    for name in ("key_cache", "value_cache"):
        case.arguments[name][case.pages[row][at // case.page_size], :, :, at % case.page_size] = 0


def key_scale_off(case: Case) -> None:
    case.arguments["k_scale"] = case.arguments["k_scale"] * 1.05


def value_scale_forgotten(case: Case) -> None:
    case.arguments["v_scale"] = torch.ones_like(case.arguments["v_scale"])


def scale_doubled(case: Case) -> None:
    case.options["sm_scale"] = 2 * case.arguments["query"].shape[2] ** -0.5


def uniform_weights(case: Case) -> None:
    case.options["sm_scale"] = 1e-9


def window_one_short(case: Case) -> None:
    case.options["sliding_window"] -= 1


def slopes_forgotten(case: Case) -> None:
    del case.options["alibi_slopes"]


def one_head_lost(case: Case) -> None:
    case.arguments["value_cache"][:, -1] = 0


def pages_swapped(case: Case) -> None:
    table = case.arguments["block_table"]
    table[3, :2] = table[3, :2].flip(0)


WINDOWED = Entry("chunked", 16, True, "auto", 24, False, 16)
PLAIN = Entry("chunked", 0, False, "auto", 24, False, 16)
FP8 = Entry("chunked", 0, False, "fp8", 128, False, 32)
FAULTS = (
    *((entry, no_output) for entry in (PLAIN, WINDOWED, FP8)),
    *((entry, token_missing) for entry in (PLAIN, WINDOWED, FP8)),
    *((entry, scale_doubled) for entry in (PLAIN, FP8)),
    *((entry, uniform_weights) for entry in (PLAIN, FP8)),
    *((entry, one_head_lost) for entry in (PLAIN, FP8)),
    *((entry, pages_swapped) for entry in (PLAIN._replace(alibi=True), FP8._replace(alibi=True))),
    (FP8, key_scale_off),
    (FP8, value_scale_forgotten),
    (WINDOWED, window_one_short),
    (WINDOWED, slopes_forgotten),
)


@pytest.mark.parametrize("entry, fault", FAULTS, ids=[f"{fault.__name__}-{entry}" for entry, fault in FAULTS])
def test_the_matrix_sees(entry: Entry, fault: Any, device: str) -> None:
    case = case_of(entry, device)
    fault(case)
    if fault is not no_output:
        case.run(FORMS[entry.form][0])
    with pytest.raises(AssertionError, match="elements wrong"):
        case.check()
