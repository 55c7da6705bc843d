"""The backend in SGLang's own classes: against float64, and against SGLang's own torch_native backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from clients.sglang.scene import Scene
from quire.errors import ArgumentError
from quire.integrations.sglang.layer import LayerOptions
from support.float64 import assert_exact

STEPS = (("EXTEND", [37, 5, 64]), ("DECODE", [1, 1, 1]), ("EXTEND", [9, 1, 30]), ("MIXED", [1, 17, 1]), ("DECODE", [1, 1, 1]))
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"sliding_window_size": 20}, {"window": (20, None)}),
    "softcap": ({"logit_cap": 2.0}, {"softcap": 2.0}),
    "window-softcap": ({"sliding_window_size": 3, "logit_cap": 5.0}, {"window": (3, None), "softcap": 5.0}),
}


def check(scene: Scene, out: torch.Tensor, q: torch.Tensor, lens: list[int], **options: Any) -> None:
    at = 0
    for i, count in enumerate(lens):
        rows = slice(at, at + count)
        assert_exact(out[rows], q[rows], scene.keys[i], scene.values[i], **options)
        at += count


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layer, options", FEATURES.values(), ids=FEATURES)
def test_prefill_decode_and_mixed(runner: Any, layer: dict[str, Any], options: dict[str, Any], page_size: int) -> None:
    """Prefill, decode, prefill after a prefix, and both mixed. SGLang's torch_native has no softcap."""
    scene = Scene(runner, page_size=page_size, **layer)
    quire, native = scene.backend(), scene.backend("torch_native")
    for mode, lens in STEPS:
        batch, q, k, v = scene.extend(lens, mode)
        out = scene.run(quire, batch, q, k, v)
        check(scene, out, q, lens, **options)
        if "logit_cap" not in layer:
            check(scene, scene.run(native, batch, q, k, v), q, lens, **options)


def test_keys_and_values_of_different_sizes(runner: Any) -> None:
    scene = Scene(runner, dims=(32, 48))
    batch, q, k, v = scene.extend([11, 3])
    check(scene, scene.run(scene.backend(), batch, q, k, v), q, [11, 3])


def test_sinks(runner: Any) -> None:
    scene = Scene(runner, page_size=16)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    for mode, lens in STEPS[:2]:
        batch, q, k, v = scene.extend(lens, mode)
        check(scene, scene.run(scene.backend(), batch, q, k, v, sinks=sinks), q, lens, sinks=sinks)


def test_lse(runner: Any) -> None:
    scene = Scene(runner)
    batch, q, k, v = scene.extend([7, 30])
    out, lse = scene.run(scene.backend(), batch, q, k, v, return_lse=True)
    for i, rows in enumerate((slice(0, 7), slice(7, 37))):
        assert_exact(out[rows], q[rows], scene.keys[i], scene.values[i], lse[rows])


@pytest.mark.parametrize("page_size", [1, 16])
def test_windows_in_a_pool_of_their_own(runner: Any, page_size: int) -> None:
    """Hybrid models: the slots of window layers are another pool's, found through SGLang's mapping."""
    scene = Scene(runner, page_size=page_size, window_pool=True, sliding_window_size=20)
    backend = scene.backend()
    for mode, lens in STEPS:
        batch, q, k, v = scene.extend(lens, mode)
        check(scene, scene.run(backend, batch, q, k, v), q, lens, window=(20, None))


SCALES = {"scales": (0.03, 0.02), "no-scales": (None, None)}


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_with_the_scales_of_the_layer(runner: Any, dtype: torch.dtype, scales: tuple[float | None, ...]) -> None:
    """Stored by SGLang's pool with the scales of the layer, read with the same: equal to float64 over what was stored."""
    scene = Scene(runner, page_size=16, dtype=dtype)
    for name, scale in zip("kv", scales):
        setattr(scene.layer, f"{name}_scale", None if scale is None else torch.tensor(scale))
        setattr(scene.layer, f"{name}_scale_float", scale)
    for mode, lens in STEPS:
        batch, q, k, v = scene.extend(lens, mode)
        out = scene.run(scene.backend(), batch, q, k, v)
        stored = [[(t / (s or 1.0)).to(dtype).float() * (s or 1.0) for t in part]
                  for part, s in zip((scene.keys, scene.values), scales)]  # fmt: skip
        at = 0
        for i, count in enumerate(lens):
            assert_exact(out[at : at + count], q[at : at + count], stored[0][i], stored[1][i])
            at += count


@pytest.mark.parametrize("kind, window", [("ENCODER_ONLY", None), ("ENCODER_ONLY", 6)])
def test_encoders_see_both_sides(runner: Any, kind: str, window: int | None) -> None:
    from sglang.srt.layers.radix_attention import AttentionType

    scene = Scene(runner, attn_type=AttentionType[kind], sliding_window_size=-1 if window is None else window)
    batch, q, k, v = scene.extend([13, 2, 40])
    out = scene.run(scene.backend(), batch, q, k, v)
    check(scene, out, q, [13, 2, 40], causal=False, window=(window, window))


def test_cross_attention(runner: Any) -> None:
    """An encoder's tokens come first in a request's row, the decoder's after them."""
    scene = Scene(runner)
    encoder = [10, 3]
    first, _, k, v = scene.extend(encoder)  # places the encoder's tokens
    keys, values = list(scene.keys), list(scene.values)
    lens = torch.tensor(encoder)
    scene.layer.is_cross_attention = True
    native = scene.backend("torch_native")
    for mode, new in (("EXTEND", [4, 6]), ("DECODE", [1, 1])):
        scene.layer.is_cross_attention = True
        batch, q, kk, vv = scene.extend(new, mode)
        decoder = batch.seq_lens - lens
        batch.seq_lens, batch.seq_lens_cpu, batch.encoder_lens, batch.encoder_lens_cpu = decoder, decoder.clone(), lens, encoder
        batch.encoder_out_cache_loc = first.out_cache_loc
        if batch.extend_prefix_lens is not None:
            batch.extend_prefix_lens = batch.extend_prefix_lens - lens
        given = (k, v) if mode == "EXTEND" else (None, None)
        out = scene.run(scene.backend(), batch, q, *given)
        at = 0
        for i, count in enumerate(new):
            assert_exact(out[at : at + count], q[at : at + count], keys[i], values[i], causal=False)
            at += count
        scene.layer.is_cross_attention = False  # the decoder's own tokens, behind the encoder's
        out = scene.run(scene.backend(), batch, q, kk, vv)
        check_from(scene, out, q, new, encoder)
        check_from(scene, scene.run(native, batch, q, kk, vv), q, new, encoder)


def check_from(scene: Scene, out: torch.Tensor, q: torch.Tensor, lens: list[int], starts: list[int]) -> None:
    at = 0
    for i, count in enumerate(lens):
        rows = slice(at, at + count)
        assert_exact(out[rows], q[rows], scene.keys[i][starts[i] :], scene.values[i][starts[i] :])
        at += count


DRAFTS = 4
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
DEPTH = torch.tensor([0, 1, 1, 2])


def verify_input(context: list[int], whole: bool, chain: bool = False) -> Any:
    """SGLang's input of a verification: the mask has the context too, or the draft tokens alone."""
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    parts = [torch.cat((torch.ones(DRAFTS, before if whole else 0, dtype=torch.bool), TREE), 1).flatten() for before in context]
    spec = NgramVerifyInput(custom_mask=torch.cat(parts), draft_token_num=DRAFTS)
    if chain:
        spec.custom_mask = None
    return spec


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("whole", [True, False])
def test_verification_of_a_tree(runner: Any, whole: bool, window: int | None, page_size: int) -> None:
    scene = Scene(runner, page_size=page_size, sliding_window_size=-1 if window is None else window)
    backend, context = scene.backend(), [33, 2, 18]
    batch, q, k, v = scene.extend(context)
    scene.run(backend, batch, q, k, v)
    batch, q, k, v = scene.extend([DRAFTS] * 3, "TARGET_VERIFY", spec_info=verify_input(context, whole))
    batch.positions = (torch.tensor(context)[:, None] + DEPTH).flatten()
    out = scene.run(backend, batch, q, k, v)
    for i in range(3):
        rows = slice(i * DRAFTS, (i + 1) * DRAFTS)
        positions = batch.positions[rows]
        options = {} if window is None else {"window": (window, None), "positions": positions}
        assert_exact(out[rows], q[rows], scene.keys[i], scene.values[i], mask=TREE, **options)


def test_verification_of_a_chain(runner: Any) -> None:
    scene = Scene(runner)
    backend, context = scene.backend(), [33, 2]
    scene.run(backend, *scene.extend(context))
    batch, q, k, v = scene.extend([DRAFTS] * 2, "TARGET_VERIFY", spec_info=verify_input(context, True, chain=True))
    check(scene, scene.run(backend, batch, q, k, v), q, [DRAFTS] * 2)


def test_padding_rows_and_tokens_that_are_not_stored(runner: Any) -> None:
    """Rows after the last sequence stay zero; with save_kv_cache=False the pool is not written."""
    scene = Scene(runner)
    backend = scene.backend()
    batch, q, k, v = scene.extend([6, 5])
    padded = torch.cat((q, torch.full((3, *q.shape[1:]), torch.nan)))
    scene.run(backend, batch, q, k, v)
    before = [t.clone() for t in scene.pool.get_kv_buffer(0)]
    out = scene.run(backend, batch, padded, k + 1, v + 1, save_kv_cache=False)
    check(scene, out[:11], q, [6, 5])
    assert not out[11:].any()
    for a, b in zip(before, scene.pool.get_kv_buffer(0)):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("window_pool", [False, True])
def test_buffers_of_a_graph(runner: Any, window_pool: bool) -> None:
    """The three methods in the order of SGLang's graph runner: metadata is made once, at capture; what the graph records is
    repeated with other requests and lengths in the same buffers; a padding sequence has the fill value as length."""
    scene = Scene(runner, page_size=16, window_pool=window_pool, sliding_window_size=20 if window_pool else -1)
    options = {"window": (20, None)} if window_pool else {}
    backend = scene.backend()
    scene.run(backend, *scene.extend([40, 7, 90]))
    backend.init_cuda_graph_state(4, 4)
    paddings = {"req_pool_indices": 0, "seq_lens": backend.get_cuda_graph_seq_len_fill_value(), "out_cache_loc": 0, "positions": 0}
    static: Any = None
    for _ in range(3):
        batch, q, k, v = scene.extend([1, 1, 1], "DECODE")
        if static is None:  # the runner's own buffers: 4 sequences, of which one is padding
            buffers = {name: torch.full((4,), padding) for name, padding in paddings.items()}
            static = dataclasses.replace(batch, batch_size=4, seq_lens_cpu=None, seq_lens_sum=None, **buffers)
            runner.kv_index_translator.bind_runner_slots(static)
            backend.init_forward_metadata_out_graph(static, in_capture=True)
            captured = backend.forward_metadata
        for name in paddings:
            getattr(static, name)[:3].copy_(getattr(batch, name))
        runner.kv_index_translator.bind_own_plan(static)
        backend.init_forward_metadata_out_graph(static)
        backend.init_forward_metadata_in_graph(static)
        assert backend.forward_metadata is captured
        rows, keys, values = (torch.cat((t, t[:1])) for t in (q, k, v))
        out = backend.forward(rows.flatten(1), keys, values, scene.layer, static)
        check(scene, out[:3].view(3, 4, -1), q, [1, 1, 1], **options)


def test_graphs_of_all_sizes_read_the_same_memory(runner: Any) -> None:
    """A graph holds addresses: what the metadata of one size reads must not be freed when another size is captured."""
    scene = Scene(runner)
    backend = scene.backend()
    scene.run(backend, *scene.extend([4, 5, 6]))
    backend.init_cuda_graph_state(3, 3)
    captured = []
    for seqs in (3, 2):
        batch, *_ = scene.extend([1] * seqs, "DECODE")
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        captured.append(backend.forward_metadata.full)
    for name in ("page_table", "kv_lens", "q_starts"):
        assert len({getattr(batch, name).data_ptr() for batch in captured}) == 1, name
    batch, *_ = scene.extend([2, 1])
    with pytest.raises(ArgumentError, match="forward_mode: given EXTEND"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)


def test_tree_masks_of_a_graph(runner: Any) -> None:
    scene = Scene(runner)
    backend, context = scene.backend(), [33, 2]
    scene.run(backend, *scene.extend(context))
    backend.init_cuda_graph_state(2, 2 * DRAFTS)
    batch, q, k, v = scene.extend([DRAFTS] * 2, "TARGET_VERIFY", spec_info=verify_input([0, 0], False))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    batch.spec_info = verify_input(context, True)
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(batch)
    out = backend.forward(q.flatten(1), k, v, scene.layer, batch).view(-1, 4, 32)
    for i in range(2):
        rows = slice(i * DRAFTS, (i + 1) * DRAFTS)
        assert_exact(out[rows], q[rows], scene.keys[i], scene.values[i], mask=TREE)
    batch.spec_info = verify_input(context, True, chain=True)
    with pytest.raises(ArgumentError, match="custom_mask"):
        backend.init_forward_metadata_out_graph(batch)


def test_unknown_features_are_refused_by_name(runner: Any) -> None:
    scene = Scene(runner)
    batch, q, k, v = scene.extend([3])
    with pytest.raises(ArgumentError, match="score_mod"):
        scene.run(scene.backend(), batch, q, k, v, score_mod=len)
    scene.run(scene.backend(), batch, q, k, v, score_mod=None)


def test_lengths_are_not_read_on_the_host(runner: Any) -> None:
    """Without host copies of the lengths: `needs_cpu_seq_lens` is False."""
    scene = Scene(runner, page_size=16)
    backend = scene.backend()
    assert not backend.needs_cpu_seq_lens
    for mode, lens in STEPS[:3]:
        batch, q, k, v = scene.extend(lens, mode, seq_lens_cpu=None, extend_seq_lens_cpu=None, extend_prefix_lens_cpu=None)
        batch.seq_lens_sum = None
        check(scene, scene.run(backend, batch, q, k, v), q, lens)


def test_deterministic_inference_is_batch_invariant(runner: Any) -> None:
    """The setting itself cannot be on here: SGLang's own batch-invariant operators need a GPU."""
    scene = Scene(runner)
    assert not scene.backend().options.batch_invariant
    assert LayerOptions(batch_invariant=True).of(scene.layer, True, None, None).batch_invariant
