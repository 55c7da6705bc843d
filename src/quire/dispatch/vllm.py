"""vLLM's choice for the decode rows of `chunked_prefill_paged_decode`, as data: which of *its* kernels runs, why, and what
then happens. Words are vLLM's here: block_size is our page_size, head_size our head_dim.

Two rules are kept: today's (vllm-project/vllm a014e35f38c, August 2026) and the seeds' (e5534249196, November 2025). A rule only
selects; what the selected kernel then does is read from the kernels of a014e35f38c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from quire.dispatch.kernel import Except, Finding, Limit, OneOf, Span, judge, words
from quire.errors import ArgumentError
from quire.platform import Platform

TITLES = {"today": "vLLM's rule of today (a014e35f38c)", "seeds": "vLLM's rule of November 2025 (seeds, e5534249196)"}
KERNELS = {"custom": "paged_attention_rocm", "triton": "kernel_paged_attention_2d"}


@dataclass(frozen=True)
class VllmCall:
    """What vLLM's rule is asked about, in vLLM's words."""

    platform: Platform
    q_heads: int
    kv_heads: int
    head_size: int
    block_size: int
    kv_cache_dtype: str = "auto"
    q_dtype: str = "fp16"
    max_seq_len: int = 1024
    sliding_window: int = 0
    """As the operator is given it: 0 or less is no window."""
    alibi: bool = False
    sinks: bool = False
    output_scale: bool = False
    """Whether the output is stored as fp8."""
    native_strides: bool = True
    """Whether the pages of K and of V are packed, without padding between them."""
    custom_paged_attn: bool = True
    """The switch VLLM_ROCM_CUSTOM_PAGED_ATTN, which vLLM no longer has."""
    aiter_paged_attn: bool = False
    """Whether AITER's paged attention is enabled: a switch of the seeds' time as well."""

    def __post_init__(self) -> None:
        for name in ("q_heads", "kv_heads", "head_size", "block_size", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, getattr(self, name), "1 or more")
        if self.q_heads % self.kv_heads:
            raise ArgumentError("q_heads", self.q_heads, f"a multiple of kv_heads = {self.kv_heads}")
        if self.q_dtype not in ("fp16", "bf16", "fp32"):
            raise ArgumentError("q_dtype", repr(self.q_dtype), "fp16, bf16 or fp32")
        object.__setattr__(self, "sliding_window", max(self.sliding_window, 0))

    @property
    def gqa_ratio(self) -> int:
        """Query heads per kv head: 64 heads over 64 kv heads are ratio 1, over 1 kv head ratio 64."""
        return self.q_heads // self.kv_heads

    @property
    def block_size_is_power_of_two(self) -> bool:
        return self.block_size & (self.block_size - 1) == 0

    @property
    def fp8_format(self) -> str:
        """What an fp8 string stands for; any string without fp8 means no conversion."""
        if "fp8" not in self.kv_cache_dtype:
            return "none"
        return {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}.get(self.kv_cache_dtype, self.kv_cache_dtype)

    @property
    def rdna(self) -> bool:
        """Whether the custom kernel takes its RDNA launcher: by prefix, so gfx1250 does too."""
        return self.platform.arch.startswith(("gfx11", "gfx12"))


@dataclass(frozen=True)
class Containing:
    """Names that contain one of these parts: vLLM's way to tell architectures apart."""

    parts: tuple[str, ...]

    def __contains__(self, given: str) -> bool:
        return any(part in given for part in self.parts)

    def __str__(self) -> str:
        return str(OneOf(tuple(f"{part}*" for part in self.parts)))


class Branch(NamedTuple):
    """One arm of a rule: the architectures it covers and what it asks of a call."""

    arches: Containing
    limits: tuple[Limit, ...]


def _limit(rule: str, *allowed: Any) -> Limit:
    return Limit(rule, attrgetter(rule), OneOf(allowed))


_EITHER = (_limit("sliding_window", 0), _limit("q_dtype", "fp16", "bf16"))
_CDNA = (
    *_EITHER,
    _limit("head_size", 64, 128),
    _limit("block_size", 16, 32),
    Limit("gqa_ratio", attrgetter("gqa_ratio"), Span(1, 16)),
    Limit("max_seq_len", attrgetter("max_seq_len"), Span(None, 131072)),
    _limit("sinks", False),
)
_RDNA = (
    *_EITHER,
    _limit("head_size", 128),
    _limit("block_size", 16),
    Limit("gqa_ratio", attrgetter("gqa_ratio"), Span(3, 16)),
    Limit("max_seq_len", attrgetter("max_seq_len"), Span(None, 131072)),
    _limit("alibi", False),
    _limit("kv_cache_dtype", "auto"),
    _limit("sinks", False),
)
_SWITCH = _limit("custom_paged_attn", True)
# Not part of the rule: the caller overrules it. The seeds' caller did not.
_VETOES = (_limit("block_size_is_power_of_two", True), _limit("native_strides", True))

RULES: dict[str, tuple[Branch, ...]] = {
    "today": (
        Branch(Containing(("gfx9", "gfx1250")), (*_CDNA, *_VETOES)),
        Branch(Containing(("gfx11", "gfx12")), (*_RDNA, *_VETOES)),
    ),
    "seeds": (
        Branch(Containing(("gfx90a", "gfx942", "gfx950")), (*_CDNA, _SWITCH, _limit("aiter_paged_attn", False))),
        Branch(Containing(("gfx11", "gfx12")), (*_RDNA, _SWITCH)),
    ),
}


class Consequence(NamedTuple):
    """What becomes of a selected kernel if a limit of its own does not hold."""

    kernels: tuple[str, ...]
    limit: Limit
    outcome: str
    why: str


_BOTH = ("custom", "triton")
# In the order in which a call meets them: the operator, the host side of the kernel, the kernel.
CONSEQUENCES: tuple[Consequence, ...] = (
    Consequence(
        _BOTH,
        Limit("vendor", attrgetter("platform.vendor"), OneOf(("nvidia", "amd"))),
        "raises",
        "the operator imports vLLM's ROCm platform, which needs a GPU",
    ),
    Consequence(
        _BOTH,
        Limit("fp8_format", attrgetter("fp8_format"), OneOf(("none", "e4m3", "e5m2"))),
        "raises",
        "of the fp8 strings it knows fp8, fp8_e4m3 and fp8_e5m2",
    ),
    Consequence(("custom",), Limit("fp8_format", attrgetter("fp8_format"), OneOf(("none", "e4m3"))), "raises", "reads e4m3 only"),
    Consequence(
        ("custom",),
        _limit("kv_cache_dtype", "auto", "fp8", "fp8_e4m3"),
        "raises",
        "takes the cache strings auto, fp8 and fp8_e4m3 only, even for a 16-bit cache",
    ),
    Consequence(
        ("custom",),
        Limit("output_scale", lambda call: call.output_scale and call.platform.arch == "gfx90a", OneOf((False,))),
        "raises",
        "writes no fp8 output on gfx90a",
    ),
    Consequence(
        ("custom",),
        Limit("arch", attrgetter("platform.arch"), Except(("gfx1250",))),
        "traps",
        "takes the RDNA launcher, whose matrix helper is __builtin_trap() on gfx1250",
    ),
    Consequence(
        ("custom",),
        Limit("arch", attrgetter("platform.arch"), Containing(("gfx90a", "gfx942", "gfx950", "gfx11", "gfx12"))),
        "asserts",
        "is compiled for gfx90a, gfx942 and gfx950; on other gfx9 its body is assert(false)",
    ),
    Consequence(
        ("triton",),
        Limit("fp8_format", lambda call: (call.platform.arch, call.fp8_format), Except((("sm80", "e4m3"), ("sm86", "e4m3")))),
        "raises",
        "Triton has no e4m3 below sm89",
    ),
)

# What runs and still surprises: (kernel, when, note)
NOTES: tuple[tuple[str, Callable[[VllmCall], bool], str], ...] = (
    (
        "custom",
        lambda call: True,
        "query_start_loc must be int32: it is reinterpreted unchecked, and as int64 every decode row is skipped",
    ),
    ("custom", lambda call: True, "max_seq_len must bound every row: tokens beyond it are left out without a word"),
    ("custom", lambda call: call.rdna and call.output_scale, "output_scale is ignored on RDNA"),
    (
        "triton",
        lambda call: True,
        "one program goes through all keys of a sequence: no split over the context, and no skip by window",
    ),
    (
        "triton",
        lambda call: call.platform.vendor == "amd" and call.fp8_format == "e5m2",
        "the cache is read as e5m2, which vLLM's writers on ROCm refuse or store as e4m3",
    ),
)


@dataclass(frozen=True)
class VllmDecision:
    """Which of vLLM's kernels a rule selects for decode rows, why, and what then happens."""

    call: VllmCall
    rule: str
    selected: str
    """custom or triton."""
    reasons: tuple[Finding, ...]
    """Every question of the rule; one that does not hold is why the custom kernel was not selected."""
    outcome: str = "runs"
    """runs, raises, traps or asserts."""
    why: str | None = None
    """Why it does not run, in words."""
    then: Finding | None = None
    """The limit of the selected kernel itself that does not hold."""
    notes: tuple[str, ...] = ()
    """What surprises although it runs."""

    @property
    def answer(self) -> str:
        """All of it in one sentence."""
        refused = [str(reason) for reason in self.reasons if not reason.holds]
        selected = f"Triton kernel selected by the rule ({refused[0]})" if refused else "custom kernel selected by the rule"
        if self.outcome == "runs":
            return f"{selected}, and it runs"
        verb = {"raises": "raise", "traps": "trap", "asserts": "fail an assertion"}[self.outcome]
        return f"{selected}, and it will {verb}: {self.why}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "answer": self.answer,
            "selected": self.selected,
            "kernel": KERNELS[self.selected],
            "outcome": self.outcome,
            "why": self.why,
            "gqa_ratio": self.call.gqa_ratio,
            "reasons": [_row(reason) for reason in self.reasons],
            "then": self.then and _row(self.then),
            "notes": list(self.notes),
            "call": {**asdict(self.call), "platform": self.call.platform.arch},
        }

    def __str__(self) -> str:
        call = self.call
        rows = [("holds" if reason.holds else "fails", reason) for reason in self.reasons]
        rows += [(self.outcome, self.then)] if self.then else []
        width = max(len(finding.rule) for _, finding in rows)
        lines = [
            f"{TITLES[self.rule]}: {self.answer}",
            f"  {KERNELS[self.selected]} on {call.platform.arch}, "
            f"group ratio {call.gqa_ratio} ({call.q_heads} query heads / {call.kv_heads} kv heads)",
        ]
        for verdict, finding in rows:
            lines.append(f"  {verdict:7}  {finding.rule:{width}}  given {words(finding.given)}, allowed {finding.allowed}")
        return "\n".join((*lines, *(f"  note: {note}" for note in self.notes)))


def explain_vllm(call: VllmCall, rule: str = "today") -> VllmDecision:
    """Asks one of vLLM's rules about a call."""
    if rule not in RULES:
        raise ArgumentError("rule", repr(rule), " or ".join(RULES))
    branches, arch = RULES[rule], call.platform.arch
    everywhere = Branch(Containing(tuple(part for b in branches for part in b.arches.parts)), ())
    branch = next((b for b in branches if arch in b.arches), everywhere)
    reasons = judge((Limit("arch", attrgetter("platform.arch"), branch.arches), *branch.limits), call)
    selected = "custom" if all(reason.holds for reason in reasons) else "triton"
    for consequence in CONSEQUENCES:
        (finding,) = judge((consequence.limit,), call)
        if selected in consequence.kernels and not finding.holds:
            return VllmDecision(call, rule, selected, reasons, consequence.outcome, consequence.why, finding)
    notes = tuple(note for kernel, when, note in NOTES if kernel == selected and when(call))
    return VllmDecision(call, rule, selected, reasons, notes=notes)


def _row(finding: Finding) -> dict[str, Any]:
    """vLLM's limits name no change: what to do about them is not ours to say."""
    return {key: value for key, value in finding.to_dict().items() if key != "change"}
