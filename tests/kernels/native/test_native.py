"""What is the native kernels' own: arithmetic to the bit, work cut over threads, and how their library is found and loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import quire
from quire.cache.format import FORMATS
from quire.errors import KernelError
from quire.kernels.native import attend, library, write
from quire.platform import cpu_flags
from support import nvfp4
from support.kernels import NO_LIBRARY, levels
from support.scenario import LARGEST, TYPES, build

pytestmark = pytest.mark.skipif(not library.FILE.exists(), reason=NO_LIBRARY)
BYTES = [name for name, format in FORMATS.items() if format.itemsize == 1 and format.uniform]


@pytest.fixture(params=levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with library.forced(request.param):
        yield request.param


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def one_token(k: torch.Tensor, v: torch.Tensor, format: str, scale: float) -> quire.KVCache:
    """A cache of one token and one head."""
    shape = (1, 1, 1, -1)
    return quire.KVCache.wrap(k.view(shape), v.view(shape), layout="nhd", format=format, k_scale=scale, v_scale=scale)


ONE = quire.Batch(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1]), torch.tensor([0, 1]))


@pytest.mark.parametrize("out_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 5, 40])
@pytest.mark.parametrize("format", BYTES)
def test_every_code_of_a_format(format: str, group: int, out_type: torch.dtype, level: str) -> None:
    """Over one key, attention gives its value: all 256 codes come back as the numbers that torch takes them for. NaN among the
    values does not reach other elements; the key is zero."""
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(TYPES[format]).float() * 0.5
    zeros = torch.zeros(256).to(TYPES[format])
    out = torch.full((1, group, 256), 7.0).to(out_type)
    q = torch.randn(1, group, 256).to(torch.bfloat16)
    attend.launch(q, one_token(zeros, codes.view(TYPES[format]), format, 0.5), ONE, quire.Options(), None, out, None)
    for head in range(group):
        assert torch.equal(out[0, head].float().nan_to_num(1e9, 2e9, -2e9), want.nan_to_num(1e9, 2e9, -2e9)), f"head {head}"


@pytest.mark.parametrize("group", [1, 5, 40])
@pytest.mark.parametrize("format", BYTES)
def test_every_code_as_a_key(format: str, group: int, level: str) -> None:
    """The LSE of one key is its logit: a query that is 1 in one place reads that code's number out of the key."""
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(TYPES[format]).float() * 0.5
    finite = want.isfinite()
    codes[~finite], want[~finite] = 0, 0.0
    one = torch.ones(256).to(TYPES[format])
    lse = torch.empty(1, group)
    for d in (*range(0, 256, 5), 127, 128, 129):
        q = torch.zeros(1, group, 256, dtype=torch.bfloat16)
        q[..., d] = 1
        out = torch.empty(1, group, 256, dtype=torch.bfloat16)
        attend.launch(q, one_token(codes.view(TYPES[format]), one, format, 0.5), ONE, quire.Options(scale=1.0), None, out, lse)
        assert torch.allclose(lse, want[d].expand_as(lse), rtol=2e-7, atol=0), f"code {d}"


@pytest.mark.parametrize("group", [1, 5, 40])
@pytest.mark.parametrize("dim", [16, 62, 128, 512])
def test_every_code_of_4_bits(dim: int, group: int, level: str) -> None:
    """As above, for all pairs of codes of a byte; and a query that is 1 in one place reads the code there."""
    stored = (torch.arange(dim // 2) * 37 % 256).to(torch.uint8)
    codes = torch.stack((stored % 16, stored // 16), -1).flatten().float()
    want = torch.where(codes < 8, codes, codes - 16) * 0.5
    zeros = torch.zeros(dim // 2, dtype=torch.uint8)
    for out_type in (torch.float32, torch.bfloat16):
        out, q = torch.full((1, group, dim), 7.0).to(out_type), torch.randn(1, group, dim).to(torch.bfloat16)
        attend.launch(q, one_token(zeros, stored, "int4", 0.5), ONE, quire.Options(), None, out, None)
        assert torch.equal(out.float(), want.expand_as(out))
    for d in (*range(0, dim, 7), dim - 2, dim - 1):
        q, lse = torch.zeros(1, group, dim, dtype=torch.bfloat16), torch.empty(1, group)
        q[..., d] = 1
        out = torch.empty(1, group, dim, dtype=torch.bfloat16)
        attend.launch(q, one_token(stored, zeros, "int4", 0.5), ONE, quire.Options(scale=1.0), None, out, lse)
        assert torch.allclose(lse, want[d].expand_as(lse), rtol=2e-7, atol=0), f"element {d}"


@pytest.mark.parametrize("group", [1, 5, 40])
@pytest.mark.parametrize("dim", [16, 48, 112, 512])
def test_every_code_and_every_scale_of_a_group(dim: int, group: int, level: str) -> None:
    """As above, for NVFP4: all 256 scales, NaN and negative ones too, with all codes between them."""
    size = torch.tensor(nvfp4.MAGNITUDES)
    zeros = torch.zeros(dim * 9 // 16, dtype=torch.uint8)
    for first in range(0, 256, dim // 16):
        scales = ((torch.arange(dim // 16) + first) % 256).to(torch.uint8)
        codes = ((torch.arange(dim) * 7 + first // 3) % 16).to(torch.uint8)
        row = torch.cat((codes[::2] + 16 * codes[1::2], scales))
        value = torch.where(codes < 8, size[(codes % 8).long()], -size[(codes % 8).long()])
        want = value * scales.view(torch.float8_e4m3fn).float().repeat_interleave(16) * 0.5
        for out in (torch.full((1, group, dim), 7.0), torch.full((1, group, dim), 7.0).bfloat16()):
            q = torch.randn(1, group, dim).bfloat16()
            attend.launch(q, one_token(zeros, row, "nvfp4", 0.5), ONE, quire.Options(), None, out, None)
            assert torch.equal(out.float().nan_to_num(nan=1e9), want.nan_to_num(nan=1e9).expand_as(out))
        if not want.isnan().any():
            q, lse = torch.zeros(1, group, dim).bfloat16(), torch.empty(1, group)
            q[..., first * 5 % dim] = 1
            attend.launch(q, one_token(row, zeros, "nvfp4", 0.5), ONE, quire.Options(scale=1.0), None, out, lse)
            assert torch.allclose(lse, want[first * 5 % dim].expand_as(lse), rtol=2e-7, atol=0)


@pytest.mark.parametrize("group", [1, 5, 40])
@pytest.mark.parametrize("dim", [16, 62, 128, 512])
def test_every_code_with_a_zero_point(dim: int, group: int, level: str) -> None:
    """As above, less the zero points in the scales of K and of V, which differ."""
    stored = (torch.arange(dim // 2) * 37 % 256).to(torch.uint8)
    codes = torch.stack((stored % 16, stored // 16), -1).flatten().float()
    for zero in (0, 7, 15):
        want = (codes - zero) * 0.5
        scales = [torch.tensor([0x3F000000 + z], dtype=torch.int32).view(torch.float32).view(1, 1, 1) for z in (zero, 15 - zero)]
        zeros, shape = torch.full_like(stored, (15 - zero) * 17), (1, 1, 1, -1)
        named = {"layout": "nhd", "format": "int4_zp"}
        cache = quire.KVCache.wrap(zeros.view(shape), stored.view(shape), **named, k_scale=scales[1], v_scale=scales[0])
        for out_type in (torch.float32, torch.bfloat16):
            out, q = torch.full((1, group, dim), 7.0).to(out_type), torch.randn(1, group, dim).to(torch.bfloat16)
            lse = torch.empty(1, group)
            attend.launch(q, cache, ONE, quire.Options(), None, out, lse)
            assert torch.equal(out.float(), want.expand_as(out)) and not lse.any()
        cache = quire.KVCache.wrap(stored.view(shape), zeros.view(shape), **named, k_scale=scales[0], v_scale=scales[1])
        for d in (0, dim // 2, dim - 1):
            q, lse = torch.zeros(1, group, dim, dtype=torch.bfloat16), torch.empty(1, group)
            q[..., d] = 1
            attend.launch(q, cache, ONE, quire.Options(scale=1.0), None, torch.empty(1, group, dim, dtype=torch.bfloat16), lse)
            assert torch.allclose(lse, want[d].expand_as(lse), rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    "format", [name for name in TYPES if name not in ("fp32", "int4", "int4_zp") and not name.startswith("nvfp4")]
)
def test_numbers_are_rounded_to_the_nearest(format: str, level: str) -> None:
    """As torch does it: around every code and half-way between codes, and far outside."""
    if TYPES[format].itemsize == 1:
        codes = torch.arange(256, dtype=torch.uint8).view(TYPES[format]).float()
        near = codes[codes.isfinite()].unique()
        near = torch.cat((near, (near[1:] + near[:-1]) / 2))
        x = torch.cat((near, near.nextafter(torch.tensor(1e9)), near.nextafter(torch.tensor(-1e9)), torch.tensor([1e30, -1e30])))
    else:
        g = torch.Generator().manual_seed(0)
        x = torch.randn(4000, generator=g) * torch.exp2(torch.randint(-30, 18, (4000,), generator=g))
        rounded = x.to(TYPES[format]).float()
        x = torch.cat((x, rounded, torch.nextafter(rounded, rounded * 1.1), torch.tensor([0.0, -0.0])))
    x = torch.cat((x, x.new_zeros(-len(x) % 512))).view(-1, 1, 512)
    shape = (len(x), 1, 1, 512)
    scale = 1.0 if format in LARGEST else None
    cache = quire.KVCache.wrap(
        torch.zeros(shape).to(TYPES[format]),
        torch.zeros(shape).to(TYPES[format]),
        layout="nhd",
        format=format,
        k_scale=scale,
        v_scale=scale,
    )
    batch = quire.Batch(torch.arange(len(x)).view(1, -1), torch.tensor([len(x)]), torch.tensor([0, len(x)]))
    write.launch(x, -x, cache, batch, None)
    for stored, given in ((cache.k, x), (cache.v, -x)):
        assert torch.equal(stored.view(-1).view(torch.uint8), cache.format.encode(given).view(-1).view(torch.uint8))


LONG: dict[str, dict[str, Any]] = {
    "one-long-decode": {"q_lens": [1], "kv_lens": [5000]},
    "ragged-decodes": {"q_lens": [1, 1, 2, 1], "kv_lens": [3000, 17, 900, 1]},
    "few-rows-over-much": {"q_lens": [20], "kv_lens": [4000], "kv_heads": 1},
    "prompt-beside-decodes": {"q_lens": [300, 1, 1, 17], "kv_lens": [600, 2000, 40, 17]},
    "window": {"q_lens": [200, 1], "kv_lens": [1500, 3000], "window": 700, "sinks": True},
    "context-form": {"q_lens": [150, 1, 3], "kv_lens": [700, 2500, 900], "form": "context", "alibi": True},
}


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("format", ["fp32", "bf16", "e4m3fn", "int8", "int4", "nvfp4"])
@pytest.mark.parametrize("name", LONG)
def test_units_are_split_and_combined(name: str, format: str) -> None:
    """More keys than a thread's share, several tiles, several strips of rows: the same result, and the same bits each time."""
    s = build(3, **{"head_dim": 64, "q_dtype": "fp32" if format == "fp32" else "bf16", "format": format, **LONG[name]})
    factors = torch.float32 if format == "fp32" else torch.bfloat16
    for level in levels():
        with library.forced(level):
            runs = [quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, lse=True, kernel="native") for _ in range(2)]
        s.check(*runs[0], factors=factors)
        assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("threads", [1, 3])
def test_invariant_bits_in_16_bit_factors(threads: int, level: str, three_threads: None) -> None:
    """A prompt in one piece and token by token, with as many threads as there are: the same bits."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    options = quire.Options(batch_invariant=True, window=(200, 0), sinks=torch.randn(6))
    q, k, v = torch.randn(300, 6, 40).bfloat16(), torch.randn(300, 2, 40).bfloat16(), torch.randn(300, 2, 40).bfloat16()

    def run(cuts: list[int]) -> torch.Tensor:
        pool = quire.PagePool(40, 16)
        cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=40, dtype=torch.bfloat16)
        me, outs, at = pool.sequence(), [], 0
        for n in cuts:
            outs.append(quire.step(*(x[at : at + n] for x in (q, k, v)), cache, pool.step({me: n}), options, kernel="native"))
            at += n
        return torch.cat(outs)

    assert torch.equal(run([300]), run([7, 150, 1, 1, 1, 140]))


def test_a_page_that_does_not_exist_is_not_read(level: str) -> None:
    """The contract was checked before; if a table changes after that, its row becomes NaN and others stay right."""
    s = build(5, [1, 40, 2], [50, 60, 70])
    good = torch.empty_like(s.q)
    attend.launch(s.q, s.cache, s.batch, s.options, None, good, None)
    for row, id in ((0, -5), (1, 10**6), (2, s.cache.pages)):
        table = s.batch.page_table.clone()
        table[row, 1] = id
        batch = quire.Batch(table, s.batch.kv_lens, s.batch.q_starts)
        out = torch.zeros_like(s.q)
        attend.launch(s.q, s.cache, batch, s.options, None, out, None)
        rows = torch.zeros(len(out), dtype=torch.bool)
        rows[int(batch.q_starts[row]) : int(batch.q_starts[row + 1])] = True
        assert out[rows].isnan().all() and torch.equal(out[~rows], good[~rows])


@pytest.mark.parametrize("form", ["full", "context"])
def test_a_token_that_a_tree_hides_from_all_is_not_read(form: str, level: str) -> None:
    """Its slot holds NaN, in a page that others are read from."""
    mask = torch.ones(24, 20, dtype=torch.bool).tril()
    mask[:, 2] = False
    mask[:, 11] = False
    s = build(8, [4, 20], [30, 60], mask=mask, form=form)
    out, lse = torch.empty_like(s.q), torch.empty(s.q.shape[:2])
    attend.launch(s.q, s.cache, s.batch, s.options, s.new, out, lse)
    s.check(out, lse)


def test_only_some_sequences() -> None:
    """Sequences of other lengths than `only` says keep the output that they had. New tokens may come from either place."""
    s = build(6, [1, 9, 3], [30, 40, 50], form="context", context_from=2)
    out = torch.full_like(s.q, 7.0)
    attend.launch(s.q, s.cache, s.batch, s.options, s.new, out, None, context_from=2, only=(2, 5))
    assert (out[:10] == 7).all()
    attend.launch(s.q, s.cache, s.batch, s.options, s.new, out, None, context_from=2, only=(0, 1))
    attend.launch(s.q, s.cache, s.batch, s.options, s.new, out, None, context_from=2, only=(6, 10**6))
    s.check(out)


def test_the_best_instruction_set_runs() -> None:
    found, flags = library.library(), cpu_flags()
    assert found.level == max(found.levels.values())
    for flag, name in (("avx2", "avx2"), ("avx512bw", "avx512"), ("avx512_bf16", "avx512-bf16"), ("asimd", "neon")):
        assert (name in found.levels) == (flag in flags), name


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library.SIZES, "check", 8)
    with pytest.raises(KernelError, match="built from other sources: rebuild them"):
        library.Library(library.FILE)


def test_a_library_that_does_not_load_is_named(tmp_path: Path) -> None:
    (tmp_path / "libquire.so").write_bytes(b"nothing")
    with pytest.raises(KernelError, match="the native kernels do not load: "):
        library.Library(tmp_path / "libquire.so")


def test_no_second_openmp_runtime() -> None:
    """Before and after a call on several threads, the same runtimes are mapped: torch's."""
    code = """
import re, torch, quire
mapped = lambda: set(re.findall(r"\\S*lib[gi]?omp[^/\\s]*", open("/proc/self/maps").read()))
torch.ones(10**6).sum()
before = mapped()
pool = quire.PagePool(600, 16)
cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64)
torch.set_num_threads(2)
q, k, v = torch.randn(3, 9000, 2, 64).bfloat16()
quire.step(q, k, v, cache, pool.step({pool.sequence(): 9000}), quire.Options(window=64), kernel="native")
assert mapped() == before, mapped() - before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
