"""Every workload for GPUs at a small size: built, allowed by the contract, computed by Quire on the CPU and compared with the
reference, and served by a kernel of an H200. Then every feature as a fault: a result without it is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import quire
from quire.bench.bound import BoundImplementation
from quire.bench.case import BenchCase, build
from quire.bench.cuda_workloads import DECODE, FEATURES, PREFILL, SETS
from quire.bench.features import visible
from quire.bench.implementations import OWN_ON_CUDA
from quire.bench.reference_check import BenchReference
from quire.bench.workloads import CUDA_WORKLOADS, OPTIONAL, Workload
from quire.cli.bench import SETS as NAMES
from quire.options import NUMBERS, PER_HEAD
from support.small_workloads import small, small_reference

ALL = SETS["all"]
ATTEND = [w for w in ALL if w.operation == "attend"]


def named(workloads: tuple[Workload, ...] | list[Workload], text: str) -> Workload:
    """The first workload whose label has this text, at a small size."""
    return small(next(w for w in workloads if text in w.label))


def test_sets_have_names_and_labels_differ() -> None:
    assert tuple(SETS) == NAMES and SETS["known"] is CUDA_WORKLOADS
    assert len({w.label for w in ALL}) == len(ALL) == len(set(CUDA_WORKLOADS) | {*PREFILL, *DECODE, *FEATURES})
    for workload in ALL:
        assert Workload.from_json(workload.to_json()) == workload


def test_every_parameter_that_users_ask_for_has_a_workload() -> None:
    prompts = [w for w in ALL if w.name.startswith("prefill")]
    assert {64, 80, 96, 128, 192, 256, 512} <= {w.head_dim for w in prompts}
    assert {1, 4, 5, 7, 8, 16} <= {w.q_heads // w.kv_heads for w in prompts}
    assert {1, 7, 16, 32, 64, 128, 256, 544} <= {w.page_size for w in prompts}
    assert {None, 128, 1024, 4096} <= {w.window for w in prompts}
    assert {"", "e4m3fn", "e5m2"} <= {w.format for w in prompts}
    short = [w for w in ALL if w.name.startswith(("decode", "verify", "mixed"))]
    assert {64, 96, 128, 256, 512, 576} <= {w.head_dim for w in short}
    assert {1, 16, 64, 544} <= {w.page_size for w in short}
    assert {"", "e4m3fn", "e5m2", "int4", "nvfp4"} <= {w.format for w in short}
    assert ("int8", "int4") in {(w.format, w.v_format) for w in short}
    assert all(any(name in w.features for w in ALL) for name in (*OPTIONAL, *NUMBERS, *PER_HEAD))


@pytest.mark.parametrize("workload", ALL, ids=lambda w: w.label)
def test_the_label_says_all_that_is_unusual(workload: Workload) -> None:
    """Without a feature, the label is another one; small sizes keep it up to its numbers."""
    for name in {*OPTIONAL, "options"} - {"v_dim", "prefixes"}:
        if not getattr(workload, name):
            continue
        default = Workload.__dataclass_fields__[name].default
        assert replace(workload, **{name: default}).label != workload.label
    assert small(workload).features == workload.features


def implementations(case: BenchCase) -> list[tuple[str, BoundImplementation]]:
    bound = [(name, implementation(case)) for name, implementation in OWN_ON_CUDA.items()]
    return [(name, one) for name, one in bound if one is not None]


@pytest.mark.parametrize("workload", ATTEND, ids=lambda w: w.label)
def test_attention_is_right(workload: Workload) -> None:
    case, reference = small_reference(workload)
    new = (case.k, case.v) if workload.form == "context" else None
    assert [v for v in quire.check(case.q, case.cache, case.batch, case.options, new=new) if not v.harmless] == []
    found = implementations(case)
    assert {name for name, _ in found} == {
        "quire",
        *(["quire fp8 q"] if workload.format in ("e4m3fn", "e5m2") else []),
        *(["quire without prefixes"] if workload.prefixes else []),
    }
    for _, bound in found:
        result = reference.check(bound.run(), bound.q_format)
        assert 0 < result.error <= result.budget


@pytest.mark.parametrize("workload", ATTEND, ids=lambda w: w.label)
def test_an_h200_has_a_kernel(workload: Workload) -> None:
    case, _ = small_reference(workload)
    new = (case.k, case.v) if workload.form == "context" else None
    decision = quire.explain(case.q, case.cache, case.batch, case.options, new=new, platform=quire.Platform.named("sm90"))
    assert decision.chosen is not None and decision.chosen.name != "torch"


@pytest.mark.parametrize("workload", [w for w in ALL if w.operation == "write"], ids=lambda w: w.label)
def test_writes_are_right_only_after_they_ran(workload: Workload) -> None:
    case = build(small(workload))
    for name, bound in implementations(case):
        assert name == "quire" or workload.rope
        case.cache.k_bytes.zero_(), case.cache.v_bytes.zero_()
        assert bound.difference is not None and not bound.difference() <= 0
        bound.run()
        assert bound.difference() == 0


ROTATIONS = [w for w in FEATURES if w.rope]


def without_rope(case: BenchCase) -> None:
    quire.write(case.k, case.v, case.cache, case.batch)


def one_position_later(case: BenchCase) -> None:
    positions = (case.batch.positions_of_tokens(len(case.k)) - 1).clamp(min=0).int()
    quire.write(case.k, case.v, case.cache, case.batch, rope=case.rope, positions=positions)


def with_pairs_of_neighbours(case: BenchCase) -> None:
    quire.write(case.k, case.v, case.cache, case.batch, rope=replace(case.rope, interleaved=True))


def with_k_for_v(case: BenchCase) -> None:
    quire.write(case.k, case.k, case.cache, case.batch, rope=case.rope)


@pytest.mark.parametrize(
    "fault", [without_rope, one_position_later, with_pairs_of_neighbours, with_k_for_v], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("workload", ROTATIONS, ids=lambda w: w.label)
def test_faults_of_rotations_are_seen(workload: Workload, fault: Callable[[BenchCase], None]) -> None:
    case = build(small(workload))
    bound = OWN_ON_CUDA["quire"](case)
    assert bound is not None and bound.difference is not None
    bound.run()
    assert bound.difference() == 0
    fault(case)
    assert bound.difference() > 0


def test_queries_of_rotations_are_compared_too() -> None:
    case = build(small(ROTATIONS[0]))
    bound = OWN_ON_CUDA["quire"](case)
    assert bound is not None and bound.difference is not None
    bound.run()
    case.q.mul_(1.02)
    assert bound.difference() > 0


def options_without(name: str) -> Callable[[BenchCase], torch.Tensor]:
    def fault(case: BenchCase) -> torch.Tensor:
        default = True if name == "causal" else None
        return quire.attend(case.q, case.cache, case.batch, replace(case.options, **{name: default}))

    return fault


def not_shared(case: BenchCase) -> torch.Tensor:
    """The second sequence reads the private pages of the first."""
    table = case.batch.page_table.clone()
    table[1] = table[0]
    return quire.attend(case.q, case.cache, quire.Batch(table, case.batch.kv_lens, case.batch.q_starts), case.options)


def without_spans(case: BenchCase) -> torch.Tensor:
    options = replace(case.options, window=case.workload.window)
    return quire.attend(case.q, case.cache, case.batch.with_spans(None), options)


def without_selection(case: BenchCase) -> torch.Tensor:
    return quire.attend(case.q, case.cache, case.batch.with_select(None), case.options)


def with_another_entry(case: BenchCase) -> torch.Tensor:
    select = case.batch.select
    assert select is not None
    entries = select.entries.clone()
    entries[0, 0, 0] = next(i for i in range(10**6) if i not in entries[0, 0].tolist())
    return quire.attend(case.q, case.cache, case.batch.with_select(quire.Select(**{select.kind: entries})), case.options)


def over(cache: quire.KVCache, **changed: Any) -> quire.KVCache:
    """A cache over the same pages, with something changed."""
    same = {
        "k_format": cache.k_format.name,
        "v_format": cache.v_format.name,
        "k_scale": cache.k_scale,
        "v_scale": cache.v_scale,
        "hadamard": cache.hadamard,
    }
    return quire.KVCache.wrap(cache.k, cache.v, layout="nhd", **{**same, **changed})


def with_scales_of_k_for_v(case: BenchCase) -> torch.Tensor:
    return quire.attend(case.q, over(case.cache, v_scale=case.cache.k_scale.clone()), case.batch, case.options)


def without_transformed_queries(case: BenchCase) -> torch.Tensor:
    return quire.attend(case.q, over(case.cache, hadamard=False), case.batch, case.options)


FAULTS = [
    ("int8/int4", with_scales_of_k_for_v),
    ("Hadamard", without_transformed_queries),
    ("softcap", options_without("softcap")),
    ("alibi", options_without("alibi")),
    ("sinks", options_without("sinks")),
    ("tree mask", options_without("mask")),
    ("every second", options_without("causal")),
    ("MLA", options_without("scale")),
    ("images", without_spans),
    ("positions selected", without_selection),
    ("columns selected", without_selection),
    ("positions selected", with_another_entry),
    ("columns selected", with_another_entry),
    ("shared", not_shared),
]


@pytest.mark.parametrize("text, fault", FAULTS, ids=[f"{text}-{fault.__name__}" for text, fault in FAULTS])
def test_a_result_without_the_feature_is_wrong(text: str, fault: Callable[[BenchCase], torch.Tensor]) -> None:
    for workload in [w for w in ATTEND if text in w.label]:
        case, reference = small_reference(workload)
        assert not reference.check(fault(case), workload.dtype).right


def test_bytes_of_two_formats() -> None:
    """A byte for each element of K, half of one for each of V, and two scales for each token and head."""
    (w,) = (w for w in FEATURES if w.v_format)
    assert w.bytes == 64 * 4096 * 8 * (128 + 64 + 2 * 4) + 64 * 32 * 2 * 128 * 2


@pytest.mark.parametrize("form", ["full", "context"])
@pytest.mark.parametrize("text", ["int8/int4", "Hadamard"])
def test_new_tokens_are_those_of_the_cache(text: str, form: str) -> None:
    """Written and attended to, or given as arguments: what another cache of the same formats makes of them."""
    case = build(replace(named(FEATURES, text), form=form, dtype="fp32"))
    tokens = case.workload.tokens
    assert case.k.shape == case.v.shape == (tokens, 2, 128)
    bound = OWN_ON_CUDA["quire"](case)
    assert bound is not None and BenchReference(case).check(bound.run(), bound.q_format).right
    slots = case.batch.slots_of_tokens(tokens, 16)
    before = [x.flatten(0, 1)[slots].clone() for x in (case.cache.k_bytes, case.cache.v_bytes)]
    quire.write(case.k, case.v, case.cache, case.batch)
    # Each token has an element of the largest code, so that its scale and its codes are found again.
    for x, want in zip((case.cache.k_bytes, case.cache.v_bytes), before):
        assert torch.equal(x.flatten(0, 1)[slots], want)


@pytest.mark.parametrize("formats", [("int8", "int4"), ("", "int4"), ("int4", "e4m3fn")])
def test_writes_in_two_formats_are_compared(formats: tuple[str, str]) -> None:
    case = build(Workload("write", ((9, 0),), operation="write", kv_heads=2, format=formats[0], v_format=formats[1]))
    bound = OWN_ON_CUDA["quire"](case)
    assert bound is not None and bound.difference is not None and bound.difference() > 0
    bound.run()
    assert bound.difference() == 0
    case.cache.v_bytes.flatten(0, 1)[case.batch.given_slots[3], 1, 5] ^= 1
    assert bound.difference() > 0


def test_values_of_a_latent_cache_are_its_first_elements() -> None:
    case = build(named(FEATURES, "MLA"))
    out = quire.attend(case.q, case.cache, case.batch, case.options)
    assert BenchReference(case).check(out, "bf16").right
    keys = case.cache.k[case.page_lists()[0].long()].flatten(0, 1)[: int(case.batch.kv_lens[0])]
    out[0] = quire.reference.attention(case.q[:1], keys, keys[..., -512:], scale=case.options.scale)[0][0]
    assert not BenchReference(case).check(out, "bf16").right


@pytest.mark.parametrize("workload", ATTEND, ids=lambda w: w.label)
def test_pairs_and_keys_match_a_loop(workload: Workload) -> None:
    """Operations and bytes of a workload against masks and page ids of its tensors."""
    w = small(workload)
    case, pairs, keys = build(w), 0, set()
    for seq, ((new, context), pages) in enumerate(zip(w.sequences, case.page_lists())):
        seen = torch.zeros(new, new + context, dtype=torch.bool)
        for i in range(new):
            for j in range(new + context):
                seen[i, j] = sees(case, seq, i, j)
        if not w.select:
            assert torch.equal(seen, visible(w, case.batch, case.options.mask, seq))
        pairs += int(seen.sum())
        used = seen.any(0).nonzero().flatten()
        keys |= {(int(pages[j // w.page_size]), int(j) % w.page_size) for j in used}
    assert w.flops == 2 * pairs * w.q_heads * (w.head_dim + w.value_dim)
    of_key = w.bytes - w.tokens * w.q_heads * (w.head_dim + w.value_dim) * 2
    each = replace(w, sequences=((1, 0),), select="", prefixes=(), window=None, image=0).bytes
    assert of_key == len(keys) * (each - w.q_heads * (w.head_dim + w.value_dim) * 2)


@pytest.mark.parametrize("window", [None, 3, 8, 20])
def test_images_are_seen_whole(window: int | None) -> None:
    """Images larger than the window, too, and one that the end of a sequence cuts."""
    w = Workload("images", ((30, 0), (9, 13)), q_heads=1, kv_heads=1, head_dim=16, window=window, image=8)
    case, found = build(w), 0
    for seq, (new, context) in enumerate(w.sequences):
        seen = visible(w, case.batch, None, seq)
        assert seen.tolist() == [[sees(case, seq, i, j) for j in range(new + context)] for i in range(new)]
        found += int(seen.sum())
    assert w.flops == 4 * found * 16


def sees(case: BenchCase, seq: int, i: int, j: int) -> bool:
    """Whether a new token of a sequence sees a key: a definition of its own."""
    w, (_, context) = case.workload, case.workload.sequences[seq]
    p, row = context + i, sum(count for count, _ in case.workload.sequences[:seq]) + i
    if w.tree:
        node = i
        while node > j - context and node:
            node = (node - 1) // 2
        return j < context or node == j - context
    if w.image:
        same = p // w.image == j // w.image and p // w.image % 2 == 0
        return same or (j <= p and (w.window is None or p - j < w.window))
    if w.part_causal and seq % 2:
        return True
    if j > p or (w.window is not None and p - j >= w.window):
        return False
    if w.select == "positions":
        return j in case.batch.select.entries[row, 0].tolist()
    return not w.select or j // w.page_size in case.batch.select.entries[seq, 0].tolist()


def test_shared_keys_have_the_same_pages() -> None:
    r = random.Random(0)
    for workload in (w for w in FEATURES if w.prefixes):
        w = small(workload)
        case = build(w)
        found = quire.Prefixes.find(case.batch, w.page_size)
        assert set(found.listed) <= set(case.batch.prefixes.listed)
        private = [pages[sum(keys for _, keys in w.prefixes) // w.page_size :] for pages in case.page_lists()]
        assert len(torch.cat(private).unique()) == sum(map(len, private))
        first, second = r.sample(range(8), 2)
        same = (case.batch.page_table[first] == case.batch.page_table[second]).cumprod(0).sum()
        assert same == sum(keys // w.page_size for size, keys in w.prefixes if first // size == second // size)
