"""`quire explain`: which kernel would run a call, why, why not the others; and the same question about vLLM's kernels."""

from __future__ import annotations

import argparse
import json

from quire.cache.format import FORMATS
from quire.cache.layout import LAYOUTS
from quire.dispatch.choose import OPERATIONS, choose
from quire.dispatch.decision import Decision
from quire.dispatch.vllm import RULES, VllmCall, explain_vllm
from quire.errors import ArgumentError, KernelError
from quire.platform import NAMED, Platform
from quire.problem import Extent, Problem

HELP = "say which kernel would run a call, why, and why not the others"
EXAMPLES = """\
examples:
  quire explain                                              a plain decode on this machine
  quire explain --arch sm90 --max-q-len 512 --kv-dtype fp8   a prefill over an fp8 cache on an H100
  quire explain --kernel torch --json                        one kernel by name, for programs
  quire explain call.safetensors --arch gfx942               a call that quire.record saved: what it got there, and elsewhere
  quire explain --as vllm --arch gfx942 --q-heads 64 --kv-heads 64 --head-dim 128 --page-size 32 --kv-dtype fp8_e5m2
                                                             which of vLLM's kernels, and what then happens

exit status: 0 a kernel runs, 1 none does, 2 the question is wrong; about vLLM 0, whatever the answer
"""

VLLM_CACHE_TYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
Q_TYPES = ("fp32", "fp16", "bf16", "e4m3fn", "e4m3fnuz", "e5m2")

# Everybody's spellings. fp8 and fp8_e4m3 are not among them: they mean the platform's own flavour.
SPELLINGS = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3fn",
    "fp8_e4m3fn": "e4m3fn",
    "float8_e4m3fnuz": "e4m3fnuz",
    "fp8_e4m3fnuz": "e4m3fnuz",
    "float8_e5m2": "e5m2",
    "fp8_e5m2": "e5m2",
}


def add_problem_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that describe a machine and a layer."""
    add = parser.add_argument_group("the machine").add_argument
    add("--arch", metavar="NAME", help=f"by default this machine; or {', '.join(NAMED)}")

    add = parser.add_argument_group("the problem").add_argument
    add("--q-heads", type=_count, default=32, metavar="N", help="query heads (32)")
    add("--kv-heads", type=_count, default=8, metavar="N", help="key and value heads (8)")
    add("--head-dim", type=_count, default=128, metavar="N", help="size of a head (128)")
    add("--v-head-dim", type=_count, metavar="N", help="size of a value head, if it differs")
    add("--page-size", type=_count, default=16, metavar="N", help="tokens in a page (16)")
    add(
        "--kv-dtype",
        default="auto",
        metavar="TYPE",
        help="how the cache stores an element: auto (as q), bf16, fp8_e4m3, fp8_e5m2, int8, ...",
    )
    add("--q-dtype", default="bf16", metavar="TYPE", help="the type of q (bf16)")
    add("--out-dtype", default="auto", metavar="TYPE", help="the type of the output (auto: as q, bf16 for fp8 queries)")
    add(
        "--scales",
        choices=("tensor", "head", "token"),
        default="tensor",
        help="what one scale of a quantised cache covers (tensor)",
    )
    add("--layout", choices=tuple(LAYOUTS), default="nhd", help="the order of axes in a page (nhd)")
    add("--form", choices=("full", "context"), default="full", help="context: new tokens come beside the cache (full)")
    add("--window", "--sliding-window", type=int, default=0, metavar="N", help="visible keys, the query's own included (0: all)")
    add("--softcap", type=float, nargs="?", const=1.0, metavar="CAP", help="logits are capped")
    for flag, text in (
        ("--alibi", "ALiBi slopes"),
        ("--sinks", "attention sinks"),
        ("--mask", "a tree mask over the new tokens"),
        ("--lse", "the log-sum-exp is asked for"),
        ("--non-causal", "queries also see later keys"),
        ("--batch-invariant", "bits must not depend on the batch"),
    ):
        add(flag, action="store_true", help=text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE", help="a call that quire.record saved, instead of a problem by flags")
    add_problem_arguments(parser)
    add = parser.add_argument_group("the batch").add_argument
    add("--seqs", type=_count, default=1, metavar="N", help="sequences in the batch (1)")
    add("--max-q-len", type=_count, default=1, metavar="N", help="most new tokens of a sequence (1)")
    add("--max-kv-len", "--max-seq-len", type=_count, default=4096, metavar="N", help="most tokens of a sequence (4096)")
    add("--padded-pages", action="store_true", help="pages lie apart in memory (only vLLM asks)")
    add("--capturing", action="store_true", help="the call is recorded into a CUDA graph")
    add = parser.add_argument_group("the question").add_argument
    add("--operation", choices=OPERATIONS, default="attend", help="attend, write keys and values, or audit the ledger (attend)")
    add("--kernel", metavar="NAME", help="ask for one kernel by name")
    add("--as", dest="whose", choices=("quire", "vllm"), default="quire", help="whose kernels (quire)")
    add(
        "--rule",
        choices=(*RULES, "both"),
        default="both",
        help="vLLM's rule of today, of the seeds (November 2025), or both (both)",
    )
    add("--no-custom-paged-attn", action="store_true", help="vLLM ran with VLLM_ROCM_CUSTOM_PAGED_ATTN=0 (the seeds' rule asks)")
    add("--aiter-paged-attn", action="store_true", help="vLLM ran with AITER's paged attention on (the seeds' rule asks)")
    add("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    if args.file is not None:
        return _recorded(args)
    if args.q_heads % args.kv_heads:
        raise ArgumentError("--q-heads", args.q_heads, f"a multiple of --kv-heads {args.kv_heads}")
    platform = platform_of(args)
    return _as_vllm(args, platform) if args.whose == "vllm" else _as_quire(args, platform)


def _recorded(args: argparse.Namespace) -> int:
    """The calls of a file: what was decided where they were made, and what would be decided here, or on `--arch`."""
    from quire.conformance.record import load

    able, answers = True, []
    platform = platform_of(args)
    for number, call in enumerate(load(args.file)):
        problem = call.problem.replace(device="cpu" if platform.vendor == "cpu" else "cuda")
        decision = _decide(args, problem, call.extent, platform)
        able &= decision.chosen is not None
        answers.append({"there": call.notes["decision"], "here": decision.to_dict()})
        if not args.json:
            there = call.decision or f"nothing: it raised {call.notes['error']}"
            print(f"call {number}, as it was decided on {call.notes['device']}:\n{there}\n\nand by {platform.name}:\n{decision}\n")
    if args.json:
        print(json.dumps({"file": args.file, "calls": answers}, indent=2))
    return 0 if able else 1


def platform_of(args: argparse.Namespace) -> Platform:
    try:
        return Platform.named(args.arch) if args.arch else Platform.detect()
    except ArgumentError as error:
        raise ArgumentError("--arch", error.given, error.allowed) from None


def _decide(args: argparse.Namespace, problem: Problem, extent: Extent, platform: Platform) -> Decision:
    try:
        return choose(problem, extent, platform, operation=args.operation, kernel=args.kernel, capturing=args.capturing)
    except KernelError as error:
        return error.decision or args.parser.error(f"--{error}")


def _as_quire(args: argparse.Namespace, platform: Platform) -> int:
    problem = problem_of(args, platform)
    decision = _decide(args, problem, extent_of(args), platform)
    print(json.dumps(decision.to_dict(), indent=2) if args.json else decision)
    return 0 if decision.chosen else 1


def _as_vllm(args: argparse.Namespace, platform: Platform) -> int:
    for name in ("v_head_dim", "softcap", "mask", "lse", "batch_invariant", "kernel", "capturing"):
        if getattr(args, name):
            raise ArgumentError(f"--{name.replace('_', '-')}", "with --as vllm", "nothing: vLLM's rule has no such argument")
    for name, allowed in (("operation", ("attend",)), ("form", ("full",)), ("scales", ("tensor",)), ("layout", ("nhd", "vllm_x"))):
        if getattr(args, name) not in allowed:
            given = f"{getattr(args, name)} with --as vllm"
            raise ArgumentError(f"--{name}", given, f"{allowed[-1]}: the rule is about decode rows over x-packed pages")
    if args.kv_dtype not in VLLM_CACHE_TYPES:
        raise ArgumentError("--kv-dtype", f"{args.kv_dtype!r} with --as vllm", f"vLLM's own words: {', '.join(VLLM_CACHE_TYPES)}")
    out_dtype = _type_of("--out-dtype", args.out_dtype, Q_TYPES, platform, auto=args.q_dtype)
    if args.out_dtype != "auto" and "e4m3" not in out_dtype:
        raise ArgumentError("--out-dtype", f"{args.out_dtype} with --as vllm", "auto, or fp8 for an output scale")
    call = VllmCall(
        platform=platform,
        q_heads=args.q_heads,
        kv_heads=args.kv_heads,
        head_size=args.head_dim,
        block_size=args.page_size,
        kv_cache_dtype=args.kv_dtype,
        q_dtype=_type_of("--q-dtype", args.q_dtype, ("fp32", "fp16", "bf16"), platform),
        max_seq_len=args.max_kv_len,
        sliding_window=args.window,
        alibi=args.alibi,
        sinks=args.sinks,
        output_scale="e4m3" in out_dtype,
        native_strides=not args.padded_pages,
        custom_paged_attn=not args.no_custom_paged_attn,
        aiter_paged_attn=args.aiter_paged_attn,
    )
    decisions = [explain_vllm(call, rule) for rule in (RULES if args.rule == "both" else (args.rule,))]
    if args.json:
        answers = [decision.to_dict() for decision in decisions]
        print(json.dumps({"as": "vllm", "arch": platform.arch, "gqa_ratio": call.gqa_ratio, "answers": answers}, indent=2))
    else:
        print("\n\n".join(map(str, decisions)))
    return 0


def extent_of(args: argparse.Namespace) -> Extent:
    """How large a batch the flags describe: every sequence has the most new tokens."""
    if args.max_q_len > args.max_kv_len and not args.non_causal:
        raise ArgumentError("--max-q-len", args.max_q_len, f"at most --max-kv-len {args.max_kv_len}: keys include the new tokens")
    return Extent(args.seqs, args.seqs * args.max_q_len, args.max_q_len, args.max_kv_len)


def problem_of(args: argparse.Namespace, platform: Platform) -> Problem:
    """The problem that the flags describe."""
    if args.window < 0:
        raise ArgumentError("--window", args.window, "0 for no window, or the number of visible keys")
    if args.softcap is not None and not args.softcap > 0:
        raise ArgumentError("--softcap", args.softcap, "a number above 0")
    q_dtype = _type_of("--q-dtype", args.q_dtype, Q_TYPES, platform)
    out_dtype = _type_of("--out-dtype", args.out_dtype, Q_TYPES, platform, auto="bf16" if q_dtype.startswith("e") else q_dtype)
    format = _type_of("--kv-dtype", args.kv_dtype, tuple(FORMATS), platform, auto=q_dtype)
    if args.batch_invariant and args.form == "context" and FORMATS[format].quantised:
        raise ArgumentError("--form", "context with --batch-invariant", f"full: over {format} the forms differ by a rounding")
    side = args.window - 1 if args.window else None
    return Problem(
        q_heads=args.q_heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        page_size=args.page_size,
        v_head_dim=args.v_head_dim or 0,
        q_dtype=q_dtype,
        out_dtype=out_dtype,
        format=format,
        layout=args.layout,
        scales=args.scales if FORMATS[format].quantised else "none",
        form=args.form,
        causal="no" if args.non_causal else "yes",
        window=(side, side),
        softcap=args.softcap is not None,
        alibi=args.alibi,
        sinks=args.sinks,
        mask=args.mask,
        lse=args.lse,
        batch_invariant=args.batch_invariant,
        device="cpu" if platform.vendor == "cpu" else "cuda",
    )


def _type_of(flag: str, given: str, allowed: tuple[str, ...], platform: Platform, auto: str | None = None) -> str:
    """A type in Quire's words, whoever's words it is given in."""
    own = platform.fp8 or "e4m3fn"
    known = {"auto": auto} if auto else {}
    known |= {name: name for name in allowed}
    known |= {name: meant for name, meant in {**SPELLINGS, "fp8": own, "fp8_e4m3": own}.items() if meant in allowed}
    name = given.removeprefix("torch.")
    if name not in known:
        raise ArgumentError(flag, repr(given), ", ".join(known))
    return known[name]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"given {text}; allowed: a whole number of 1 or more")
    return int(text)
