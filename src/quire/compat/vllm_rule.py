"""How vLLM chooses the kernel for decode sequences in `chunked_prefill_paged_decode`, as data: which of *its* kernels runs, why,
and what then happens. Names are vLLM's: block_size is our page_size, head_size our head_dim.

There are two rules: today's (vllm-project/vllm a014e35f38c, August 2026) and that of November 2025 (e5534249196). A rule only
selects; what the selected kernel then does is read from the kernels of a014e35f38c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from quire.dispatch.kernel import Except, IntRange, Limit, LimitResult, OneOf, as_text, check_limits
from quire.errors import ArgumentError
from quire.platform import Platform

TITLES = {"today": "vLLM's rule of today (a014e35f38c)", "2025-11": "vLLM's rule of November 2025 (e5534249196)"}
CACHE_TYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""What vLLM calls the types of a cache."""
KERNELS = {"custom": "paged_attention_rocm", "triton": "kernel_paged_attention_2d"}


@dataclass(frozen=True)
class VllmCall:
    """The inputs of vLLM's rule, with vLLM's names."""

    platform: Platform
    q_heads: int
    kv_heads: int
    head_size: int
    block_size: int
    kv_cache_dtype: str = "auto"
    q_dtype: str = "fp16"
    max_seq_len: int = 1024
    sliding_window: int = 0
    """The argument of the operator: 0 or less means no window."""
    alibi: bool = False
    sinks: bool = False
    output_scale: bool = False
    """Whether the output is stored as fp8."""
    native_strides: bool = True
    """Whether the pages of K and of V are packed, without padding between them."""
    custom_paged_attn: bool = True
    """The switch VLLM_ROCM_CUSTOM_PAGED_ATTN, which vLLM no longer has."""
    aiter_paged_attn: bool = False
    """Whether AITER's paged attention is enabled: vLLM no longer has this switch either."""

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
        """The meaning of an fp8 string; any string without fp8 means no conversion."""
        if "fp8" not in self.kv_cache_dtype:
            return "none"
        return {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}.get(self.kv_cache_dtype, self.kv_cache_dtype)

    @property
    def rdna(self) -> bool:
        """Whether the custom kernel takes its RDNA launcher: by prefix, so gfx1250 does too."""
        return self.platform.arch.startswith(("gfx11", "gfx12"))


@dataclass(frozen=True)
class Containing:
    """Names that contain one of these parts: how vLLM distinguishes architectures."""

    parts: tuple[str, ...]

    def __contains__(self, given: str) -> bool:
        return any(part in given for part in self.parts)

    def __str__(self) -> str:
        return str(OneOf(tuple(f"{part}*" for part in self.parts)))


class Branch(NamedTuple):
    """One branch of a rule: its architectures and its limits."""

    arches: Containing
    limits: tuple[Limit, ...]


def _limit(rule: str, *allowed: Any) -> Limit:
    return Limit(rule, attrgetter(rule), OneOf(allowed))


_EITHER = (_limit("sliding_window", 0), _limit("q_dtype", "fp16", "bf16"))
_CDNA = (
    *_EITHER,
    _limit("head_size", 64, 128),
    _limit("block_size", 16, 32),
    Limit("gqa_ratio", attrgetter("gqa_ratio"), IntRange(1, 16)),
    Limit("max_seq_len", attrgetter("max_seq_len"), IntRange(None, 131072)),
    _limit("sinks", False),
)
_RDNA = (
    *_EITHER,
    _limit("head_size", 128),
    _limit("block_size", 16),
    Limit("gqa_ratio", attrgetter("gqa_ratio"), IntRange(3, 16)),
    Limit("max_seq_len", attrgetter("max_seq_len"), IntRange(None, 131072)),
    _limit("alibi", False),
    _limit("kv_cache_dtype", "auto"),
    _limit("sinks", False),
)
_SWITCH = _limit("custom_paged_attn", True)
# Not part of the rule itself: its caller checks these too. The caller of November 2025 did not.
_CALLER_LIMITS = (_limit("block_size_is_power_of_two", True), _limit("native_strides", True))

RULES: dict[str, tuple[Branch, ...]] = {
    "today": (
        Branch(Containing(("gfx9", "gfx1250")), (*_CDNA, *_CALLER_LIMITS)),
        Branch(Containing(("gfx11", "gfx12")), (*_RDNA, *_CALLER_LIMITS)),
    ),
    "2025-11": (
        Branch(Containing(("gfx90a", "gfx942", "gfx950")), (*_CDNA, _SWITCH, _limit("aiter_paged_attn", False))),
        Branch(Containing(("gfx11", "gfx12")), (*_RDNA, _SWITCH)),
    ),
}


class Consequence(NamedTuple):
    """What happens if a selected kernel's own limit does not hold."""

    kernels: tuple[str, ...]
    limit: Limit
    outcome: str
    why: str


_BOTH = ("custom", "triton")
# In the order of execution: the operator, the host code of the kernel, the kernel.
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

# Unexpected behaviour of kernels that run: (kernel, condition, note)
NOTES: tuple[tuple[str, Callable[[VllmCall], bool], str], ...] = (
    (
        "custom",
        lambda call: True,
        "query_start_loc must be int32: it is reinterpreted unchecked, and with int64 every decode sequence is skipped",
    ),
    ("custom", lambda call: True, "max_seq_len must bound every sequence: tokens beyond it are silently ignored"),
    ("custom", lambda call: call.rdna and call.output_scale, "output_scale is ignored on RDNA"),
    (
        "triton",
        lambda call: True,
        "one program processes all keys of a sequence: no split KV, and a window skips no keys",
    ),
    (
        "triton",
        lambda call: call.platform.vendor == "amd" and call.fp8_format == "e5m2",
        "the cache is read as e5m2, which vLLM's writers on ROCm refuse or store as e4m3",
    ),
)


@dataclass(frozen=True)
class VllmDecision:
    """Which of vLLM's kernels a rule selects for decode sequences, why, and what then happens."""

    call: VllmCall
    rule: str
    selected: str
    """custom or triton."""
    reasons: tuple[LimitResult, ...]
    """Every limit of the rule; those that do not hold are why the custom kernel was not selected."""
    outcome: str = "runs"
    """runs, raises, traps or asserts."""
    why: str | None = None
    """Why it does not run."""
    then: LimitResult | None = None
    """The limit of the selected kernel itself that does not hold."""
    notes: tuple[str, ...] = ()
    """Unexpected behaviour of the kernel."""

    @property
    def answer(self) -> str:
        """The decision in one sentence."""
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
            lines.append(f"  {verdict:7}  {finding.rule:{width}}  given {as_text(finding.given)}, allowed {finding.allowed}")
        return "\n".join((*lines, *(f"  note: {note}" for note in self.notes)))


def explain_vllm(call: VllmCall, rule: str = "today") -> VllmDecision:
    """Applies one of vLLM's rules to a call."""
    if rule not in RULES:
        raise ArgumentError("rule", repr(rule), " or ".join(RULES))
    branches, arch = RULES[rule], call.platform.arch
    everywhere = Branch(Containing(tuple(part for b in branches for part in b.arches.parts)), ())
    branch = next((b for b in branches if arch in b.arches), everywhere)
    reasons = check_limits((Limit("arch", attrgetter("platform.arch"), branch.arches), *branch.limits), call)
    selected = "custom" if all(reason.holds for reason in reasons) else "triton"
    for consequence in CONSEQUENCES:
        (finding,) = check_limits((consequence.limit,), call)
        if selected in consequence.kernels and not finding.holds:
            return VllmDecision(call, rule, selected, reasons, consequence.outcome, consequence.why, finding)
    notes = tuple(note for kernel, when, note in NOTES if kernel == selected and when(call))
    return VllmDecision(call, rule, selected, reasons, notes=notes)


def _row(finding: LimitResult) -> dict[str, Any]:
    """A limit without `change`, which vLLM's limits do not have."""
    return {key: value for key, value in finding.to_dict().items() if key != "change"}
