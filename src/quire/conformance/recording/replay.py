"""Compares a recorded call with the exact computation: the result in the program, and the result of a kernel on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from quire.attend import attend
from quire.cache.latent import with_values
from quire.conformance.cases.call import KernelCall, guarded
from quire.conformance.diagnosis.attempt import Attempt
from quire.conformance.diagnosis.candidates import matches
from quire.conformance.diagnosis.locate import spread, where
from quire.conformance.oracle.budget import ratios, rounding_losses, truth
from quire.conformance.recording.record import Recorded
from quire.conformance.reporting.report import UNKNOWN, Finding
from quire.conformance.runner.threads import as_given, on_host
from quire.options import Options
from quire.problem import default_out_dtype


@dataclass(frozen=True)
class Verdict:
    """One result of a recorded call."""

    of: str
    """The kernel and machine that it comes from."""
    status: str
    """correct, wrong, or raised."""
    error: float = 0.0
    """The largest error in budgets."""
    wrong: int = 0
    """Elements beyond their budget."""
    finding: Finding | None = None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def then(recorded: Recorded) -> Verdict:
    """Compares the result that the program got."""
    decision = recorded.metadata["decision"]
    name = f"recorded on {recorded.metadata['device']}" + (f" by {decision['chosen']}" if decision else "")
    if recorded.out is None:
        return Verdict(name, "raised", reason=str(recorded.metadata["error"]))
    out, lse = recorded.out, recorded.lse

    def give(call: KernelCall) -> None:
        call.out[: call.live] = out[: call.live]
        if call.lse is not None and lse is not None:
            call.lse[: call.live] = lse[: call.live]

    return judge(recorded, name, give, with_lse=lse is not None)


def here(recorded: Recorded, kernel: str | None = None) -> Verdict:
    """Runs a kernel on this machine and compares its result."""
    device = recorded.q.device

    def run(call: KernelCall) -> None:
        arguments = call.q, call.cache(), call.batch(), call.options()
        _, lse = attend(*arguments, new=call.new, out=call.out, lse=True, kernel=kernel)
        assert call.lse is not None
        call.lse[: call.live] = lse[: call.live]

    return judge(recorded, f"{kernel or 'the chosen kernel'} on {device}", run, with_lse=True)


def judge(recorded: Recorded, name: str, run: Callable[[KernelCall], None], with_lse: bool) -> Verdict:
    """Runs the call, compares the result, and names the fault. No probes are run: there is only this one call."""
    with on_host():
        return _judge(recorded, name, run, with_lse)


def _judge(recorded: Recorded, name: str, run: Callable[[KernelCall], None], with_lse: bool) -> Verdict:
    call = call_of(recorded, with_lse)
    losses = rounding_losses(call)
    done = Attempt(call, truth(call, losses=losses), losses)
    try:
        with as_given():
            run(call)
    except Exception as error:
        return Verdict(name, "raised", reason=f"{type(error).__name__}: {error}")
    off = done.off
    if off <= 1:
        return Verdict(name, "correct", off)
    found, far = matches(done)
    wrong = int((ratios(call.out.cpu(), call.unwritten().cpu(), done.truth, call.live) > 1).sum())
    ranking = tuple(far[:8])
    if found:
        best, names = found[0], tuple(match.fault.name for match in found)
        assert best.fault.change is not None
        place = where(done, best.fault.change(**best.parameters))
        margin = min((off for other, off in far if other not in names), default=torch.inf)
        finding = Finding(
            best.fault.name,
            names,
            {},
            best.distance,
            margin,
            place,
            best.fault.effect,
            evidence=(spread(done),),
            ranking=ranking,
        )
    else:
        nearest = ", ".join(f"{other} ({away:.3g} budgets away)" for other, away in far[:2])
        summary = f"no fault of the catalogue explains it; nearest: {nearest or 'none'}; {spread(done)}"
        finding = Finding(UNKNOWN, (UNKNOWN,), where=where(done), summary=summary, ranking=ranking)
    page = finding.where.page
    if page is not None and 0 <= page < len(recorded.page_ids):  # as the program numbered it
        finding = replace(finding, where=replace(finding.where, page=int(recorded.page_ids[page])))
    return Verdict(name, "wrong", off, wrong, finding)


def call_of(recorded: Recorded, with_lse: bool) -> KernelCall:
    """The recorded call as a call of the kit, with filled and guarded outputs."""
    options, cache, q = recorded.options, recorded.cache, recorded.q
    dtype = recorded.out.dtype if recorded.out is not None else default_out_dtype(q.dtype, options.out_scale is not None)
    new_k, new_v = (None, None) if recorded.new is None else with_values(recorded.new, cache)
    select, prefixes = recorded.batch.select, recorded.batch.prefixes
    return KernelCall(
        q=q,
        k_pages=cache.k,
        v_pages=cache.v,
        page_table=recorded.batch.page_table,
        kv_lens=recorded.batch.kv_lens,
        q_starts=recorded.batch.q_starts,
        out=guarded((*q.shape[:2], cache.v_head_dim), dtype, q.device),
        layout=cache.layout.name,
        format=cache.k_format.name,
        v_format=cache.v_format.name,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        v_in_k=cache.v_in_k is not None,
        lse=guarded(tuple(q.shape[:2]), torch.float32, q.device) if with_lse else None,
        new_k=new_k,
        new_v=new_v,
        **_options(options, q.shape[2]),
        max_q_len=recorded.batch.max_q_len,
        max_kv_len=recorded.batch.max_kv_len,
        shard=recorded.batch.shard,
        spans=recorded.batch.spans,
        select_positions=select.entries if select is not None and select.kind == "positions" else None,
        select_columns=select.entries if select is not None and select.kind == "columns" else None,
        prefixes=None if prefixes is None else tuple(prefixes.listed),
    ).take_checksums()


def _options(options: Options, head_dim: int) -> dict[str, Any]:
    """The options that a kernel call has a field for, as the plain values that it takes."""
    known = {field.name for field in fields(KernelCall)}
    given = {field.name: getattr(options, field.name) for field in fields(options) if field.name in known}
    given |= {"window": options.sides, "scale": head_dim**-0.5 if options.scale is None else options.scale}
    # A scale that is a tensor is one number.
    return given | {name: None if given[name] is None else float(given[name]) for name in ("q_scale", "out_scale")}
