"""`quire explain`: which kernel would run a call, why, what would be faster; and the same for vLLM's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import click

from quire.cli.command import Args, Argument, ChoiceOf, Command, Count, OneOfNames, Option, Readable, answer, flag
from quire.cli.known_layers import layers_of, like_option, options_of
from quire.cli.problem_options import Q_TYPES, own_fp8, platform_of, problem_of, problem_options, rope_of, type_of
from quire.cli.sheet import show, write
from quire.compat.vllm_rule import CACHE_TYPES, RULES, VllmCall, explain_vllm
from quire.dispatch.catalogue import CATALOGUE
from quire.dispatch.choose import OPERATIONS, choose
from quire.dispatch.decision import Decision
from quire.dispatch.summary import Line, summary
from quire.errors import ArgumentError, KernelError
from quire.options import FEATURES
from quire.plan.layer_kinds import AttentionLayers
from quire.platform import Platform
from quire.problem import Extent, Problem
from quire.rope import Rope

HELP = """Shows which kernel would run a call, why, and what would be faster: a preferred kernel that was refused for something that
you can change. Nothing is computed; the choice can be explained for any machine."""
EXAMPLES = """\
examples:
  quire explain                                              a plain decode on this machine
  quire explain --arch h100 --max-q-len 512 --kv-dtype fp8   a prefill over an fp8 cache on an H100
  quire explain --arch mi300x --operation step --all         the write and the attention, every limit of every kernel
  quire explain --arch h100 --seqs 64 --shared-prefix 3000   decodes of 64 sequences over one prompt, whose pages they share
  quire explain --arch h100 --select positions               each query sees the keys that it selects
  quire explain --arch h100 --operation step --rope          the write rotates keys and queries
  quire explain --kernel torch --json                        one kernel by name, for programs
  quire explain --like gemma-4 --arch h100 --kv-dtype fp8    the layers of a known model, by kind
  quire explain call.safetensors --arch gfx942               a recorded call: which kernel ran, which would run on gfx942
  quire explain --as vllm --arch gfx942 --q-heads 64 --kv-heads 64 --head-dim 128 --page-size 32 --kv-dtype fp8
                                                             which of vLLM's kernels would run, and why

exit status: 0 a kernel runs, 1 none does, 2 an argument is wrong; always 0 with --as vllm
"""
COLORS = {"chosen": "bold green", "faster": "bold yellow", "possible": "bold yellow", "refused": "red", "note": "yellow"}
COLORS |= {"could also run": "dim", "to get": "bold yellow", "because": "dim"}
VLLM_COLORS = {
    "vLLM": "bold",
    "holds": "green",
    "fails": "red",
    "raises": "red",
    "traps": "red",
    "asserts": "red",
    "note": "yellow",
}


def _kernels() -> list[str]:
    return list(dict.fromkeys(kernel.name for kernel in CATALOGUE))


_BATCH, _REQUEST, _VLLM = "the batch", "request", "vLLM's kernels (with --as vllm)"
PARAMETERS: list[click.Parameter] = [
    Argument(
        "file", "calls that quire.record saved, instead of a layer by options", required=False, metavar="[FILE]", type=Readable()
    ),
    Option("--operation", type=ChoiceOf((*OPERATIONS, "step")), default="attend", group=_REQUEST, help="the operation (attend)"),
    Option("--kernel", metavar="NAME", type=OneOfNames(_kernels), group=_REQUEST, help="request a kernel by name"),
    flag("--capturing", "the call is captured into a CUDA graph", _REQUEST),
    flag("--all", "show every limit of every kernel", _REQUEST, default=False),
    Option("--seqs", type=Count, default=1, group=_BATCH, help="sequences in the batch (1)"),
    Option("--max-q-len", type=Count, default=1, group=_BATCH, help="most new tokens of a sequence (1)"),
    Option("--max-kv-len", "--max-seq-len", type=Count, default=4096, group=_BATCH, help="most tokens of a sequence (4096)"),
    Option("--shared-prefix", type=Count, metavar="TOKENS", group=_BATCH, help="first tokens whose pages all sequences share"),
    like_option(),
    *problem_options(),
    Option("--as", "whose", type=ChoiceOf(("quire", "vllm")), default="quire", group=_VLLM, help="whose kernels (quire)"),
    Option(
        "--rule",
        type=ChoiceOf((*RULES, "both")),
        default="both",
        group=_VLLM,
        help="how vLLM chooses: today (August 2026), as it did in November 2025, or both (both)",
    ),
    flag("--padded-pages", "pages are padded, not contiguous", _VLLM),
    flag("--no-custom-paged-attn", "vLLM of November 2025 ran with VLLM_ROCM_CUSTOM_PAGED_ATTN=0", _VLLM),
    flag("--aiter-paged-attn", "vLLM of November 2025 ran with AITER's paged attention", _VLLM),
]


def run(args: Args) -> int:
    platform = platform_of(args)
    if args.like is not None:
        return _as_known(args, platform)
    if args.file is not None:
        return _recorded(args, platform)
    return _as_vllm(args, platform) if args.whose == "vllm" else _as_quire(args, platform)


def _recorded(args: Args, platform: Platform) -> int:
    """The calls of a file: what was decided where they were made, and what would be decided here, or on `--arch`."""
    from quire.conformance.recording.record import load

    calls = load(args.file)
    decisions = []
    for call in calls:
        problem = call.problem.replace(device="cpu" if platform.vendor == "cpu" else "cuda")
        decisions.append(_decide(args, problem, call.extent, platform))

    def text() -> None:
        for number, (call, decision) in enumerate(zip(calls, decisions)):
            write(f"call {number}, as it was decided on {call.metadata['device']}:")
            if args.all and call.decision:
                write(call.decision, COLORS)
            else:
                show(_recorded_lines(call.metadata), COLORS)
            write(f"\nand on {platform.name}:")
            _show(args, decision)
            print()

    answers = [{"there": call.metadata["decision"], "here": decision.to_dict()} for call, decision in zip(calls, decisions)]
    answer(args, {"file": args.file, "calls": answers}, text)
    return 0 if all(decision.chosen for decision in decisions) else 1


def _recorded_lines(notes: dict[str, Any]) -> list[Line]:
    """What was chosen where a call was made, and why."""
    made = notes["decision"]
    if made is None:
        return [Line("chosen", f"none: it raised {notes['error']}")]
    return [Line("chosen", made["chosen"] or "none"), Line("because", made["because"])]


def _decide(args: Args, problem: Problem, extent: Extent, platform: Platform, rope: Rope | None = None) -> Decision:
    writes = problem if rope is None else problem.of_writes(rope.traits(True))

    def one(operation: str, kernel: str | None) -> Decision:
        given = writes if operation == "write" else problem
        try:
            return choose(given, extent, platform, operation=operation, kernel=kernel, capturing=args.capturing)
        except KernelError as error:
            if error.decision is None:
                raise click.UsageError(f"--{error}", click.get_current_context()) from None
            return error.decision

    if args.operation != "step":
        return one(args.operation, args.kernel)
    return replace(one("attend", args.kernel), operation="step", related=(one("write", None),))


def _show(args: Args, decision: Decision) -> None:
    if args.all:
        write("\n\n".join(map(str, (decision, *decision.related))), COLORS)
    else:
        show(summary(decision), COLORS)


def _as_quire(args: Args, platform: Platform) -> int:
    decision = _decide_layer(args, platform)
    found = decision.to_dict() | {"related": [other.to_dict() for other in decision.related]}
    answer(args, found, lambda: _show(args, decision))
    return 0 if all(one.chosen for one in (decision, *decision.related)) else 1


def _decide_layer(args: Args, platform: Platform) -> Decision:
    """The decision for the layer that the options describe."""
    rope = rope_of(args)
    if rope is not None and args.operation not in ("write", "step"):
        raise ArgumentError("--rope", f"with --operation {args.operation}", "--operation write or step: a write rotates")
    problem = problem_of(args, platform).replace(prefixes=bool(args.shared_prefix))
    return _decide(args, problem, extent_of(args), platform, rope)


def _as_known(args: Args, platform: Platform) -> int:
    """One explanation for each kind of layer that a known model has."""
    reason = "it explains Quire's kernels"
    model, kinds = layers_of(args, {"file": ("FILE", reason), "whose": ("--as", reason)})
    decisions = list(_decisions_of(args, platform, kinds))

    def text() -> None:
        for kind, decision in zip(kinds, decisions):
            write(f"{model}: {kind}")
            _show(args, decision)
            print()

    answers = [
        {
            "layers": kind.layers,
            "chunk": kind.chunk,
            **decision.to_dict(),
            "related": [other.to_dict() for other in decision.related],
        }
        for kind, decision in zip(kinds, decisions)
    ]
    answer(args, {"like": model, "kinds": answers}, text)
    return 0 if all(one.chosen for decision in decisions for one in (decision, *decision.related)) else 1


def _decisions_of(args: Args, platform: Platform, kinds: tuple[AttentionLayers, ...]) -> Iterator[Decision]:
    for kind, layer in zip(kinds, options_of(args, kinds)):
        longest = args.max_kv_len if kind.chunk is None else min(args.max_kv_len, kind.chunk)
        layer.max_kv_len, layer.max_q_len = longest, min(args.max_q_len, longest)
        if args.shared_prefix:
            layer.shared_prefix = min(args.shared_prefix, longest - layer.max_q_len)
        yield _decide_layer(layer, platform)


def extent_of(args: Args) -> Extent:
    """How large a batch the options describe: every sequence has the most new tokens."""
    if args.max_q_len > args.max_kv_len and not args.non_causal:
        raise ArgumentError("--max-q-len", args.max_q_len, f"at most --max-kv-len {args.max_kv_len}: keys include the new tokens")
    return Extent(args.seqs, args.seqs * args.max_q_len, args.max_q_len, args.max_kv_len, _saved_keys(args))


def _saved_keys(args: Args) -> int:
    """How many reads of keys are saved if the whole pages of `--shared-prefix` are read once."""
    if args.shared_prefix is None:
        return 0
    if args.seqs < 2:
        raise ArgumentError("--seqs", f"{args.seqs} with --shared-prefix {args.shared_prefix}", "2 or more: sequences share it")
    most = max(args.max_kv_len - args.max_q_len, 0)
    if args.shared_prefix > most:
        raise ArgumentError("--shared-prefix", args.shared_prefix, f"at most {most}: it lies before the new tokens")
    return (args.seqs - 1) * (args.shared_prefix // args.page_size * args.page_size)


def _as_vllm(args: Args, platform: Platform) -> int:
    decisions = [explain_vllm(_vllm_call(args, platform), rule) for rule in _rules(args)]
    answers = [decision.to_dict() for decision in decisions]
    call = decisions[0].call
    texts = [str(decision) if args.all else _failing(str(decision)) for decision in decisions]
    found = {"as": "vllm", "arch": platform.arch, "gqa_ratio": call.gqa_ratio, "answers": answers}
    answer(args, found, lambda: write("\n\n".join(texts), VLLM_COLORS))
    return 0


def _rules(args: Args) -> list[str]:
    return list(RULES) if args.rule == "both" else [args.rule]


def _failing(text: str) -> str:
    """An explanation without the limits that hold."""
    lines = text.splitlines()
    shown = [line for line in lines if not line.startswith("  holds")]
    hidden = len(lines) - len(shown)
    return "\n".join((*shown, f"  {hidden} limits hold: --all shows them") if hidden else shown)


def _vllm_call(args: Args, platform: Platform) -> VllmCall:
    """The options in vLLM's terms. Options that its rule has no argument for are refused."""
    known = {"alibi", "sinks"}
    features = tuple(feature for feature in FEATURES if feature not in known)
    others = ("spans", "select", "rope", "rope_interleaved", "qk_norm", "lse", "kernel", "capturing", "shared_prefix")
    for name in ("v_head_dim", "v_in_k", "v_dtype", *features, *others):
        if getattr(args, name) is not None and getattr(args, name) is not False:
            raise ArgumentError(f"--{name.replace('_', '-')}", "with --as vllm", "nothing: vLLM's rule has no such argument")
    only: dict[str, Any] = {"operation": ("attend",), "form": ("full",), "scales": ("tensor",), "layout": ("nhd", "vllm_x")}
    for name, allowed in only.items():
        if getattr(args, name) not in allowed:
            given = f"{getattr(args, name)} with --as vllm"
            raise ArgumentError(f"--{name}", given, f"{allowed[-1]}: the rule is about decodes over x-packed pages")
    if args.q_heads % args.kv_heads:
        raise ArgumentError("--q-heads", args.q_heads, f"a multiple of --kv-heads {args.kv_heads}")
    if args.kv_dtype not in CACHE_TYPES:
        raise ArgumentError("--kv-dtype", f"{args.kv_dtype!r} with --as vllm", f"vLLM's own names: {', '.join(CACHE_TYPES)}")
    out_dtype = type_of("--out-dtype", args.out_dtype, Q_TYPES, platform, auto=args.q_dtype)
    fp8_output = out_dtype[:4] == own_fp8(platform)[:4]
    if args.out_dtype != "auto" and not fp8_output:
        raise ArgumentError("--out-dtype", f"{args.out_dtype} with --as vllm", "auto, or fp8 for an output scale")
    return VllmCall(
        platform=platform,
        q_heads=args.q_heads,
        kv_heads=args.kv_heads,
        head_size=args.head_dim,
        block_size=args.page_size,
        kv_cache_dtype=args.kv_dtype,
        q_dtype=type_of("--q-dtype", args.q_dtype, ("fp32", "fp16", "bf16"), platform),
        max_seq_len=args.max_kv_len,
        sliding_window=args.window,
        alibi=args.alibi,
        sinks=args.sinks,
        output_scale=fp8_output,
        native_strides=not args.padded_pages,
        custom_paged_attn=not args.no_custom_paged_attn,
        aiter_paged_attn=args.aiter_paged_attn,
    )


COMMAND = Command("explain", run, HELP, PARAMETERS, EXAMPLES)
