"""KVCache: allocated and wrapped memory, scales, page copies, and every refusal with its message."""

import copy
import pickle

import pytest
import torch

from quire.cache.format import FORMATS
from quire.cache.kv_cache import KVCache
from quire.cache.layout import LAYOUTS
from quire.cache.pool import PagePool
from quire.errors import ArgumentError
from quire.write import write
from support import nvfp4

PAGES, PAGE_SIZE, HEADS = 5, 8, 3


@pytest.fixture
def pool():
    return PagePool(PAGES, PAGE_SIZE)


def shape(cache):
    return cache.pages, cache.page_size, cache.kv_heads, cache.head_dim, cache.v_head_dim


def pages_of(cache):
    """K and V as `[pages, page_size, heads, dim]`, bytes if one byte an element."""
    return cache.layout.k.unpack(cache.k_bytes), cache.layout.v.unpack(cache.v_bytes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", [name for name, format in FORMATS.items() if not format.latent])
def test_allocate_every_layout_in_every_format(pool, layout, format):
    found = FORMATS[format]
    x = 4 if LAYOUTS[layout].splits else None
    scale = 0.5 if found.quantised else None
    dims = (24, 16) if not found.group else (192, 64) if found.swizzled else (48, 16)
    sizes = {"kv_heads": HEADS, "head_dim": dims[0], "v_head_dim": dims[1]}
    named = {"format": format, "layout": layout, "x": x}
    named |= {"scales": "token"} if found.zero_point else {"k_scale": scale, "v_scale": scale}
    if found.group and layout not in ("nhd", "hnd"):
        with pytest.raises(ArgumentError, match=f"layout: given '{layout}'; allowed: nhd or hnd with {format}"):
            KVCache.allocate(pool, **sizes, **named)
        return
    cache = KVCache.allocate(pool, **sizes, **named)
    assert shape(cache) == (PAGES, PAGE_SIZE, HEADS, *dims)
    assert (cache.format.name, cache.layout.name, cache.device.type, cache.pool) == (format, layout, "cpu", pool)
    assert cache.scale_kind == ("token" if found.zero_point else "tensor" if found.quantised else "none")
    assert all((t == 0).all() for t in pages_of(cache)), "fresh pages are zeros"


@pytest.mark.parametrize("head_dim", [1, 24, 80, 96, 192, 256, 512])
@pytest.mark.parametrize("page_size", [1, 7, 16, 528])
def test_any_page_size_and_head_dim(page_size, head_dim):
    cache = KVCache.allocate(PagePool(2, page_size), kv_heads=1, head_dim=head_dim)
    assert shape(cache) == (2, page_size, 1, head_dim, head_dim)


@pytest.mark.parametrize(
    ("dtype", "x"), [(torch.float32, 4), (torch.bfloat16, 8), (torch.float8_e5m2, 16)], ids=["fp32", "bf16", "e5m2"]
)
def test_x_is_sixteen_bytes_by_default(pool, dtype, x):
    assert KVCache.allocate(pool, kv_heads=1, head_dim=32, dtype=dtype, layout="vllm_x").k.shape[-1] == x


def test_bytes_with_a_named_format(pool):
    cache = KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=torch.uint8, format="e4m3fnuz")
    assert (cache.k.dtype, cache.format.name) == (torch.uint8, "e4m3fnuz")
    assert repr(cache) == "KVCache(5 pages x 8 slots x 1 heads x 8, e4m3fnuz, layout=nhd, scales=tensor, cpu)"


def test_repr(pool):
    cache = KVCache.allocate(pool, kv_heads=2, head_dim=8, v_head_dim=4)
    assert repr(cache) == "KVCache(5 pages x 8 slots x 2 heads x 8/4, bf16, layout=nhd, cpu)"


def test_wrap_is_the_same_memory():
    k, v = torch.randn(PAGES, PAGE_SIZE, HEADS, 6), torch.randn(PAGES, PAGE_SIZE, HEADS, 2)
    cache = KVCache.wrap(k, v, layout="nhd")
    assert shape(cache) == (PAGES, PAGE_SIZE, HEADS, 6, 2)
    assert cache.k is k and cache.v is v and cache.pool is None and cache.ledger is None
    cache.k_view[2, 1, 0, 3, 0, 5] = 77
    cache.v_view[4, 2, 0, 7, 0, 1] = 78
    assert k[2, 3, 1, 5] == 77 and v[4, 7, 2, 1] == 78


def test_wrap_padded_pages():
    room = torch.zeros(PAGES, PAGE_SIZE + 3, HEADS, 8)
    cache = KVCache.wrap(room[:, :PAGE_SIZE], room[:, :PAGE_SIZE].clone(), layout="nhd")
    cache.k_view[1] = 1
    assert shape(cache) == (PAGES, PAGE_SIZE, HEADS, 8, 8)
    assert room[1, :PAGE_SIZE].eq(1).all() and room[1, PAGE_SIZE:].eq(0).all() and room[2].eq(0).all()


@pytest.mark.parametrize("axis", [0, 1], ids=["K-before-V", "K-beside-V"])
def test_wrap_two_views_of_one_tensor(axis):
    both = torch.zeros((2, PAGES, HEADS, PAGE_SIZE, 4) if axis == 0 else (PAGES, 2, HEADS, PAGE_SIZE, 4))
    cache = KVCache.wrap(*both.unbind(axis), layout="hnd")
    cache.k_view.fill_(1)
    cache.v_view.fill_(2)
    assert shape(cache) == (PAGES, PAGE_SIZE, HEADS, 4, 4)
    assert both.select(axis, 0).eq(1).all() and both.select(axis, 1).eq(2).all()


def test_wrap_a_joint_page():
    joint = torch.zeros(PAGES, HEADS, PAGE_SIZE, 10)
    cache = KVCache.wrap(joint, layout="vllm_joint", head_dim=6)
    assert shape(cache) == (PAGES, PAGE_SIZE, HEADS, 6, 4)
    cache.v_view[3].fill_(5)
    assert joint[3, :, :, 6:].eq(5).all() and joint.sum() == 5 * HEADS * PAGE_SIZE * 4
    assert shape(KVCache.wrap(joint, layout="vllm_joint"))[3:] == (5, 5)


def test_wrap_x_packed_pages_of_any_x():
    for x in (1, 2, 3, 6):
        k, v = torch.zeros(PAGES, HEADS, 6 // x, PAGE_SIZE, x), torch.zeros(PAGES, HEADS, 6, PAGE_SIZE)
        assert shape(KVCache.wrap(k, v, layout="vllm_x")) == (PAGES, PAGE_SIZE, HEADS, 6, 6)


@pytest.mark.parametrize("kind", ["tensor", "head", "token"])
def test_scales_are_kept_as_given(kind):
    size = {"tensor": (), "head": (HEADS,), "token": (PAGES, PAGE_SIZE, HEADS)}[kind]
    k_scale, v_scale = torch.rand(size) + 1, torch.rand(size) + 1
    pages = torch.zeros(PAGES, PAGE_SIZE, HEADS, 4, dtype=torch.float8_e4m3fn)
    cache = KVCache.wrap(pages, pages.clone(), layout="nhd", k_scale=k_scale, v_scale=v_scale)
    assert cache.k_scale is k_scale and cache.v_scale is v_scale
    assert cache.scale_kind == kind


def test_scales_by_default_and_per_token(pool):
    cache = KVCache.allocate(pool, kv_heads=2, head_dim=4, dtype=torch.float8_e5m2)
    assert (cache.k_scale.item(), cache.v_scale.item(), cache.k_scale.dtype) == (1.0, 1.0, torch.float32)
    cache = KVCache.allocate(pool, kv_heads=2, head_dim=4, dtype=torch.int8, scales="token")
    assert cache.k_scale.shape == cache.v_scale.shape == (PAGES, PAGE_SIZE, 2)
    assert cache.k_scale.data_ptr() != cache.v_scale.data_ptr()
    assert (cache.scale_kind, cache.k_scale.min().item()) == ("token", 1.0)


@pytest.mark.parametrize(
    ("given", "formats", "types"),
    [
        ({"format": "int4", "scales": "token"}, "int4", (torch.uint8, torch.uint8)),
        ({"k_format": "int8", "v_format": "int4", "scales": "token"}, "int8/int4", (torch.int8, torch.uint8)),
        ({"v_format": "e4m3fn"}, "bf16/e4m3fn", (torch.bfloat16, torch.float8_e4m3fn)),
        ({"dtype": torch.uint8, "format": "int8", "v_format": "int4", "scales": "token"}, "int8/int4", (torch.uint8, torch.uint8)),
        ({"dtype": torch.float16, "k_format": "int4", "k_scale": 0.5}, "int4/fp16", (torch.uint8, torch.float16)),
        ({"format": "nvfp4"}, "nvfp4", (torch.uint8, torch.uint8)),
        ({"k_format": "e4m3fn", "v_format": "nvfp4", "v_scale": 0.5}, "e4m3fn/nvfp4", (torch.float8_e4m3fn, torch.uint8)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_formats_of_keys_and_values(pool, given, formats, types):
    cache = KVCache.allocate(pool, kv_heads=HEADS, head_dim=32, v_head_dim=16, ledger=True, **given)
    assert shape(cache) == (PAGES, PAGE_SIZE, HEADS, 32, 16)
    assert (cache.formats, (cache.k.dtype, cache.v.dtype)) == (formats, types)
    names = cache.k_format.name, cache.v_format.name
    for part, dim, name in ((cache.k, 32, names[0]), (cache.v, 16, names[1])):
        assert part.shape[-1] == (dim * 9 // 16 if name == "nvfp4" else dim // 2 if name == "int4" else dim)
    assert [s is not None for s in (cache.k_scale, cache.v_scale)] == [FORMATS[name].quantised for name in names]
    for same in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        assert same.storage == cache.storage and same.formats == formats and (same.k.dtype, same.v.dtype) == types
    if names[0] != names[1]:
        with pytest.raises(ArgumentError, match="one format for both"):
            _ = cache.format
    wrapped = KVCache.wrap(
        cache.k, cache.v, layout="nhd", k_format=names[0], v_format=names[1], k_scale=cache.k_scale, v_scale=cache.v_scale
    )
    assert wrapped.storage == cache.storage


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_pages_of_vllm_are_wrapped(layout):
    """vLLM's page of NVFP4 has the codes of K, its group scales, those of V, and its group scales, which are permuted."""
    pool = PagePool(PAGES, PAGE_SIZE)
    middle = (2 * HEADS, PAGE_SIZE) if layout == "hnd" else (2 * PAGE_SIZE, HEADS)
    pages = torch.zeros(PAGES, *middle, 36, dtype=torch.uint8)
    k, v = pages.chunk(2, dim=1)
    scales = {"k_scale": 0.01, "v_scale": 0.02}
    formats = {"k_format": "nvfp4", "v_format": "nvfp4_swizzled"}
    cache = KVCache.wrap(k, v, layout=layout, pool=pool, **formats, **scales)
    assert shape(cache) == (PAGES, PAGE_SIZE, HEADS, 64, 64)
    own = KVCache.allocate(pool, kv_heads=HEADS, head_dim=64, layout=layout, **formats, **scales)
    x = nvfp4.edge_rows(PAGES * PAGE_SIZE, HEADS, 64)
    slots = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    for one in (cache, own):
        write(x, 2 * x, one, slots=slots)
    content = torch.empty_like(x)
    content[slots] = x
    stored = [nvfp4.encoded(content.mul(n).div(s).clamp(-2688, 2688)) for n, s in ((1, 0.01), (2, 0.02))]
    paged = [nvfp4.Grouped(*(t.unflatten(0, (PAGES, PAGE_SIZE)) for t in part)) for part in stored]
    wanted = [nvfp4.pages_of(part, layout, swizzled).flatten(1) for part, swizzled in zip(paged, (False, True))]
    assert torch.equal(pages.flatten(1), torch.cat(wanted, 1))
    assert torch.equal(own.k, k) and torch.equal(own.v, v)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", ["fp32", "e4m3fnuz", "int8", "int4"])
def test_copy_pages_copies_all_of_a_page_and_nothing_else(pool, layout, format):
    found = FORMATS[format]
    options = {"x": 4 if LAYOUTS[layout].splits else None, "scales": "token" if found.quantised else None, "ledger": True}
    cache = KVCache.allocate(pool, kv_heads=2, head_dim=8, v_head_dim=4, format=format, layout=layout, **options)
    parts = [cache.k_bytes, cache.v_bytes, *((cache.k_scale, cache.v_scale) if found.quantised else ())]
    parts += [t.view(PAGES, PAGE_SIZE) for t in (cache.ledger.position, cache.ledger.writer, cache.ledger.issue)]
    for t in parts:
        t.copy_(torch.arange(PAGES).view(-1, *[1] * (t.dim() - 1)).expand_as(t))
    cache.copy_pages([(0, 1), (1, 0), (4, 2)])
    for t in parts:
        numbers = t.flatten(1).float()
        assert numbers.amin(1).tolist() == numbers.amax(1).tolist() == [1, 0, 4, 3, 4], (
            "sources are read before targets are written"
        )


def test_copy_pages_of_nothing(pool):
    KVCache.allocate(pool, kv_heads=1, head_dim=1).copy_pages([])


def test_a_ledger_is_optional(pool):
    assert KVCache.allocate(pool, kv_heads=1, head_dim=1).ledger is None
    ledger = KVCache.allocate(pool, kv_heads=1, head_dim=1, ledger=True).ledger
    assert (ledger.pages, ledger.page_size, ledger.pool) == (PAGES, PAGE_SIZE, pool)
    pages = torch.zeros(2, 3, 1, 1)
    assert KVCache.wrap(pages, pages.clone(), layout="nhd", ledger=True).ledger.pool is None


def allocate(**changed):
    return lambda: KVCache.allocate(PagePool(PAGES, PAGE_SIZE), **{"kv_heads": HEADS, "head_dim": 16, **changed})


def zeros(*size, dtype=torch.float32):
    return torch.zeros(size, dtype=dtype)


def wrap(*pages, **changed):
    return lambda: KVCache.wrap(*pages, **{"layout": "nhd", **changed})


def fp8(**scales):
    pages = zeros(PAGES, PAGE_SIZE, HEADS, 4, dtype=torch.float8_e4m3fn)
    return wrap(pages, pages.clone(), **scales)


BYTES = "e4m3fn, e4m3fnuz, e5m2, int8, int4, int4_zp, nvfp4, nvfp4_swizzled, fp8_ds_mla"
SHAPES = "float32 of shape [] = [], [kv_heads] = [3], [pages, page_size, kv_heads] = [5, 8, 3]"

REFUSED = {
    "heads": (allocate(kv_heads=0), "kv_heads: given 0; allowed: 1 to 2147483647"),
    "dim-0": (allocate(head_dim=0), "head_dim: given 0; allowed: 1 to 512"),
    "dim-513": (allocate(head_dim=513), "head_dim: given 513; allowed: 1 to 512"),
    "dim-float": (allocate(head_dim=16.0), "head_dim: given 16.0; allowed: 1 to 512"),
    "v-dim": (allocate(v_head_dim=600), "v_head_dim: given 600; allowed: 1 to 512"),
    "layout": (allocate(layout="dhn"), "layout: given 'dhn'; allowed: nhd, hnd, vllm_x, vllm_joint, aiter"),
    "x-unused": (allocate(x=8), "x: given 8; allowed: None: layout 'nhd' splits no axis"),
    "x-dim": (allocate(layout="vllm_x", x=3), "x: given 3; allowed: a divisor of dim = 16"),
    "x-slot": (allocate(layout="aiter", x=16), "x: given 16; allowed: a divisor of slot = 8"),
    "x-zero": (allocate(layout="vllm_x", x=0), "x: given 0; allowed: a divisor of dim = 16"),
    "bytes": (
        allocate(dtype=torch.uint8),
        f"format: given uint8 storage without a format; allowed: format= one of {BYTES}",
    ),
    "scales-name": (allocate(scales="head"), "scales: given 'head'; allowed: 'token', or None for the scales given"),
    "scales-plain": (
        allocate(scales="token"),
        "scales: given 'token' with format bf16, k_scale None and v_scale None; "
        "allowed: 'token' for a quantised format, without other scales",
    ),
    "scales-two-kinds": (
        allocate(scales="token", dtype=torch.int8, k_scale=2.0),
        "scales: given 'token' with format int8, k_scale 2.0 and v_scale None; "
        "allowed: 'token' for a quantised format, without other scales",
    ),
    "int8-without-scale": (
        allocate(dtype=torch.int8),
        "k_scale: given nothing (None); allowed: a scale: int8 stores integers, 127 in magnitude at most",
    ),
    "int4-without-scale": (
        allocate(format="int4"),
        "k_scale: given nothing (None); allowed: a scale: int4 stores integers, 7 in magnitude at most",
    ),
    "int4-of-odd-dim": (
        allocate(head_dim=16, v_head_dim=15, v_format="int4", scales="token"),
        "v_head_dim: given 15; allowed: a multiple of 2 with int4",
    ),
    "nvfp4-dim": (allocate(head_dim=40, format="nvfp4"), "head_dim: given 40; allowed: a multiple of 16 with nvfp4"),
    "nvfp4-swizzled-dim": (
        allocate(v_head_dim=32, v_format="nvfp4_swizzled"),
        "v_head_dim: given 32; allowed: a multiple of 64 with nvfp4_swizzled",
    ),
    "nvfp4-swizzled-pages": (
        wrap(*(zeros(2, 6, 1, 36, dtype=torch.uint8) for _ in "kv"), format="nvfp4_swizzled"),
        "k_pages: given pages of 6 slots; allowed: a multiple of 4 slots with nvfp4_swizzled",
    ),
    "nvfp4-bytes": (
        wrap(*(zeros(2, 6, 1, 32, dtype=torch.uint8) for _ in "kv"), format="nvfp4"),
        "k_pages: given 32 bytes of a head in nvfp4; allowed: 9 for each 16 dims, with their scales",
    ),
    "nvfp4-gaps": (
        wrap(*(zeros(2, 6, 3, 36, dtype=torch.uint8)[:, :, :2] for _ in "kv"), format="nvfp4"),
        "k_pages: given strides 108 of slots, 36 of heads and 1 of bytes; allowed: 72, 36 and 1: a page of nvfp4 in layout 'nhd' "
        "has no gaps inside",
    ),
    "nvfp4-order": (
        wrap(*(zeros(2, 3, 6, 36, dtype=torch.uint8).transpose(1, 2) for _ in "kv"), format="nvfp4"),
        "k_pages: given strides 36 of slots, 216 of heads and 1 of bytes; allowed: 108, 36 and 1: a page of nvfp4 in layout 'nhd' "
        "has no gaps inside",
    ),
    "int4-x": (allocate(layout="vllm_x", format="int4", scales="token"), "x: given 16; allowed: a divisor of dim = 8"),
    "k-format": (
        allocate(k_format="int3"),
        f"k_format: given 'int3'; allowed: fp32, fp16, bf16, {BYTES}",
    ),
    "formats-and-dtype": (
        allocate(k_format="int8", v_format="int4", dtype=torch.int8),
        "dtype: given torch.int8; allowed: None: k_format and v_format say how both are stored",
    ),
    "formats-in-one-tensor": (
        allocate(layout="vllm_joint", k_format="int8", v_format="int4", scales="token"),
        "v_format: given 'int4', with 'int8' for K; allowed: the format of K: layout 'vllm_joint' has K and V in one tensor",
    ),
    "format-of-storage": (
        wrap(zeros(1, 1, 1, 2), zeros(1, 1, 1, 2), v_format="int4", v_scale=1.0),
        "v_format: given 'int4' over torch.float32 storage; allowed: torch.uint8 storage",
    ),
    "scale-of-plain": (allocate(k_scale=1.0), "k_scale: given 1.0; allowed: None: format bf16 is not quantised"),
    "scale-zero": (fp8(k_scale=0.0), "k_scale: given 0.0; allowed: a finite number above 0"),
    "scale-nan": (fp8(v_scale=float("nan")), "v_scale: given nan; allowed: a finite number above 0"),
    "scale-negative": (fp8(v_scale=-1), "v_scale: given -1; allowed: a finite number above 0"),
    "scale-inf": (fp8(k_scale=float("inf")), "k_scale: given inf; allowed: a finite number above 0"),
    "scale-text": (fp8(k_scale="1"), "k_scale: given '1'; allowed: a finite number above 0"),
    "scale-shape": (fp8(k_scale=torch.ones(4)), f"k_scale: given float32[4] on cpu; allowed: {SHAPES}"),
    "scale-dtype": (fp8(v_scale=torch.ones(3).half()), f"v_scale: given float16[3] on cpu; allowed: {SHAPES}"),
    "scale-device": (
        fp8(k_scale=torch.ones(3, device="meta")),
        "k_scale: given float32[3] on meta; allowed: on cpu, as the pages are",
    ),
    "scale-half-token": (
        fp8(k_scale=torch.ones(PAGES, PAGE_SIZE, HEADS)),
        "v_scale: given float32[] on cpu; allowed: one per token and head, as k_scale float32[5, 8, 3] on cpu, or neither",
    ),
    "not-a-tensor": (wrap([1], zeros(1, 1, 1, 1)), "k_pages: given [1]; allowed: a dense tensor of pages"),
    "v-not-a-tensor": (wrap(zeros(1, 1, 1, 1), 3), "v_pages: given 3; allowed: a dense tensor of pages"),
    "one-tensor": (
        wrap(zeros(1, 1, 1, 2)),
        "v_pages: given nothing (None); allowed: a tensor: layout 'nhd' stores K and V in two tensors",
    ),
    "two-tensors": (
        wrap(zeros(1, 1, 1, 2), zeros(1, 1, 1, 2), layout="vllm_joint"),
        "v_pages: given a tensor; allowed: None: layout 'vllm_joint' stores K and V in one tensor",
    ),
    "axes": (
        wrap(zeros(1, 1, 2), zeros(1, 1, 2)),
        "pages: given float32[1, 1, 2] on cpu; allowed: 4 axes: [page, slot, head, dim]",
    ),
    "two-types": (
        wrap(zeros(1, 1, 1, 1), zeros(1, 1, 1, 1).half()),
        "v_pages: given float16[1, 1, 1, 1] on cpu; allowed: the type of k_pages, float32[1, 1, 1, 1] on cpu; "
        "or name k_format and v_format",
    ),
    "two-sizes": (
        wrap(zeros(2, 4, 1, 1), zeros(2, 5, 1, 1)),
        "v_pages: given pages 2, page_size 5, kv_heads 1; "
        "allowed: those of k_pages: pages 2, page_size 4, kv_heads 1 in layout 'nhd'",
    ),
    "too-wide": (wrap(zeros(1, 1, 1, 513), zeros(1, 1, 1, 1)), "head_dim: given 513; allowed: 1 to 512"),
    "no-dim": (wrap(zeros(1, 1, 1, 1), zeros(1, 1, 1, 0)), "v_head_dim: given 0; allowed: 1 to 512"),
    "other-dim": (
        wrap(zeros(1, 1, 1, 4), zeros(1, 1, 1, 4), head_dim=8),
        "head_dim: given 8; allowed: 4, the head_dim of k_pages [1, 1, 1, 4] in layout 'nhd'",
    ),
    "no-slots": (
        wrap(zeros(1, 0, 1, 4), zeros(1, 0, 1, 4)),
        "k_pages: given float32[1, 0, 1, 4] on cpu; allowed: page_size and kv_heads of 1 or more",
    ),
    "other-pool": (
        wrap(zeros(2, 4, 1, 1), zeros(2, 4, 1, 1), pool=PagePool(2, 8)),
        "pool: given 2 pages of 8; allowed: 2 pages of 4, the size of k_pages",
    ),
    "copy-outside": (
        lambda: allocate()().copy_pages([(0, 1), (0, 5)]),
        "copies: given (0, 5); allowed: (source, target) page ids in [0, 5)",
    ),
    "copy-negative": (
        lambda: allocate()().copy_pages([(-1, 1)]),
        "copies: given (-1, 1); allowed: (source, target) page ids in [0, 5)",
    ),
    "copy-twice": (
        lambda: allocate()().copy_pages([(0, 1), (2, 1)]),
        "copies: given ((0, 1), (2, 1)); allowed: each target once",
    ),
}


@pytest.mark.parametrize(("act", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(act, message):
    with pytest.raises(ArgumentError) as caught:
        act()
    assert str(caught.value) == message


def test_expanded_memory_is_refused():
    with pytest.raises(ArgumentError, match=r"^v_pages: given strides \(0, .*; allowed: memory in which no two elements overlap"):
        wrap(zeros(3, 4, 1, 2), zeros(1, 4, 1, 2).expand(3, 4, 1, 2))()


def test_a_shallow_copy_has_the_same_pages() -> None:
    cache = KVCache.allocate(PagePool(4, 8), kv_heads=1, head_dim=8, ledger=True)
    same = copy.copy(cache)
    assert same.k is cache.k and same.v is cache.v and same.ledger is cache.ledger and same.pool is cache.pool
