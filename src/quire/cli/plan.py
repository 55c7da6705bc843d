"""`quire plan`: what the attention of a step costs on some GPUs, the best parallel split, and the limiting resource."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from quire.cache.format import BYTE_NAMES, FLOAT_NAMES
from quire.cli.command import Args, ChoiceOf, Command, Count, Number, OneOfNames, Option, Writable, answer, flag
from quire.cli.problem_options import Q_TYPES, type_of
from quire.cli.sheet import show
from quire.dispatch.summary import Line
from quire.errors import ArgumentError

HELP = """Shows what the attention part of a step costs on some GPUs: bytes, FLOPs, time and memory of every way to divide it (by
heads, context and sequences), the best of them, and the resource that limits it. Nothing is run and no GPU is needed: times are
those of a model that was fitted to measurements on an H200."""
EXAMPLES = """\
examples:
  quire plan --model llama-3-70b --gpus 8xH200 --context 32768           a decode of 16 sequences
  quire plan --model llama-3-8b --gpus H100 --context 8192 --batch 64 --kv-dtype fp8
                                                                         one GPU, an fp8 cache
  quire plan --model qwen3-32b --gpus 4xA100 --context 16384 --step prefill --chunk 4096
                                                                         one chunk of 4096 tokens at the end of a prompt
  quire plan --model gpt-oss-120b --gpus 8xMI300X --context 65536 --step mixed --html plan.html
                                                                         a chunk beside decodes, and a report with plots
  quire plan --model ./checkpoint --gpus 16xH200 --context 1000000 --batch 1 --json
                                                                         a model's own config.json; for programs
  quire plan --model llama-3-8b --gpus H200 --sequences 2q2k_32q1s8k     a batch of your own, in the words of `quire bench`

Splits: tp divides heads, cp divides the pages of each sequence, dp divides sequences. docs/plan.md describes the model, what was
measured, and what is assumed.

exit status: 0 a split fits, 1 model and batch do not fit on these GPUs, 2 an argument is wrong
"""
STEPS = ("decode", "prefill", "mixed")
COLORS = {"best": "bold green", "limit": "bold yellow", "note": "yellow"}
SHOWN = 8
"""The splits that the table shows without --all."""
DEFAULT_CONTEXT, DEFAULT_BATCH, DEFAULT_CHUNK = 8192, 16, 2048


def _models() -> Sequence[str]:
    from quire.plan.models import MODELS

    return list(MODELS)


def _machines() -> Sequence[str]:
    from quire.plan.machines import MACHINES

    return [machine.name for machine in MACHINES.values()]


_WHAT, _BATCH, _HOW = "the model and the GPUs", "the step", "the cache"
PARAMETERS: list[click.Parameter] = [
    Option(
        "--model",
        required=True,
        metavar="NAME|PATH",
        type=OneOfNames(_models, files=True),
        group=_WHAT,
        help="a public model (an error lists them), a Hugging Face config.json, or the folder of one",
    ),
    Option(
        "--gpus",
        required=True,
        metavar="NxGPU",
        type=OneOfNames(_machines),
        group=_WHAT,
        help="such as 8xH200, H100, A100, B200, L40S, MI300X; nodes have 8",
    ),
    Option(
        "--network", type=Number(0, "Gbit/s of each GPU between nodes,"), group=_WHAT, help="Gbit/s of each GPU between nodes (400)"
    ),
    Option("--weight-bits", type=Number(0, "bits of a weight"), group=_WHAT, help="bits of a weight (those of the model)"),
    Option(
        "--memory-part", type=Number(0, "a part of the memory"), group=_WHAT, help="the part of memory for weights and cache (0.9)"
    ),
    Option("--context", type=Count, group=_BATCH, help=f"tokens of each sequence, new ones included ({DEFAULT_CONTEXT})"),
    Option("--batch", type=Count, group=_BATCH, help=f"sequences (decode, mixed: {DEFAULT_BATCH}; prefill: 1)"),
    Option("--step", type=ChoiceOf(STEPS), group=_BATCH, help="decode, prefill, or mixed: one prefill beside decodes (decode)"),
    Option("--new-tokens", type=Count, group=_BATCH, help="new tokens of each decoding sequence; drafts are more than one (1)"),
    Option("--chunk", type=Count, group=_BATCH, help=f"new tokens of a prefill ({DEFAULT_CHUNK}, or the whole context)"),
    Option("--sequences", metavar="SPEC", group=_BATCH, help="a batch such as 2q2k_32q1s8k instead of the options above"),
    Option(
        "--kv-dtype",
        default="auto",
        metavar="TYPE",
        group=_HOW,
        help="how the cache stores an element: auto (as q), fp8 (the GPU's own), or a format",
    ),
    Option("--q-dtype", default="bf16", metavar="TYPE", group=_HOW, help="the type of queries (bf16)"),
    Option("--page-size", type=Count, default=16, group=_HOW, help="tokens in a page (16)"),
    flag("--whole-cache", "layers with a window keep all tokens", _HOW),
    flag("--all", "every split in the table", default=False),
    Option("--html", metavar="FILE", type=Writable(), group="output", help="write a report with plots"),
]


def run(args: Args) -> int:
    from quire.plan import report
    from quire.plan.html_report import html_report

    job, step = _job(args)
    found = report.plan(job, step)
    if args.html is not None:  # before standard output, whose reader may end early
        Path(args.html).write_text(html_report(found), encoding="utf-8")
    answer(args, found, lambda: _print(args, found))
    return 0 if found["fits"] else 1


def _job(args: Args) -> tuple[Any, str]:
    from dataclasses import replace

    from quire.plan.config import model_of
    from quire.plan.machines import cluster_of
    from quire.plan.splits import PlanJob
    from quire.platform import Platform

    cluster = cluster_of(args.gpus)
    if args.network is not None:
        cluster = cluster._replace(machine=replace(cluster.machine, network=args.network * 1e9 / 8))
    model = model_of(args.model)
    if args.weight_bits is not None:
        model = replace(model, weight_bits=args.weight_bits, expert_bits=0.0)
    if not model.weight_bits:
        raise ArgumentError("--weight-bits", None, f"bits of a weight: the quantisation or type of {model.name} is not known")
    if args.memory_part is not None and args.memory_part > 1:
        raise ArgumentError("--memory-part", args.memory_part, "a part of the memory above 0, at most 1")
    platform = Platform.named(cluster.machine.platform)
    q_format = type_of("--q-dtype", args.q_dtype, Q_TYPES, platform)
    kv_format = type_of("--kv-dtype", args.kv_dtype, (*FLOAT_NAMES, *BYTE_NAMES), platform, auto=q_format)
    sequences, step = _sequences(args)
    job = PlanJob(model, sequences, cluster, kv_format, q_format, args.page_size, args.memory_part or 0.9, args.whole_cache)
    return job, step


def _sequences(args: Args) -> tuple[tuple[tuple[int, int], ...], str]:
    """(new tokens, context) of each sequence, and what the step is called."""
    if args.sequences is not None:
        for name in ("context", "batch", "step", "new_tokens", "chunk"):
            if getattr(args, name) is not None:
                raise ArgumentError(
                    f"--{name.replace('_', '-')}", f"{getattr(args, name)} with --sequences", "nothing: SPEC has it"
                )
        return _parsed(args.sequences), "batch"
    step, context = args.step or "decode", args.context or DEFAULT_CONTEXT
    chunk, new = args.chunk or min(DEFAULT_CHUNK, context), args.new_tokens or 1
    unused = {"decode": "chunk", "prefill": "new_tokens"}.get(step)
    if unused and getattr(args, unused) is not None:
        option, steps = f"--{unused.replace('_', '-')}", [one for one in STEPS if one not in (step,)]
        raise ArgumentError(option, f"{getattr(args, unused)} with --step {step}", f"only with --step {' or '.join(steps)}")
    for option, value in (("--chunk", chunk), ("--new-tokens", new)):
        if value > context:
            raise ArgumentError(option, value, f"at most --context {context}: it includes the new tokens")
    if step == "prefill":
        return ((chunk, context - chunk),) * (args.batch or 1), step
    decodes = ((new, context - new),) * (args.batch or DEFAULT_BATCH)
    return (decodes, step) if step == "decode" else (((chunk, context - chunk), *decodes[1:]), step)


def _parsed(spec: str) -> tuple[tuple[int, int], ...]:
    from quire.bench.workloads import parse_batch

    try:
        return parse_batch(spec).sequences
    except ArgumentError as error:
        raise ArgumentError("--sequences", error.given, error.allowed) from None


def _print(args: Args, found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from quire.plan.report import HEAD, lines, table, title

    most = None if args.all else SHOWN
    show([Line("", title(found)), *(Line(label, text) for label, text in lines(found))], COLORS)
    print()
    shown = Table(box=None, pad_edge=False)
    for i, name in enumerate(HEAD):
        left = i in (0, len(HEAD) - 2, len(HEAD) - 1)
        shown.add_column(name, justify="left" if left else "right", no_wrap=not sys.stdout.isatty(), overflow="fold")
    for cells, split in zip(table(found, most), found["splits"]):
        shown.add_row(*cells, style="bold" if split == found["best"] else "" if split["fits"] else "dim")
    Console(width=None if sys.stdout.isatty() else 200).print(shown)
    hidden = len(found["splits"]) - len(found["splits"][:most])
    notes = [*found["assumptions"], *([f"{hidden} more splits are not shown: --all"] if hidden else [])]
    print()
    show([Line("note", note) for note in notes], COLORS)


COMMAND = Command("plan", run, HELP, PARAMETERS, EXAMPLES)
