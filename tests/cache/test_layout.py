"""Layouts: every element where the layout's own formula says, `pack` and `unpack` inverse, views that share memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cache.layout import LAYOUTS, Layout, Order, layout_named
from quire.errors import ArgumentError

PAGE_SIZES = (1, 7, 16, 32, 528, 544, 784)
HEAD_DIMS = (1, 3, 24, 64, 80, 96, 128, 192, 256, 512)

# Where the element (page p, slot s, head h, dim d) of K and of V lies, written down once more by hand.
WHERE = {
    "nhd": (lambda p, s, h, d, x: (p, s, h, d), lambda p, s, h, d, x: (p, s, h, d)),
    "hnd": (lambda p, s, h, d, x: (p, h, s, d), lambda p, s, h, d, x: (p, h, s, d)),
    "vllm_x": (lambda p, s, h, d, x: (p, h, d // x, s, d % x), lambda p, s, h, d, x: (p, h, d, s)),
    "vllm_joint": (lambda p, s, h, d, x: (p, h, s, d), lambda p, s, h, d, x: (p, h, s, d)),
    "aiter": (lambda p, s, h, d, x: (p, h, d // x, s, d % x), lambda p, s, h, d, x: (p, h, s // x, d, s % x)),
}


def divisors(*numbers):
    return [x for x in range(1, min(numbers) + 1) if not any(n % x for n in numbers)]


@st.composite
def pages(draw):
    """A layout, an x it can be packed with, and K and V `[pages, page_size, heads, dim]` of distinct numbers."""
    layout = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]
    page_size = draw(st.sampled_from(PAGE_SIZES) | st.integers(1, 40))
    dims = st.sampled_from(HEAD_DIMS) | st.integers(1, 512)
    k_dim, v_dim = draw(dims), draw(dims)
    split = {"dim": (k_dim, v_dim), "slot": (page_size, page_size), None: (0, 0)}
    sizes = [split[order.split][i] for i, order in enumerate((layout.k, layout.v)) if order.split]
    x = draw(st.sampled_from(divisors(*sizes))) if sizes else 1
    count, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    k = torch.arange(count * page_size * heads * k_dim).view(count, page_size, heads, k_dim)
    v = -1 - torch.arange(count * page_size * heads * v_dim).view(count, page_size, heads, v_dim)
    return layout, x, k, v


@given(pages())
def test_unpack_is_the_inverse_of_pack(example):
    layout, x, k, v = example
    storage = layout.pack(k, v, x)
    assert len(storage) == (1 if layout.joint else 2)
    assert all(t.is_contiguous() for t in storage)
    got_k, got_v = layout.unpack(*storage, head_dim=k.shape[-1])
    assert torch.equal(got_k, k) and torch.equal(got_v, v)
    assert got_k.is_contiguous() and got_v.is_contiguous()


@given(pages(), st.randoms(use_true_random=False))
def test_every_element_lies_where_the_formula_says(example, random):
    layout, x, k, v = example
    parts = layout.parts(*layout.pack(k, v, x), head_dim=k.shape[-1])
    for part, pages, where in zip(parts, (k, v), WHERE[layout.name]):
        for _ in range(20):
            at = [random.randrange(n) for n in pages.shape]
            assert part[where(*at, x)] == pages[tuple(at)]


@given(pages())
def test_a_view_is_the_same_memory_in_one_order(example):
    layout, x, k, v = example
    parts = layout.parts(*layout.pack(k, v, x), head_dim=k.shape[-1])
    for part, order, pages in zip(parts, (layout.k, layout.v), (k, v)):
        view = order.view(part)
        assert view.data_ptr() == part.data_ptr()
        count, heads, slot_hi, slot_lo, dim_hi, dim_lo = view.shape
        assert (count, slot_hi * slot_lo, heads, dim_hi * dim_lo) == tuple(pages.shape)
        assert torch.equal(view.reshape(count, heads, *pages.shape[1::2]).transpose(1, 2), pages)
        view[-1, -1, -1, -1, -1, -1] = 7_000_000
        assert order.unpack(part)[-1, -1, -1, -1] == 7_000_000


def test_every_layout_has_a_formula_here():
    assert set(WHERE) == set(LAYOUTS)
    assert all(str(layout) == name for name, layout in LAYOUTS.items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_strided_storage_is_viewed_without_a_copy(name):
    layout = LAYOUTS[name]
    k, v = torch.randn(3, 8, 2, 16), torch.randn(3, 8, 2, 16)
    padded = []
    for part in layout.pack(k, v, 4 if layout.splits else 1):
        room = torch.zeros(part.shape[0], part.shape[1] + 3, *part.shape[2:])
        room[:, : part.shape[1]] = part
        padded.append(room[:, : part.shape[1]])
    assert not any(part.is_contiguous() for part in padded)
    got = layout.unpack(*padded)
    assert torch.equal(got[0], k) and torch.equal(got[1], v)


@settings(max_examples=30)
@given(st.integers(1, 512), st.integers(1, 512))
def test_a_joint_page_is_cut_at_head_dim(k_dim, v_dim):
    layout = LAYOUTS["vllm_joint"]
    joint = torch.randn(2, 1, 3, k_dim + v_dim)
    k, v = layout.parts(joint, head_dim=k_dim)
    assert (k.shape[-1], v.shape[-1]) == (k_dim, v_dim)
    assert k.data_ptr() == joint.data_ptr() and v.data_ptr() == joint.data_ptr() + 4 * k_dim
    if k_dim == v_dim:
        assert torch.equal(layout.parts(joint)[1], v)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: layout_named("dhn"), "layout: given 'dhn'; allowed: nhd, hnd, vllm_x, vllm_joint, aiter"),
        (lambda: Order("page head dim/ slot dim%").shape(1, 16, 1, 24, 16), "x: given 16; allowed: a divisor of dim = 24"),
        (lambda: Order("page head slot/ dim slot%").shape(1, 7, 1, 8, 2), "x: given 2; allowed: a divisor of slot = 7"),
        (lambda: Order("page head dim/ slot dim%").shape(1, 7, 1, 8, 0), "x: given 0; allowed: a divisor of dim = 8"),
        (
            lambda: Order("page slot head dim").view(torch.zeros(2, 3)),
            "pages: given float32[2, 3] on cpu; allowed: 4 axes: [page, slot, head, dim]",
        ),
        (
            lambda: LAYOUTS["nhd"].parts(torch.zeros(1, 1, 1, 2)),
            "v_pages: given nothing (None); allowed: a tensor: layout 'nhd' stores K and V in two tensors",
        ),
        (
            lambda: LAYOUTS["vllm_joint"].parts(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)),
            "v_pages: given a tensor; allowed: None: layout 'vllm_joint' stores K and V in one tensor",
        ),
        (
            lambda: LAYOUTS["vllm_joint"].parts(torch.zeros(1, 2)),
            "k_pages: given float32[1, 2] on cpu; allowed: 4 axes: [page, head, slot, dim]",
        ),
        (
            lambda: LAYOUTS["vllm_joint"].parts(torch.zeros(1, 1, 1, 5)),
            "head_dim: given nothing (None); allowed: 1 to 4: a joint page of 5 elements cannot be halved",
        ),
        (
            lambda: LAYOUTS["vllm_joint"].parts(torch.zeros(1, 1, 1, 6), head_dim=6),
            "head_dim: given 6; allowed: 1 to 5: K before V in a joint page of 6",
        ),
        (
            lambda: LAYOUTS["vllm_joint"].parts(torch.zeros(1, 1, 1, 6), head_dim=0),
            "head_dim: given 0; allowed: 1 to 5: K before V in a joint page of 6",
        ),
    ],
    ids=["name", "x-dim", "x-slot", "x-zero", "axes", "one-tensor", "two-tensors", "joint-axes", "odd", "no-V", "no-K"],
)
def test_what_is_refused(act, message):
    with pytest.raises(ArgumentError) as caught:
        act()
    assert str(caught.value) == message


def test_layouts_are_values():
    same = Layout("nhd", Order("page slot head dim"), Order("page slot head dim"))
    assert same == LAYOUTS["nhd"] and hash(same) == hash(LAYOUTS["nhd"])
