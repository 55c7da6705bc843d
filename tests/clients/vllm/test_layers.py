"""Quire's layer inside vLLM's own classes, without an engine: every layout, cache type and feature that vLLM may ask for on a GPU,
executed here on the CPU, and compared with the exact computation of the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layers import FP8, PAGE_SIZE, Sequences, Step
from vllm.config import VllmConfig
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

from quire.conformance.oracle.budget import truth
from quire.integrations.engines import EngineError
from quire.integrations.vllm.backend import QuireBackend, QuireInPlaceOfCpuAttn
from quire.integrations.vllm.cache_view import PER_TENSOR, PER_TOKEN_HEAD, cache_view

ALL_NEW = Sequences((7, 20), (7, 20))
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 11},
    "softcap": {"logits_soft_cap": 5.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "not causal": {"causal": False},
    "causal for each sequence": {"causal": torch.tensor([True, False, False, True])},
    "not causal, window": {"causal": False, "sliding_window": 11},
    "all": {"sliding_window": 11, "logits_soft_cap": 5.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def agrees(step: Step, out: torch.Tensor) -> None:
    """The output is within the error budget of the exact result over what the cache holds."""
    right = truth(step.call())
    error = (out.double() - right.outcome.out.double()).abs()
    assert bool((error <= right.budget).all()), (
        f"largest error {float(error.max())}, over the budget at {int((error > right.budget).sum())}"
    )


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("cache_type", ("auto", *PER_TENSOR, *PER_TOKEN_HEAD))
def test_layouts_and_cache_types(layout: KVCacheLayout, cache_type: str) -> None:
    step = Step(layout, cache_type, torch.bfloat16, scales=(0.03, 0.07))
    agrees(step, step.run())


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("cache_type", ("auto", "fp8", "int8_per_token_head"))
def test_features(name: str, cache_type: str) -> None:
    step = Step(cache_type=cache_type, scales=(0.03, 0.07), **FEATURES[name])
    agrees(step, step.run())


@pytest.mark.parametrize("cache_type", ("float16", "bfloat16"))
def test_a_cache_of_another_type_than_the_model(cache_type: str) -> None:
    step = Step(cache_type=cache_type)
    agrees(step, step.run())


def stored_keys_and_values(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """`[blocks, heads, slots, dim]`: where the slots of a head follow each other, its keys in a block precede its values there."""
    pages, dim = step.pages, step.impl.head_size
    if pages.stride(2) != pages.shape[3]:
        return pages[..., :dim], pages[..., dim:]
    k, v = pages.flatten(2).split(PAGE_SIZE * dim, dim=2)
    return k.unflatten(2, (PAGE_SIZE, dim)), v.unflatten(2, (PAGE_SIZE, dim))


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
def test_the_new_tokens_are_what_was_written(layout: KVCacheLayout) -> None:
    """Independent of the kit: the slots of the new tokens hold K, V, and the scales of the layer divide them."""
    step = Step(layout, cache_type="fp8", scales=(0.03, 0.07))
    step.run()
    keys, values = stored_keys_and_values(step)
    for token, slot in enumerate(step.common.slot_mapping.tolist()):
        at = slot // PAGE_SIZE, slice(None), slot % PAGE_SIZE
        for stored, given, scale in ((keys[at], step.k[token], 0.03), (values[at], step.v[token], 0.07)):
            part = stored.view(FP8).double()
            wanted = (given.double() / torch.tensor(scale, dtype=torch.float32).double()).float().to(FP8).double()
            assert torch.equal(part, wanted)


@pytest.mark.parametrize("cache_type", ("auto", "fp8", "int8_per_token_head"))
@pytest.mark.parametrize("layout", (KVCacheLayout.LBHNC, KVCacheLayout.LHBNC, KVCacheLayout.LBNHC), ids=lambda layout: layout.name)
def test_a_block_can_be_copied(layout: KVCacheLayout, cache_type: str) -> None:
    """As vLLM does for prefixes that share a part of a block: nothing outside of a block says what is in it."""
    step = Step(layout, cache_type, scales=(0.03, 0.07))
    before = step.run()
    batch, used = step.metadata.batch, step.metadata.batch.page_table.unique()
    free = torch.tensor([page for page in range(len(step.pages)) if page not in used][: len(used)])
    step.pages[free] = step.pages[used.long()]
    step.pages.view(torch.uint8)[used.long()] = 0x7F
    batch.page_table.copy_(free[torch.searchsorted(used, batch.page_table)])
    out = torch.full_like(before, float("nan"))
    assert torch.equal(step.impl.forward(step.layer, step.q, step.k, step.v, step.pages, step.metadata, out), before)


def test_keys_and_values_of_different_sizes() -> None:
    """The places of all elements, by an index formula: block, head, K before V, slot, dim."""
    memory = torch.arange(2 * 3 * 4 * 48, dtype=torch.float32)
    pages = memory.view(2, 3, 4, 48)[:, 1:]
    cache = cache_view(pages, "auto", 32, (memory, memory), FP8)
    at = torch.arange
    start = (at(2)[:, None] * 3 + 1 + at(2))[..., None, None] * 4 * 48
    assert torch.equal(cache.k, (start + at(4)[:, None] * 32 + at(32)).float())
    assert torch.equal(cache.v, (start + 4 * 32 + at(4)[:, None] * 16 + at(16)).float())


def test_layouts_on_a_cpu() -> None:
    """There the plugin prefers a layout in which K and V of a block can be apart, and takes any; elsewhere it has no preference."""
    first, *others = get_supported_kv_cache_layouts([QuireInPlaceOfCpuAttn])
    assert first is KVCacheLayout.LBHNC and {first, *others} == set(KVCacheLayout)
    assert QuireBackend.supported_kv_cache_layouts() is None
    step = Step(first)
    k = step.impl.cache_of(step.layer, step.pages).k
    assert k.stride(2) == step.impl.head_size, "rows of keys follow each other"


IMAGES = {0: [(2, 5)], 1: [(1, 9), (11, 11), (13, 40)]}
"""Of sequences of 7 and 20 tokens: the last one is longer than the tokens so far, one has a single token."""


def mask_of(step: Step, window: int | None, lookback: int, clamps: bool) -> torch.Tensor:
    """Which new token sees which, by vLLM's definition in `compute_kv_seq_mask`; all tokens are new."""
    lens = step.common.seq_lens.tolist()
    mask = torch.zeros(sum(lens), max(lens), dtype=torch.bool)
    for seq, length in enumerate(lens):
        q, k = torch.arange(length)[:, None], torch.arange(length)
        near = torch.ones(length, length, dtype=torch.bool) if window is None else q - k < window
        seen = (k <= q) & near
        if window is not None and lookback >= 0:
            size = window // (lookback + 1)
            seen = (k <= q) & (q // size - k // size <= lookback)
        for first, last in (step.common.mm_req_doc_ranges or {}).get(seq, []):
            both = (q >= first) & (q <= last) & (k >= first) & (k <= last) & (first < last)
            seen |= both & near if clamps else both
        mask[sum(lens[:seq]) : sum(lens[: seq + 1]), :length] = seen
    return mask


@pytest.mark.parametrize("images", [IMAGES, None], ids=["images", "no images"])
@pytest.mark.parametrize(
    "window, lookback, clamps", [(None, -1, False), (4, -1, False), (4, -1, True), (6, 1, False), (5, 0, True)]
)
def test_images_and_chunks(window: int | None, lookback: int, clamps: bool, images: Any) -> None:
    how = {} if window is None else {"sliding_window": window, "chunk_lookback": lookback}
    step = Step(sequences=ALL_NEW, images=images, clamps=clamps, **how)
    out = step.run()
    call = step.call()
    call.mask, call.window = mask_of(step, window, lookback, clamps), (None, None)
    right = truth(call)
    assert bool(((out.double() - right.outcome.out.double()).abs() <= right.budget).all())


def test_an_image_in_a_later_step() -> None:
    """A prompt in two steps, divided after an image, gives what it gives in one."""
    whole = Step(sequences=Sequences((20,), (20,)), images={0: [(1, 9), (13, 40)]}, sliding_window=4)
    expected = whole.run()
    builder = QuireBackend.get_builder_cls()
    later = whole.common.replace(
        query_start_loc=torch.tensor([0, 8], dtype=torch.int32), num_actual_tokens=8, slot_mapping=whole.common.slot_mapping[12:],
        max_query_len=8,
    )  # fmt: skip
    spec = FullAttentionSpec(PAGE_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
    metadata = builder(spec, ["layer"], VllmConfig(), torch.device("cpu")).build(0, later)
    out = torch.full_like(whole.q[12:], float("nan"))
    whole.impl.forward(whole.layer, whole.q[12:], whole.k[12:], whole.v[12:], whole.pages, metadata, out)
    torch.testing.assert_close(out, expected[12:], rtol=1e-5, atol=1e-6)


def test_images_that_are_not_causal_are_refused() -> None:
    with pytest.raises(EngineError, match="causal: got a step that is not causal"):
        Step(sequences=ALL_NEW, images=IMAGES, causal=False).run()


def test_scales_of_each_head() -> None:
    step = Step(cache_type="fp8")
    step.layer._k_scale, step.layer._v_scale = torch.tensor([0.03, 0.09]), torch.tensor([0.07, 0.02])
    # The context was written with other scales; all tokens are new here.
    step = _again(step, ALL_NEW)
    agrees(step, step.run())


def _again(step: Step, sequences: Sequences) -> Step:
    other = Step(cache_type=step.cache_type, sequences=sequences)
    other.layer._k_scale, other.layer._v_scale = step.layer._k_scale, step.layer._v_scale
    return other


def test_scales_that_vllm_replaces_are_used() -> None:
    """Reloading weights may put other tensors in place of the layer's scales."""
    step = Step(cache_type="fp8", sequences=ALL_NEW)
    step.run()
    step.layer._k_scale = torch.tensor(0.5)
    agrees(step, step.run())


def test_a_cache_that_vllm_replaces_is_used() -> None:
    step = Step(sequences=ALL_NEW)
    step.run()
    step.pages = torch.full_like(step.pages, float("nan"))
    agrees(step, step.run())


def test_padding_is_neither_read_nor_written() -> None:
    step = Step()
    tokens = step.common.num_actual_tokens
    step.q = torch.cat((step.q, torch.full_like(step.q[:3], float("nan"))))
    out = step.run()
    assert bool(out[tokens:].isnan().all()) and not bool(out[:tokens].isnan().any())
    step.q = step.q[:tokens]
    agrees(step, out[:tokens])


def test_a_step_without_metadata_gives_zeros() -> None:
    step = Step()
    out = torch.full_like(step.q, float("nan"))
    assert not bool(step.impl.forward(step.layer, step.q, step.k, step.v, step.pages, None, out).any())


def test_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM's setting, a sequence has the same bits in a batch and alone, and prefilled in one chunk or two."""
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True, raising=False)
    step = Step(sequences=Sequences((300, 64), (300, 1)))
    whole = step.run()
    step.metadata.batch.q_starts[:] = torch.tensor([0, 1, 2])
    q = step.q
    step.q, step.metadata.num_actual_tokens = q[299:].contiguous(), 2
    out = torch.empty_like(step.q)
    step.impl.forward(step.layer, step.q, step.k, step.v, step.pages, step.metadata, out)
    assert torch.equal(out, whole[299:])


def test_fp8_queries_and_outputs() -> None:
    step = Step(cache_type="fp8", scales=(0.03, 0.07))
    exact = truth(step.call()) if step.run() is not None else None
    q_scale, out_scale = torch.tensor(0.02), torch.tensor([0.01])
    step.layer._q_scale.copy_(q_scale)
    given = step.q
    step.q = (given / q_scale).to(FP8)
    out = step.run(dtype=FP8, output_scale=out_scale)
    # fp8 queries have 4 significant bits, fp8 outputs too.
    assert exact is not None
    error = (out.double() * 0.01 - exact.outcome.out).abs()
    assert float(error.max()) < 2**-3 * float(exact.outcome.out.abs().max())
    assert out.dtype is FP8
