"""A plan as JSON-compatible values, as lines and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.plan import communication
from quire.plan.counts import Lengths
from quire.plan.kernel_rates import unmeasured
from quire.plan.machines import MEASURED, MOST_GPUS, Cluster
from quire.plan.splits import PlanJob, SplitCost, all_costs, cost_of, least_gpus
from quire.plan.step_time import SHORT

CONTEXTS = tuple(1 << power for power in range(10, 21))
"""Lengths of the curve: 1024 to 1048576 tokens."""
CURVES = 4
"""The splits that the curve shows, the fastest first."""
BAR = 24
"""Characters of the longest bar of the table."""


def plan(job: PlanJob, step: str) -> dict[str, Any]:
    """The plan of a job, ready for JSON: every split, the best one (None if none fits), and what was assumed."""
    costs = all_costs(job)
    best = costs[0] if costs[0].fits else None
    return {
        "model": _model(job),
        "machine": _machine(job.cluster),
        "step": {
            "kind": step,
            "sequences": len(job.sequences),
            "new_tokens": sum(new for new, _ in job.sequences),
            "longest": max(map(sum, job.sequences)),
            "kv_format": job.kv_format,
            "q_format": job.q_format,
            "page_size": job.page_size,
        },
        "fits": best is not None,
        "least_gpus": None if best else least_gpus(job),
        "limit": (best or costs[0]).limit,
        "best": best and cost_values(best),
        "splits": [cost_values(cost) for cost in costs],
        "curve": curve(job, costs[:CURVES]),
        "assumptions": assumptions(job),
    }


def cost_values(cost: SplitCost) -> dict[str, Any]:
    """The cost of a split: all layers of a step, on the slowest GPU."""
    return {
        **cost.split._asdict(),
        "milliseconds": cost.seconds * 1e3,
        "parts_milliseconds": {name: seconds * 1e3 for name, seconds in cost.parts.items()},
        "collectives_milliseconds": {name: seconds * 1e3 for name, seconds in cost.collectives.items()},
        "bytes": cost.bytes,
        "flops": cost.flops,
        "bytes_sent": cost.sent,
        "kv_heads_per_gpu": cost.kv_heads,
        "replication": cost.replication,
        "weight_bytes": cost.weights,
        "cache_bytes": cost.cache,
        "usable_bytes": cost.usable,
        "most_sequences": cost.most_sequences,
        "fits": cost.fits,
        "limit": cost.limit,
    }


def curve(job: PlanJob, costs: Sequence[SplitCost]) -> list[dict[str, Any]]:
    """The time of the fastest splits over the length of the context: every sequence has that many tokens, its new ones included."""
    found: list[dict[str, Any]] = [{**cost.split._asdict(), "points": []} for cost in costs]
    longest = max(new for new, _ in job.sequences)
    for context in (one for one in CONTEXTS if one >= longest):
        sequences: Lengths = tuple((new, context - new) for new, _ in job.sequences)
        at_context = replace(job, sequences=sequences)
        for line, cost in zip(found, costs):
            at = cost_of(at_context, cost.split)
            line["points"].append({"context": context, "milliseconds": at.seconds * 1e3, "fits": at.fits})
    return found


def assumptions(job: PlanJob) -> list[str]:
    """What the plan assumes beside measured times."""
    machine = job.cluster.machine
    found = ["time is that of attention and of the cache write; projections, MLPs and sampling are not counted"]
    if machine.name != MEASURED:
        found.append(
            f"{machine.name} was not measured: the kernels are assumed to reach the same parts of its limits as on an H200"
        )
    if job.cluster.gpus > 1:
        found.append(
            f"communication was not measured: collectives are assumed to reach {communication.LINK_PART:.0%} of a link, "
            f"to take at least {communication.LINK_LATENCY * 1e6:g} us within a node and "
            f"{communication.NETWORK_LATENCY * 1e6:g} us between nodes, and not to overlap with computation; "
            "the GPUs of a replica divide the weights if they can divide the query heads, otherwise each cp rank has a copy"
        )
    if any(kind.window is not None for kind in job.model.kinds) and not job.whole_cache:
        found.append("layers with a window keep only the pages that the window still sees (--whole-cache: all pages)")
    decodes = any(new <= SHORT for new, _ in job.sequences)
    notes = (note for kind in job.model.kinds for note in unmeasured(job.layer(kind), decodes))
    return [*found, *dict.fromkeys(notes)]


def _model(job: PlanJob) -> dict[str, Any]:
    model = job.model
    return {
        "name": model.name,
        "parameters": model.parameters,
        "weight_bytes": model.weight_bytes,
        "q_heads": model.q_heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "layers": [{"count": kind.layers, "window": kind.window} for kind in model.kinds],
    }


def _machine(cluster: Cluster) -> dict[str, Any]:
    machine = cluster.machine
    return {
        "name": machine.name,
        "gpus": cluster.gpus,
        "nodes": cluster.nodes,
        "bandwidth": machine.bandwidth,
        "flops": machine.flops,
        "memory": machine.memory,
        "link": machine.link,
        "link_name": machine.link_name,
        "network": machine.network,
    }


def title(found: dict[str, Any]) -> str:
    """What was planned, in one line."""
    step, machine = found["step"], found["machine"]
    nodes = f" in {machine['nodes']} nodes" if machine["nodes"] > 1 else ""
    sequences, new = (
        f"{step[key]} {word}{'s' * (step[key] > 1)}" for key, word in (("sequences", "sequence"), ("new_tokens", "new token"))
    )
    return (
        f"{found['model']['name']} on {machine['gpus']} x {machine['name']}{nodes}: {step['kind']}, {sequences}, "
        f"{new}, up to {step['longest']} tokens each, {step['kv_format']} cache"
    )


def lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Labels and texts: the result in words."""
    best = found["best"]
    if best is None:
        needed = found["least_gpus"]
        more = f"{needed} of these GPUs would hold them" if needed else f"not even {MOST_GPUS} of these GPUs would hold them"
        first = found["splits"][0]
        memory = f"{_size(first['weight_bytes'])} of weights and {_size(first['cache_bytes'])} of cache"
        text = f"{memory} in the fastest split, {_size(first['usable_bytes'])} usable on each GPU: {more}"
        return [("best", "none: model and batch do not fit"), ("limit", "capacity"), ("memory", text)]
    layers = sum(kind["count"] for kind in found["model"]["layers"])
    parts = sorted(best["parts_milliseconds"].items(), key=lambda part: -part[1])
    shown = ", ".join(f"{name} {milliseconds(value)}" for name, value in parts if value)
    held = f"{_size(best['weight_bytes'])} of weights and {_size(best['cache_bytes'])} of cache on each GPU"
    sent = f", {_size(best['bytes_sent'])} sent" if best["bytes_sent"] else ""
    return [
        ("best", f"{_split(best)}: {milliseconds(best['milliseconds'])} for the attention of a step, {layers} layers"),
        ("limit", f"{best['limit']} ({shown})"),
        ("work", f"{_size(best['bytes'])} moved, {_flops(best['flops'])}{sent} by each GPU in a step"),
        ("memory", f"{held}, {_size(best['usable_bytes'])} usable; {best['most_sequences']} sequences of this length fit"),
    ]


HEAD = ("split", "KV heads", "copies", "moved", "FLOP", "sent", "cache", "fits", "time", "limit", "")


def table(found: dict[str, Any], most: int | None = None) -> list[list[str]]:
    """A line for each split, the fastest first, with a bar of its time."""
    shown = found["splits"][:most]
    longest = max(split["milliseconds"] for split in shown)
    return [
        [
            _split(split),
            str(split["kv_heads_per_gpu"]),
            str(split["replication"]),
            _size(split["bytes"]),
            _flops(split["flops"]),
            _size(split["bytes_sent"]),
            _size(split["cache_bytes"]),
            str(split["most_sequences"]) if split["fits"] else "no",
            milliseconds(split["milliseconds"]),
            split["limit"],
            "#" * max(1, round(BAR * split["milliseconds"] / longest)),
        ]
        for split in shown
    ]


def milliseconds(value: float) -> str:
    """Milliseconds with a unit that suits them."""
    return _scaled(value / 1e3, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")))


def _split(split: dict[str, Any]) -> str:
    return f"tp {split['tp']} x cp {split['cp']} x dp {split['dp']}"


def _size(count: float) -> str:
    return _scaled(count, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1.0, "B"))) if count else "-"


def _flops(count: float) -> str:
    return _scaled(count, ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")))


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """A number with three digits, in the largest unit that it reaches."""
    factor, unit = next((one for one in units if value >= 0.9995 * one[0]), units[-1])
    number = value / factor
    return f"{number:.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}"
