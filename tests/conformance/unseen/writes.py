"""A plain cache write in torch, and faulty ones that are a few lines away from it. It shares no code with the kit.

For each, `names` are the catalogue's faults that are true of it, and `words` are what a contrast or a symptom must contain to
describe it, as in unseen_kernels.py.

    quire conform tests/conformance/unseen/writes.py:position_of_row
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parent))

SUPPORTS = {"format": lambda name: not name.startswith("nvfp4"), "v_format": lambda name: not name.startswith("nvfp4")}
REFUSES = False
LARGEST = {"e4m3fn": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0, "int8": 127.0, "int4": 7.0}
FP8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2}


class Write:
    """A write as a function of the documented signature. Subclasses replace a step."""

    a: SimpleNamespace

    def __call__(
        self, *, k, v, k_pages, v_pages, slots, page_table=None, kv_lens=None, q_starts=None, k_scale=None, v_scale=None,
        layout="nhd", format="fp16", v_format="", v_in_k=False, hadamard=False, cos=None, sin=None, positions=None,
        interleaved=False, q=None, q_out=None, k_norm=None, q_norm=None, eps=0.0, unit_offset=False,
    ) -> None:  # fmt: skip
        self.a = SimpleNamespace(**{name: value for name, value in locals().items() if name != "self"})
        keys = self.keys(self.turned(k.float(), k_norm, "k")) if cos is not None else self.keys(k.float())
        if q is not None:
            self.store_queries(self.turned(q.float(), q_norm, "q"))
        kept = self.kept()
        slot = self.slot()[kept]
        page, offset = self.place(slot)
        self.store("k", k_pages, keys[kept], page, offset)
        if v is not None:
            self.store("v", v_pages, self.values(v.float())[kept], page, offset)

    # Rotation.

    def position(self) -> torch.Tensor:
        return self.a.positions.long()

    def turned(self, x: torch.Tensor, weight: torch.Tensor | None, part: str) -> torch.Tensor:
        return self.rotated(self.normal(x, weight), part)

    def normal(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.a.eps) * self.weight(weight)

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float() + 1 if self.a.unit_offset else weight.float()

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a.cos[self.position()].unsqueeze(1), self.a.sin[self.position()].unsqueeze(1)

    def rotated(self, x: torch.Tensor, part: str) -> torch.Tensor:
        cos, sin = self.tables()
        n = 2 * cos.shape[-1]
        head, rest = x[..., :n], x[..., n:]
        a, b = self.split(head)
        return torch.cat((self.join(a * cos - b * sin, b * cos + a * sin), rest), -1)

    def split(self, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (head[..., 0::2], head[..., 1::2]) if self.a.interleaved else head.chunk(2, -1)  # type: ignore[return-value]

    def join(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack((a, b), -1).flatten(-2) if self.a.interleaved else torch.cat((a, b), -1)

    def store_queries(self, q: torch.Tensor) -> None:
        live = self.live()
        self.a.q_out[:live] = q[:live].to(self.a.q_out.dtype)

    def live(self) -> int:
        return int(self.a.q_starts[-1]) if self.a.q_starts is not None else self.a.k.shape[0]

    # What is stored.

    def keys(self, k: torch.Tensor) -> torch.Tensor:
        return self.spread(k) if self.a.hadamard else k

    def values(self, v: torch.Tensor) -> torch.Tensor:
        return v

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        n, width = x.shape[-1], 1
        while width < n:
            x = x.unflatten(-1, (-1, 2, width))
            x = torch.stack((x[..., 0, :] + x[..., 1, :], x[..., 0, :] - x[..., 1, :]), -2).flatten(-3)
            width *= 2
        return x * n**-0.5

    def divided(self, part: str, x: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        scale = getattr(self.a, f"{part}_scale")
        if scale is None:
            return x
        if scale.dim() < 3:
            return x / self.given(part, scale).reshape(-1, 1)
        of_token = self.of_token(part, x)
        self.keep_scale(part, scale, of_token, page, offset)
        return x / of_token.unsqueeze(-1)

    def given(self, part: str, scale: torch.Tensor) -> torch.Tensor:
        return scale

    def of_token(self, part: str, x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax(-1) / LARGEST[self.format(part)]

    def keep_scale(self, part: str, scale: torch.Tensor, of_token: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> None:
        scale[page, offset] = of_token

    def format(self, part: str) -> str:
        return self.a.v_format or self.a.format if part == "v" else self.a.format

    def encoded(self, part: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        format = self.format(part)
        if format in FP8:
            return self.saturated(x, LARGEST[format]).to(FP8[format]).view(torch.uint8)
        if format in ("int8", "int4"):
            whole = self.whole(self.saturated(x, LARGEST[format])).to(torch.int16)
            return self.packed(whole & 15) if format == "int4" else (whole & 255).to(torch.uint8)
        return x.to(dtype)

    def saturated(self, x: torch.Tensor, largest: float) -> torch.Tensor:
        return x.clamp(-largest, largest)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    def packed(self, codes: torch.Tensor) -> torch.Tensor:
        return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)

    # Where it is stored.

    def slot(self) -> torch.Tensor:
        return self.a.slots.long()

    def kept(self) -> torch.Tensor:
        return (self.a.slots >= 0).nonzero().flatten()

    def page_size(self) -> int:
        axis = {"nhd": 1, "hnd": 2, "vllm_joint": 2}.get(self.a.layout, 3)
        return self.a.k_pages.shape[axis]

    def place(self, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return slot // self.page_size(), slot % self.page_size()

    def store(self, part: str, pages: torch.Tensor, x: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> None:
        made = self.encoded(part, self.divided(part, x, page, offset), pages.dtype)
        self.put(part, pages.view(torch.uint8) if made.dtype is torch.uint8 else pages, made, page, offset)

    def put(self, part: str, pages: torch.Tensor, made: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> None:
        layout = self.a.layout
        if layout == "nhd":
            pages[page, offset] = made
        elif layout in ("hnd", "vllm_joint"):
            pages[page, :, offset] = made
        elif part == "k":
            pages[page, :, :, offset] = made.unflatten(-1, (-1, pages.shape[-1]))
        elif layout == "vllm_x":
            pages[page, :, :, offset] = made
        else:
            pages[page, :, offset // pages.shape[-1], :, offset % pages.shape[-1]] = made


correct = Write()


@dataclass
class FaultyWrite:
    """A write and what is true of it."""

    kernel: Write
    names: tuple[str, ...]
    words: tuple[str, ...]


WRITES: dict[str, FaultyWrite] = {}


def unseen(names: str = "", words: str = "") -> Callable[[type[Write]], type[Write]]:
    """Registers a write: true names, separated by spaces; words of a contrast or symptom, separated by bars."""

    def register(kind: type[Write]) -> type[Write]:
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in kind.__name__).lstrip("_")
        WRITES[name] = FaultyWrite(kind(), tuple(names.split()), tuple(word for word in words.split("|") if word))
        globals()[name] = WRITES[name].kernel
        return kind

    return register


# Rotation.


@unseen("rope-position-of-row")
class PositionOfRow(Write):
    def position(self) -> torch.Tensor:
        return torch.arange(self.a.k.shape[0])


@unseen("rope-position-off")
class PositionOfNextToken(Write):
    def position(self) -> torch.Tensor:
        return (self.a.positions.long() + 1).clamp(max=self.a.cos.shape[0] - 1)


@unseen("rope-position-without-context")
class PositionInChunk(Write):
    def position(self) -> torch.Tensor:
        if self.a.q_starts is None:
            return self.a.positions.long()
        rows = torch.arange(self.a.k.shape[0])
        return rows - self.a.q_starts.long()[torch.searchsorted(self.a.q_starts.long(), rows, right=True) - 1]


@unseen("rope-pairs-exchanged")
class OtherPairs(Write):
    def split(self, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (head[..., 0::2], head[..., 1::2]) if not self.a.interleaved else head.chunk(2, -1)  # type: ignore[return-value]

    def join(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat((a, b), -1) if self.a.interleaved else torch.stack((a, b), -1).flatten(-2)


@unseen(words="half-split|interleaved|RoPE|rope")
class SplitAsPairsJoinedAsHalves(Write):
    """Pairs are read interleaved and written half-split, whatever the style."""

    def split(self, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return head[..., 0::2], head[..., 1::2]

    def join(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat((a, b), -1)


@unseen("rope-missing")
class KeysNotRotated(Write):
    def rotated(self, x: torch.Tensor, part: str) -> torch.Tensor:
        return x if part == "k" else super().rotated(x, part)


@unseen("rope-missing")
class QueriesNotRotated(Write):
    def rotated(self, x: torch.Tensor, part: str) -> torch.Tensor:
        return x if part == "q" else super().rotated(x, part)


@unseen("norm-after-rotation")
class NormLast(Write):
    def turned(self, x: torch.Tensor, weight: torch.Tensor | None, part: str) -> torch.Tensor:
        return self.normal(self.rotated(x, part), weight)


@unseen("norm-offset-exchanged")
class WeightWithoutOffset(Write):
    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float()


@unseen("rope-in-place")
class RotatedInPlace(Write):
    def rotated(self, x: torch.Tensor, part: str) -> torch.Tensor:
        cos, sin = self.tables()
        x, n = x.clone(), 2 * cos.shape[-1]
        first, second = (slice(0, n, 2), slice(1, n, 2)) if self.a.interleaved else (slice(0, n // 2), slice(n // 2, n))
        x[..., first] = x[..., first] * cos - x[..., second] * sin
        x[..., second] = x[..., second] * cos + x[..., first] * sin
        return x


@unseen("rope-partial-ignored", words="rotated in part")
class HalfOfTheHead(Write):
    """The partner of an element is half a head away, although only a part is rotated."""

    def rotated(self, x: torch.Tensor, part: str) -> torch.Tensor:
        if self.a.interleaved:
            return super().rotated(x, part)
        (cos, sin), half = self.tables(), x.shape[-1] // 2
        n, x = cos.shape[-1], x.clone()
        a, b = x[..., :n].clone(), x[..., half : half + n].clone()
        x[..., :n], x[..., half : half + n] = a * cos - b * sin, b * cos + a * sin
        return x


@unseen("rope-queries-of-skipped-tokens-missing", words="slot -1")
class ReturnsEarly(Write):
    def store_queries(self, q: torch.Tensor) -> None:
        kept = self.kept()
        self.a.q_out[kept] = q[kept].to(self.a.q_out.dtype)


@unseen(words="RoPE|rope")
class FrequenciesShifted(Write):
    """The column of a frequency is one too high, and the last one is used twice."""

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.cat((table[..., 1:], table[..., -1:]), -1) for table in super().tables())  # type: ignore[return-value]


@unseen(words="RoPE|rope")
class SineOfTheLastToken(Write):
    """All tokens take the sine of the last one."""

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = super().tables()
        return cos, sin[-1:].expand_as(sin)


# Scales and formats.


@unseen("write-scale-ignored")
class ScaleDropped(Write):
    def given(self, part: str, scale: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(scale)


@unseen("write-scale-inverted")
class ScaleMultiplied(Write):
    def given(self, part: str, scale: torch.Tensor) -> torch.Tensor:
        return 1 / scale


@unseen("write-scales-of-k-and-v-swapped")
class ScalesSwapped(Write):
    def given(self, part: str, scale: torch.Tensor) -> torch.Tensor:
        other = self.a.v_scale if part == "k" else self.a.k_scale
        return scale if other is None else other


@unseen("write-head-scales-in-wrong-order", words="scales per head")
class ScaleOfFirstHead(Write):
    def given(self, part: str, scale: torch.Tensor) -> torch.Tensor:
        return scale.reshape(-1)[:1]


@unseen("write-token-scale-of-all-heads", words="scales per token")
class ScaleOfWholeToken(Write):
    def of_token(self, part: str, x: torch.Tensor) -> torch.Tensor:
        return super().of_token(part, x).amax(-1, keepdim=True).expand(x.shape[:2])


@unseen("write-token-scales-not-stored", words="scales per token")
class ScaleForgotten(Write):
    def keep_scale(self, part: str, scale: torch.Tensor, of_token: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> None:
        return


@unseen(words="scales per token")
class ScalesInEachOthersTensors(Write):
    """The scales of K are stored in the tensor of those of V, and the other way round."""

    def keep_scale(self, part: str, scale: torch.Tensor, of_token: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> None:
        other = self.a.v_scale if part == "k" else self.a.k_scale
        (scale if other is None else other)[page, offset] = of_token


@unseen("write-not-saturated")
class NotSaturated(Write):
    def saturated(self, x: torch.Tensor, largest: float) -> torch.Tensor:
        return x


@unseen("write-truncated", words="int8|int4|quantised|format")
class IntegersTruncated(Write):
    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return x.trunc()


@unseen("write-nibbles-exchanged", words="int4")
class HighNibbleFirst(Write):
    def packed(self, codes: torch.Tensor) -> torch.Tensor:
        return (codes[..., 0::2] << 4 | codes[..., 1::2]).to(torch.uint8)


@unseen("write-as-other-fp8", words="v_format|other than")
class FormatOfKeys(Write):
    """V is encoded in the format of K where both have one byte."""

    def format(self, part: str) -> str:
        of_v, of_k = super().format("v"), super().format("k")
        return of_k if part == "v" and of_v in FP8 and of_k in FP8 else super().format(part)


@unseen("write-keys-not-transformed", words="Hadamard")
class NotSpread(Write):
    def spread(self, x: torch.Tensor) -> torch.Tensor:
        return x


@unseen("write-hadamard-factor-missing", words="Hadamard")
class FactorForgotten(Write):
    def spread(self, x: torch.Tensor) -> torch.Tensor:
        return super().spread(x) * x.shape[-1] ** 0.5


# Places.


@unseen("write-skipped-token-stored", words="slot -1|padding")
class SkippedAtSlotZero(Write):
    def slot(self) -> torch.Tensor:
        return self.a.slots.long().clamp(min=0)

    def kept(self) -> torch.Tensor:
        return torch.arange(self.live())


@unseen("write-skipped-token-stored", words="slot -1|padding")
class SkippedAtLastSlot(Write):
    def kept(self) -> torch.Tensor:
        return torch.arange(self.live())


@unseen("write-slot-off")
class SlotBefore(Write):
    def place(self, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().place((slot - 1).clamp(min=0))


@unseen(words="page size that is no power of two")
class PageByShift(Write):
    def place(self, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bits = self.page_size().bit_length() - 1
        page, offset = slot >> bits, slot & ((1 << bits) - 1)
        return page.clamp(max=self.a.k_pages.shape[0] - 1), offset


@unseen("write-heads-in-wrong-order", words="kv heads")
class FirstHeadOfKeys(Write):
    def keys(self, k: torch.Tensor) -> torch.Tensor:
        k = super().keys(k)
        return k[:, :1].expand_as(k)


@unseen("write-one-part-in-both")
class KeysInBoth(Write):
    def values(self, v: torch.Tensor) -> torch.Tensor:
        if v.shape != self.a.k.shape:
            return v
        k = self.a.k.float()
        return self.keys(self.turned(k, self.a.k_norm, "k") if self.a.cos is not None else k)


@unseen("write-layout-as-another", words="layout hnd|layout vllm_joint|layout other")
class HndAsNhd(Write):
    """Pages with heads first are stored as if slots came first."""

    def put(self, part: str, pages: torch.Tensor, made: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> None:
        if self.a.layout != "hnd":
            return super().put(part, pages, made, page, offset)
        heads, size = pages.shape[1], pages.shape[2]
        flat = offset[:, None] * heads + torch.arange(heads)
        pages[page[:, None], flat // size, flat % size] = made


@unseen(words="int64")
class SlotsInTheirHalves(Write):
    """64-bit slots are read as 32-bit ones."""

    def halves(self) -> torch.Tensor:
        slots = self.a.slots
        return slots.view(torch.int32)[: slots.shape[0]] if slots.dtype is torch.int64 else slots

    def slot(self) -> torch.Tensor:
        return self.halves().long()

    def kept(self) -> torch.Tensor:
        return (self.halves() >= 0).nonzero().flatten()


@unseen("write-tokens-missing", words="not stored|from a number|from q_len|new tokens")
class GridOfSixteen(Write):
    """Only the first 16 tokens are stored."""

    def kept(self) -> torch.Tensor:
        return super().kept()[super().kept() < 16]


@unseen(words="head_dim")
class DimsInSixteens(Write):
    """The dims of keys beyond a multiple of 16 are not computed."""

    def keys(self, k: torch.Tensor) -> torch.Tensor:
        k = super().keys(k).clone()
        k[..., k.shape[-1] // 16 * 16 :] = 0
        return k


@unseen(words="page")
class PageOfFirstToken(Write):
    """All new tokens of a sequence go to the page of its first one."""

    def place(self, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page, offset = super().place(slot)
        if self.a.q_starts is None:
            return page, offset
        first = self.a.q_starts.long()
        rows = self.kept()
        starts = first[torch.searchsorted(first, rows, right=True) - 1]
        of_first = self.a.slots.long()[starts] // self.page_size()
        return torch.where(of_first >= 0, of_first, page), offset
