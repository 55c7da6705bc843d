"""What the other tests stand on: bf16 is rounded and multiplied rightly, and no kernel reads or writes beside its tensors. On a
card this is the hardware; in the interpreter it is `support/interpreter.py`."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from support import interpreter

needs_interpreter = pytest.mark.skipif(not interpreter.ON, reason="a card does not tell: that is compute-sanitizer's work")


@triton.jit
def cast_kernel(out, x, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def add_and_compare_kernel(total, less, negated, a, b, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(total + at, x + y)
    tl.store(less + at, (x < y).to(tl.int8))
    tl.store(negated + at, -x)


@triton.jit
def product_kernel(out, a, b, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    at = row[:, None] * SIZE + row[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def copy_kernel(out, x, read, written, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, tl.load(x + at, mask=at < read, other=0.0), mask=at < written)


@pytest.mark.parametrize("source, target", [
    (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.float16),
    (torch.int32, torch.bfloat16),
])  # fmt: skip
def test_casts(source: torch.dtype, target: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = (torch.randn(4096) * 1000).to(source).to(device)
    out = torch.zeros(4096, dtype=target, device=device)
    cast_kernel[(1,)](out, x, 4096)
    assert torch.equal(out, x.to(target))


def test_bf16_elements(device: str) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(1024).bfloat16().to(device) for _ in range(2))
    total, less, negated = torch.zeros_like(a), torch.zeros(1024, dtype=torch.int8, device=device), torch.zeros_like(a)
    add_and_compare_kernel[(1,)](total, less, negated, a, b, 1024)
    assert torch.equal(total, a + b)
    assert torch.equal(less.bool(), a < b)
    assert torch.equal(negated, -a)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(32, 32).to(dtype).to(device) for _ in range(2))
    out = torch.zeros(32, 32, device=device)
    product_kernel[(1,)](out, a, b, 32)
    assert torch.allclose(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@needs_interpreter
@pytest.mark.parametrize("read, written, wrong", [(8, 8, None), (9, 8, "load"), (8, 9, "store")])
def test_memory_beside_the_tensors(read: int, written: int, wrong: str | None) -> None:
    x, out = torch.randn(8), torch.zeros(8)
    if wrong is None:
        copy_kernel[(1,)](out, x, read, written, 16)
        assert torch.equal(out, x)
    else:
        with pytest.raises(Exception, match=f"{wrong} outside of every tensor, 1 of 9 elements"):
            copy_kernel[(1,)](out, x, read, written, 16)


@needs_interpreter
def test_casts_to_fp8_are_refused() -> None:
    with pytest.raises(Exception, match="means something else on every target"):
        cast_kernel[(1,)](torch.zeros(16, dtype=torch.float8_e4m3fn), torch.randn(16), 16)
