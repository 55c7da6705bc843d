"""Faults of stored elements: scales, formats and layouts."""

from __future__ import annotations

from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.formats import GROUP, PACK, TYPES, numbers_of_codes, numbers_of_scales
from quire.conformance.faults.fault import Fault
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, BatchSequence, Indices, Stages, Values, Work


def _decode(change: Any) -> Stages:
    """Replaces decoding by `change(w, part, raw, page, offset)`."""
    return PLAIN.replace(decode=change)


def _rescaled(change: Any) -> Stages:
    """Replaces scales by `change(w, part, page, offset, scale)`."""

    def decode(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        scale = oracle.scale_at(w, part, page, offset)
        return oracle.numbers_at(w, part, raw, page, offset) * change(w, part, page, offset, scale)

    return _decode(decode)


def _only(which: str, change: Any) -> Stages:
    return _rescaled(lambda w, part, page, offset, scale: change(scale) if part == which else scale)


def _swapped_scales(w: Work, part: str, page: torch.Tensor, offset: torch.Tensor, scale: Any) -> Any:
    return oracle.scale_at(w, "v" if part == "k" else "k", page, offset)


def _first_scale(w: Work, part: str, page: torch.Tensor, offset: torch.Tensor, scale: Any) -> Any:
    return w.scales[part].reshape(-1)[0].cpu().to(w.number)  # type: ignore[union-attr]


def _first_slot_scale(w: Work, part: str, page: torch.Tensor, offset: torch.Tensor, scale: Any) -> Any:
    return oracle.scale_at(w, part, page, torch.zeros_like(offset))


def _reversed_head_scales(w: Work, part: str, page: torch.Tensor, offset: torch.Tensor, scale: Any) -> Any:
    return scale.flip(1)


def _as_format(name: str) -> Stages:
    def decode(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        return oracle.as_numbers(raw, name, w.number) * oracle.scale_at(w, part, page, offset)

    return _decode(decode)


def _limited(change: Any) -> Stages:
    """Replaces stored numbers, before they are scaled, by `change(w, numbers)`."""

    def decode(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        return change(w, oracle.as_numbers(raw, w.call.formats[part], w.number)) * oracle.scale_at(w, part, page, offset)

    return _decode(decode)


def _saturated(share: float) -> Stages:
    def change(w: Work, numbers: torch.Tensor) -> torch.Tensor:
        most = torch.finfo(TYPES[w.call.format]).max * share
        return numbers.clamp(-most, most)

    return _limited(change)


def _flushed(bits: int) -> Stages:
    """Numbers below the smallest normal one times 2**bits are zero."""

    def change(w: Work, numbers: torch.Tensor) -> torch.Tensor:
        least = torch.finfo(TYPES[w.call.format]).smallest_normal * 2**bits
        return torch.where(numbers.abs() < least, 0.0, numbers)

    return _limited(change)


def _eight_bit_floats(call: KernelCall) -> bool:
    return _has_one_format(call) and TYPES[call.format].is_floating_point and TYPES[call.format].itemsize == 1


def _of_codes(change: Any, parts: str = "kv") -> Stages:
    """Replaces decoding of elements of 4 bits by `change(raw)`, which gives their numbers."""

    def decode(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        if part not in parts or w.call.formats[part] != "int4":
            return oracle.decode(w, part, raw, page, offset)
        return change(raw).to(w.number) * oracle.scale_at(w, part, page, offset)

    return _decode(decode)


def _swapped_nibbles(parts: str) -> Stages:
    def decode(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        if part not in parts or w.call.formats[part] not in PACK:
            return oracle.decode(w, part, raw, page, offset)
        swapped = raw.view(torch.uint8).short()
        return oracle.decode(w, part, (swapped // 16 + swapped % 16 * 16).to(torch.uint8), page, offset)

    return _decode(decode)


def _of_groups(change: Any, parts: str = "kv") -> Stages:
    """Replaces decoding of formats with scales of groups by `change(w, part, raw, page, offset)`, which gives numbers before the
    scale of the cache."""

    def decode(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        if part not in parts or w.call.formats[part] not in GROUP:
            return oracle.decode(w, part, raw, page, offset)
        return change(w, part, raw, page, offset).to(w.number) * oracle.scale_at(w, part, page, offset)

    return _decode(decode)


def _group_scales_at(change: Any, parts: str) -> Stages:
    """The scale of another group is used: `change(group, groups)`."""

    def numbers(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        count = w.dims[part] // GROUP[w.call.formats[part]]
        scales = oracle.group_scales(w, part, page, offset, lambda group: change(group, count))
        return numbers_of_codes(oracle.nibbles(raw)) * numbers_of_scales(scales)

    return _of_groups(numbers, parts)


def _unswizzled(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    return numbers_of_codes(oracle.nibbles(raw)) * numbers_of_scales(oracle.group_scales(w, part, page, offset, format="nvfp4"))


def _group_numbers(number: Any, scale: Any) -> Any:
    """Decodes codes by `number(codes)` and the bytes of scales by `scale(bytes)`."""
    return lambda w, part, raw, page, offset: number(oracle.nibbles(raw)) * scale(oracle.group_scales(w, part, page, offset))


def _has_groups(least: int) -> Any:
    """Whether K or V has scales of groups, `least` of them in a head."""

    def has(call: KernelCall) -> bool:
        dims = {"k": call.q.shape[2], "v": call.out.shape[2]}
        return any(format in GROUP and dims[part] // GROUP[format] >= least for part, format in call.formats.items())

    return has


def _values_as_keys() -> Stages:
    """The format of K is used for V too."""

    def decode(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        return oracle.as_numbers(raw, w.call.format, w.number) * oracle.scale_at(w, part, page, offset)

    return _decode(decode)


def _has_int4(call: KernelCall) -> bool:
    return "int4" in call.formats.values()


def _has_packed(call: KernelCall) -> bool:
    return any(format in PACK for format in call.formats.values())


def _has_two_byte_formats(call: KernelCall) -> bool:
    k, v = call.formats.values()
    return k != v and all(TYPES[format].itemsize == 1 and format not in PACK for format in (k, v))


def _has_one_format(call: KernelCall) -> bool:
    return len(set(call.formats.values())) == 1


def _is(*formats: str) -> Any:
    return lambda call: call.format in formats and _has_one_format(call)


def _is_scaled(part: str) -> Any:
    return lambda call: getattr(call, f"{part}_scale") is not None


def _has_scales(call: KernelCall) -> bool:
    return call.k_scale is not None and call.v_scale is not None


def _scale_kind(dims: int) -> Any:
    return lambda call: _has_scales(call) and call.k_scale.dim() == dims and call.kv_heads > 1


def _other_x(factor: int) -> Stages:
    """Keys packed by x are read as if packed by x * factor, in the same memory."""

    def address(w: Work, part: str, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        if part == "v":
            return oracle.address(w, part, page, offset)
        size, dim, other = w.call.page_size, w.dims["k"], w.x * factor
        h = torch.arange(w.call.kv_heads).view(1, -1, 1)
        d = torch.arange(dim).view(1, 1, -1)
        stride = w.pages["k"].stride()
        inner = (d // other) * (size * other) + offset.view(-1, 1, 1) * other + d % other
        return page.view(-1, 1, 1) * stride[0] + h * stride[1] + inner

    return PLAIN.replace(address=address)


def _transposed(parts: str) -> Stages:
    """nhd is read as hnd, or the reverse: slots and heads are exchanged in the same memory."""

    def address(w: Work, part: str, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        if part not in parts:
            return oracle.address(w, part, page, offset)
        size, heads, dim = w.call.page_size, w.call.kv_heads, w.dims[part]
        h = torch.arange(heads).view(1, -1, 1)
        d = torch.arange(dim).view(1, 1, -1)
        at = offset.view(-1, 1, 1)
        inner = (h * size + at) if w.call.layout == "nhd" else (at * heads + h)
        return page.view(-1, 1, 1) * w.pages[part].stride(0) + inner * dim + d

    return PLAIN.replace(address=address)


def _plain_pages(call: KernelCall) -> bool:
    contiguous = call.k_pages[0].is_contiguous() and call.v_pages[0].is_contiguous()
    return call.layout in ("nhd", "hnd") and not _has_packed(call) and call.kv_heads > 1 and call.page_size > 1 and contiguous


def _untransposed_values() -> Stages:
    """Values stored as [dim, offset] are read as [offset, dim]."""

    def address(w: Work, part: str, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        if part == "k":
            return oracle.address(w, part, page, offset)
        stride = w.pages["v"].stride()
        h, d = torch.arange(w.call.kv_heads).view(1, -1, 1), torch.arange(w.dims["v"]).view(1, 1, -1)
        return page.view(-1, 1, 1) * stride[0] + h * stride[1] + offset.view(-1, 1, 1) * w.dims["v"] + d

    return PLAIN.replace(address=address)


def _gather(change: Any) -> Stages:
    def gather(w: Work, s: Stages, indices: Indices, sequence: BatchSequence) -> Values:
        return change(w, sequence, oracle.gather(w, s, indices, sequence))

    return PLAIN.replace(gather=gather)


STORED = (
    Fault(
        "k-scale-missing",
        "scales",
        "logits lack the factor k_scale",
        "the scale is folded into the softmax scale on one code path only",
        lambda: _only("k", lambda scale: 1.0),
        _is_scaled("k"),
    ),
    Fault(
        "v-scale-missing",
        "scales",
        "outputs lack the factor v_scale",
        "the scale is applied once at the end, and one code path returns earlier",
        lambda: _only("v", lambda scale: 1.0),
        _is_scaled("v"),
    ),
    Fault(
        "k-scale-twice",
        "scales",
        "logits contain the factor k_scale twice",
        "the scale is applied when elements are decoded, and again with the softmax scale",
        lambda: _only("k", lambda scale: scale * scale),
        _is_scaled("k"),
    ),
    Fault(
        "v-scale-twice",
        "scales",
        "outputs contain the factor v_scale twice",
        "the scale is applied when elements are decoded, and again to the accumulator",
        lambda: _only("v", lambda scale: scale * scale),
        _is_scaled("v"),
    ),
    Fault(
        "scales-swapped",
        "scales",
        "logits contain the factor v_scale, and outputs the factor k_scale",
        "two adjacent arguments of the same type are exchanged",
        lambda: _rescaled(_swapped_scales),
        _has_scales,
    ),
    Fault(
        "head-scale-read-as-tensor",
        "scales",
        "kv head 0 is correct; each other kv head is wrong by a factor of its own",
        "the kernel loads one scalar although one scale per head was passed",
        lambda: _rescaled(_first_scale),
        _scale_kind(1),
    ),
    Fault(
        "head-scales-in-wrong-order",
        "scales",
        "each kv head is wrong by a factor of its own",
        "scales are indexed by another head than the keys",
        lambda: _rescaled(_reversed_head_scales),
        _scale_kind(1),
    ),
    Fault(
        "token-scale-of-first-slot",
        "scales",
        "only the first token of each page is correct",
        "the kernel expects one scale per page where there is one per token",
        lambda: _rescaled(_first_slot_scale),
        _scale_kind(3),
        issues=("AITER has scales per page and scales per token",),
    ),
    Fault(
        "e4m3fn-read-as-fnuz",
        "formats",
        "all keys and values of the cache are half as large",
        "the fp8 format is chosen by the GPU that reads the cache instead of the one that wrote it",
        lambda: _as_format("e4m3fnuz"),
        _is("e4m3fn"),
        issues=("vLLM: gfx942 stores fnuz, gfx950 and NVIDIA fn",),
    ),
    Fault(
        "stored-numbers-saturated",
        "formats",
        "large keys and values are clipped to one magnitude",
        "the write clamps to the range of another format, or the scale is too small",
        _saturated,
        _eight_bit_floats,
        ({"share": 0.5}, {"share": 240 / 448}, {"share": 0.25}),
    ),
    Fault(
        "small-stored-numbers-flushed",
        "formats",
        "small keys and values are zero",
        "subnormal numbers are flushed to zero when they are written or read",
        _flushed,
        _eight_bit_floats,
        ({"bits": 4}, {"bits": 0}, {"bits": 1}, {"bits": 2}, {"bits": 3}),
    ),
    Fault(
        "fnuz-read-as-e4m3fn",
        "formats",
        "all keys and values of the cache are twice as large",
        "the fp8 format is chosen by the GPU that reads the cache instead of the one that wrote it",
        lambda: _as_format("e4m3fn"),
        _is("e4m3fnuz"),
    ),
    Fault(
        "e5m2-read-as-e4m3",
        "formats",
        "stored numbers keep their sign but have other magnitudes",
        "'fp8' is assumed to mean e4m3",
        lambda: _as_format("e4m3fn"),
        _is("e5m2"),
        issues=("vLLM triton_reshape_and_cache_flash views e5m2 caches as e4m3", "SGLang #18550"),
    ),
    Fault(
        "e4m3-read-as-e5m2",
        "formats",
        "stored numbers keep their sign but have other magnitudes",
        "'fp8' is assumed to mean e5m2",
        lambda: _as_format("e5m2"),
        _is("e4m3fn", "e4m3fnuz"),
    ),
    Fault(
        "bytes-read-as-int8",
        "formats",
        "stored numbers have unrelated magnitudes",
        "bytes without a declared format are read as integers",
        lambda: _as_format("int8"),
        _is("e4m3fn", "e4m3fnuz", "e5m2"),
    ),
    Fault(
        "nibbles-swapped",
        "formats",
        "each two neighbours in the dims of keys or values are exchanged",
        "the high four bits of a byte are taken for the even element",
        lambda parts: _swapped_nibbles(parts),
        _has_packed,
        ({"parts": "kv"}, {"parts": "k"}, {"parts": "v"}),
        issues=("packing orders of int4 weights and caches differ between libraries",),
    ),
    Fault(
        "nibbles-offset-by-8",
        "formats",
        "stored numbers of 4 bits are 8 too small or 8 too large",
        "codes of two's complement are read as unsigned with a zero point of 8",
        lambda parts: _of_codes(lambda raw: oracle.nibbles(raw) - 8, parts),
        _has_int4,
        ({"parts": "kv"}, {"parts": "k"}, {"parts": "v"}),
    ),
    Fault(
        "sign-of-nibbles-lost",
        "formats",
        "negative numbers of 4 bits are positive: 16 larger",
        "four bits are widened without extending their sign",
        lambda parts: _of_codes(oracle.nibbles, parts),
        _has_int4,
        ({"parts": "kv"}, {"parts": "k"}, {"parts": "v"}),
    ),
    Fault(
        "e2m1-read-as-int4",
        "formats",
        "stored numbers of 4 bits are the integers of their codes",
        "a kernel knows one format of 4 bits",
        lambda parts: _of_groups(_group_numbers(oracle.signed, numbers_of_scales), parts),
        _has_groups(1),
        ({"parts": "kv"}, {"parts": "k"}, {"parts": "v"}),
    ),
    Fault(
        "group-scales-missing",
        "scales",
        "keys and values lack the scales of their groups",
        "a kernel for formats with one scale reads the codes alone",
        lambda parts: _of_groups(_group_numbers(numbers_of_codes, torch.ones_like), parts),
        _has_groups(1),
        ({"parts": "kv"}, {"parts": "k"}, {"parts": "v"}),
    ),
    Fault(
        "group-scale-of-neighbour",
        "scales",
        "each group of a head has the scale of the next one",
        "the index of a group is rounded up, or scales are loaded one column off",
        lambda parts: _group_scales_at(lambda group, count: (group + 1) % count, parts),
        _has_groups(2),
        ({"parts": "kv"}, {"parts": "k"}, {"parts": "v"}),
    ),
    Fault(
        "group-of-32",
        "scales",
        "every second group has the scale of the group before",
        "MXFP4 has one scale for 32 elements, NVFP4 one for 16",
        lambda parts: _group_scales_at(lambda group, count: group // 2 * 2, parts),
        _has_groups(2),
        ({"parts": "kv"}, {"parts": "k"}, {"parts": "v"}),
    ),
    Fault(
        "swizzle-of-group-scales-ignored",
        "scales",
        "of each four tokens, groups have scales of one another",
        "vLLM permutes the scales of V for TensorRT-LLM's kernels, and a reader expects them in order",
        lambda: _of_groups(_unswizzled),
        lambda call: "nvfp4_swizzled" in call.formats.values(),
        issues=("vLLM reshape_and_cache_nvfp4 writes V swizzled and K not",),
    ),
    Fault(
        "values-read-in-format-of-keys",
        "formats",
        "outputs are made of unrelated numbers, logits are correct",
        "a kernel knows one format for the whole cache",
        _values_as_keys,
        _has_two_byte_formats,
    ),
    Fault(
        "fp16-read-as-bf16",
        "formats",
        "numbers of either 16-bit type are read as the other",
        "the dtype of the cache is taken from the query",
        lambda: _decode(
            lambda w, part, raw, page, offset: oracle.as_numbers(raw, "bf16" if w.call.format == "fp16" else "fp16", w.number)
        ),
        _is("fp16", "bf16"),
    ),
    Fault(
        "x-of-8-read-as-16",
        "layouts",
        "elements of adjacent slots are mixed",
        "x spans 16 bytes: its number of elements doubles when their size halves, and x was not updated",
        lambda factor: _other_x(factor),
        lambda call: (
            call.layout in ("vllm_x", "aiter") and not _has_packed(call) and call.q.shape[2] % (2 * call.k_pages.shape[-1]) == 0
        ),
        ({"factor": 2},),
        issues=("vLLM test_attention.py re-views an x=16 cache as x=8",),
    ),
    Fault(
        "layout-read-as-another",
        "layouts",
        "slots and heads are exchanged within a page",
        "NHD and HND pages have the same size, and a tensor does not state its layout",
        lambda parts: _transposed(parts),
        _plain_pages,
        ({"parts": "kv"}, {"parts": "k"}, {"parts": "v"}),
        issues=("FlashInfer kv_layout", "AITER's shuffled V is not vLLM's"),
    ),
    Fault(
        "values-not-transposed",
        "layouts",
        "values are mixed between the slots and dims of a page",
        "the layout stores values as [dim, offset], and the kernel reads them as [offset, dim]",
        lambda: _untransposed_values(),
        lambda call: call.layout == "vllm_x" and not _has_packed(call),
    ),
    Fault(
        "k-and-v-swapped",
        "layouts",
        "logits come from values and outputs from keys",
        "two arguments of the same shape, or the two halves of a joint page, are exchanged",
        lambda: _gather(lambda w, sequence, kv: Values(kv.v, kv.k)),
        lambda call: call.q.shape[2] == call.out.shape[2],
    ),
)
