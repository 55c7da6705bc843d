"""Builds the write of a case: new tokens, a cache with arbitrary contents, slots, and the tables of a rotation.

Every byte of the cache has a value, so that a write to any of them shows. Pages, tables and layouts are those of `build`.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.conformance.cases.build import LAYOUT_INDEX, flat_of, laid_out, poison_of, scale_of, strided, x_of
from quire.conformance.cases.call import guarded, whole_of
from quire.conformance.cases.case import Case
from quire.conformance.cases.formats import GROUP, TYPES, grouped_at, units_of
from quire.conformance.cases.page_plan import PagePlan, generator, page_plan, page_table
from quire.conformance.cases.write_call import Places, WriteCall

MARGIN = 4096
"""Elements before page 0 in the same memory: a kernel that stores at slot -1 writes there."""
BASE = 10000.0
"""The base of the frequencies of a rotation."""
MORE_POSITIONS = 300
"""How many more positions the tables have than the longest sequence."""
WIDE = 4.0
"""Factor of one element in 64: some are beyond what a scale covers, and saturate."""


def build_write(case: Case, device: torch.device | str = "cpu") -> WriteCall:
    """The write of a case, with copies of all that it must not change."""
    plan = page_plan(case)
    plan.before = max(plan.before, MARGIN)
    g = generator(case, "pages")
    units = {part: units_of(case.formats[part], dim) for part, dim in case.dims.items() if part == "k" or not case.v_in_k}
    shape = (plan.touched.numel(), case.page_size, case.kv_heads)
    held = {part: _bytes((*shape, n), case.formats[part], g) for part, n in units.items()}
    k_pages, v_pages = laid_out(case, held, plan, device)
    rows = {part: _rows(case, part, case.kv_heads, case.dims[part], device) for part in units}
    index = {name: getattr(torch, kind) for name, kind in zip(("table", "lens", "starts"), case.index)}
    table, slots = _slots(case, plan)
    starts = [sum(case.q_lens[:i]) for i in range(case.seqs + 1)]
    given: dict[str, Any] = {"page_table": None, "kv_lens": None, "q_starts": None}
    if case.slots != "scattered":
        given["page_table"] = strided(case, table.to(index["table"]), 1, device)
        given["kv_lens"] = torch.tensor(case.kv_lens, dtype=index["lens"], device=device)
        given["q_starts"] = torch.tensor(starts, dtype=index["starts"], device=device)
    call = WriteCall(
        k=rows["k"],
        v=rows.get("v"),
        k_pages=k_pages,
        v_pages=v_pages,
        slots=slots.to(index["table"]).to(device),
        case=case,
        places={part: _places(case, part, n, v_pages if part == "v" else k_pages, plan) for part, n in units.items()},
        pages_of=plan.touched,
        hadamard=case.hadamard,
        **given,
        **_scales(case, plan, device),
        **(_rotation(case, device) if case.rotated else {}),
    )
    return call.take_checksums()


def _bytes(shape: tuple[int, ...], format: str, g: torch.Generator) -> torch.Tensor:
    """Storage with random bits."""
    size = TYPES[format].itemsize
    return torch.randint(0, 256, (*shape, size), generator=g, dtype=torch.uint8).view(TYPES[format]).squeeze(-1)


def _rows(case: Case, part: str, heads: int, dim: int, device: torch.device | str) -> torch.Tensor:
    """New keys, values or queries, with poison in padding rows."""
    g = generator(case, "new", part)
    x = torch.randn(case.live + case.padding, heads, dim, generator=g)
    x = torch.where(torch.rand(x.shape, generator=g) < 1 / 64, WIDE * x, x)
    x[case.live :] = poison_of(case, f"new {part}", x[case.live :].shape)
    return strided(case, x.to(TYPES[case.q_dtype]), 1, device)


def _slots(case: Case, plan: PagePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """The page table, and the slot of each row, -1 of padding rows."""
    every = [torch.ones(kv_len, dtype=torch.bool) for kv_len in case.kv_lens]
    table, g = page_table(case, plan, every), generator(case, "slots")
    slots = torch.full((case.live + case.padding,), -1)
    if case.slots == "scattered":
        inside = plan.touched[plan.touched >= 0]
        chosen = torch.randperm(inside.numel() * case.page_size, generator=g)[: case.live]
        slots[: chosen.numel()] = inside[chosen // case.page_size] * case.page_size + chosen % case.page_size
        return table, slots
    row = 0
    for pages, q_len, kv_len in zip(plan.owned, case.q_lens, case.kv_lens):
        at, ids = torch.arange(kv_len - q_len, kv_len), torch.tensor(pages, dtype=torch.long)
        slots[row : row + q_len] = ids[at // case.page_size] * case.page_size + at % case.page_size
        row += q_len
    if case.slots == "skipped":
        skipped = torch.rand(case.live, generator=g) < 0.25
        skipped[case.live // 2 : case.live // 2 + 1] = True
        slots[: case.live][skipped] = -1
    return table, slots


def _places(case: Case, part: str, units: int, pages: torch.Tensor, plan: PagePlan) -> Places:
    """The index of each element of storage in the memory of its pages."""
    format, dim = case.formats[part], case.dims[part]
    p = plan.touched.view(-1, 1, 1, 1)
    s, h = torch.arange(case.page_size).view(1, -1, 1, 1), torch.arange(case.kv_heads).view(1, 1, -1, 1)
    unit = torch.arange(units).view(1, 1, 1, -1)
    if format in GROUP:
        address = p * pages.stride(0) + grouped_at(case.layout, format, case.page_size, case.kv_heads, dim, s, h, unit)
    else:
        index = LAYOUT_INDEX[case.layout][part == "v"](p, s, h, unit, x_of(case, part))
        address = torch.zeros((), dtype=torch.int64)
        for i, stride in zip(index, pages.stride()):
            address = address + i * stride
    shape = (plan.touched.numel(), case.page_size, case.kv_heads, units)
    return Places(flat_of(pages), (address + int(pages.storage_offset())).expand(shape))


def _scales(case: Case, plan: PagePlan, device: torch.device | str) -> dict[str, Any]:
    """The scales of the cache. Those of tokens are written, and hold other numbers before."""
    found: dict[str, Any] = {}
    for part in case.dims:
        scale = scale_of(case.replace(poison="decoy"), part, plan)
        if part == "v" and case.v_in_k:
            break
        if scale is not None and scale.dim() == 3:
            buffer = guarded(tuple(scale.shape), torch.float32, device)
            whole_of(buffer).fill_(case.fill_byte)
            buffer.copy_(torch.rand(scale.shape, generator=generator(case, part, "old scales")) + 5.0)
            scale = buffer
        if scale is not None:
            found[f"{part}_scale"] = scale.to(device)
    if case.v_in_k and found:
        found["v_scale"] = found["k_scale"]
    return found


def _rotation(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Tables, positions, norms and queries."""
    count, tokens = max(case.kv_lens, default=0) + MORE_POSITIONS, case.live + case.padding
    frequencies = BASE ** (-torch.arange(0, case.rotated, 2, dtype=torch.float64) / case.rotated)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * frequencies
    own = [at for q_len, kv_len in zip(case.q_lens, case.kv_lens) for at in range(kv_len - q_len, kv_len)]
    positions = torch.zeros(tokens, dtype=torch.long)
    positions[: case.live] = torch.tensor(own, dtype=torch.long)
    g = generator(case, "rotation")
    if case.positions == "given":
        positions[: case.live] = torch.randint(0, count, (case.live,), generator=g)
    found: dict[str, Any] = {"cos": angles.cos().float(), "sin": angles.sin().float()}
    found["positions"] = positions.to(getattr(torch, case.index[0]))
    if case.norm != "none":
        weights = torch.randn(2, case.head_dim, generator=g) * 0.4 + (0.0 if case.norm == "unit-offset" else 1.0)
        found["k_norm"], q_norm = weights.to(TYPES[case.q_dtype])
        found |= {"q_norm": q_norm} if case.queries else {}
    found = {name: tensor.contiguous().to(device) for name, tensor in found.items()}
    if case.queries:
        found["q"] = _rows(case, "q", case.q_heads, case.head_dim, device)
        found["q_out"] = guarded((tokens, case.q_heads, case.head_dim), TYPES[case.q_dtype], device)
        whole_of(found["q_out"]).fill_(case.fill_byte)
    return found | {"interleaved": case.rope == "interleaved", "unit_offset": case.norm == "unit-offset"}
