"""Records calls of a running program in a file that can be examined on any machine: a bug report that a user can send.

    with quire.record("call.safetensors"):
        model(tokens)

saves the first call of `attend` or `step` inside the context, and any call that raises: its tensors, options, output, the machine,
and why its kernel was chosen. `quire check`, `quire explain` and `quire diagnose` take the file, on any machine.
"""

from __future__ import annotations

import os
import platform as host
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from quire.attend import attend
from quire.batch import Batch
from quire.cache.format import FORMATS, Format
from quire.cache.kv_cache import KVCache
from quire.cache.latent import with_values
from quire.cache.layout import layout_named
from quire.cache.prefixes import Prefixes
from quire.conformance.cases.call import selection_of
from quire.conformance.recording import tensor_file
from quire.contract.call import Call
from quire.contract.check import recorded_by, violations
from quire.contract.quantisation import stored_rows
from quire.contract.rule import Violation
from quire.dispatch.decision import Decision
from quire.errors import ArgumentError, QuireError
from quire.launch import described
from quire.options import PLAIN, Options
from quire.platform import Platform
from quire.problem import ANY, Extent, Problem

Launch = Callable[[Call], None]
ROTATION_ERROR = 2.0**-18
"""Of the largest element of a rotated head: a norm and a rotation in fp32 err by less, a lost token by far more."""
VERSION = 1
"""Of the contents of a file."""
OPTIONS = tuple(option.name for option in fields(Options))


@contextmanager
def record(path: str | os.PathLike[str], *, calls: int = 1, pages: str = "needed") -> Iterator[None]:
    """A context that saves the first calls of `attend` and `step` of this thread or task, and one that raises, to a file. `quire
    diagnose` and `quire explain` read it. A call is copied to the host when it is made, so a CUDA graph cannot be captured inside
    the context, and calls of a replayed graph are not recorded.

    Args:
        path: The file to write, in safetensors format.
        calls: The maximum number of calls.
        pages: "needed" saves only the pages that a call needs, "all" the whole cache.

    Raises:
        ArgumentError: An argument has the wrong value.
        QuireError: There was no call, or a CUDA graph is being captured. No file is written then.

    Example:
        >>> import tempfile, torch, quire
        >>> pool = quire.PagePool(pages=8, page_size=16)
        >>> cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64)
        >>> batch = pool.step({pool.sequence(): 5})
        >>> q, k, v = torch.randn(5, 12, 64, dtype=torch.bfloat16).split((8, 2, 2), dim=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with quire.record(f"{folder}/call.safetensors"):
        ...         out = quire.step(q, k, v, cache, batch)
    """
    if not isinstance(calls, int) or isinstance(calls, bool) or calls < 1:
        raise ArgumentError("calls", repr(calls), "1 or more")
    if pages not in ("needed", "all"):
        raise ArgumentError("pages", repr(pages), "'needed' or 'all'")
    recorder = Recorder(os.fspath(path), calls, pages)
    try:
        with recorded_by(recorder):
            yield
    finally:
        recorder.closed = True
    if not recorder.calls:
        raise QuireError(f"quire.record: this thread made no call of attend or step, so {os.fspath(path)} was not written")


class Recorder:
    """Saves calls of `attend` and `step` while a recording is active."""

    def __init__(self, path: str, most: int, pages: str):
        self.path, self.most, self.pages = path, most, pages
        self.calls: list[dict[str, Any]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.closed = False
        self._written: tuple[KVCache, Batch, dict[str, torch.Tensor]] | None = None

    def around(self, operation: str, launcher: Launch, decision: Decision) -> Launch:
        """A launcher whose calls are saved; for a write, whose tokens are kept until attention over their cache is saved."""
        around = {"write": self._writing, "attend": self._attending}.get(operation)
        return launcher if around is None else around(launcher, decision)

    def _writing(self, launcher: Launch, decision: Decision) -> Launch:
        def write(call: Call) -> None:
            if not self.closed:
                assert call.k is not None and call.v is not None
                refuse_capture(call.k)
                tensors = dict(zip("kv", stored_rows(call))) | ({} if call.given_slots is None else {"slots": call.given_slots})
                if call.rope is not None:
                    tensors["rotated"] = torch.ones((), dtype=torch.bool)
                copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
                self._written = call.cache, call.batch, copies
            launcher(call)

        return write

    def _attending(self, launcher: Launch, decision: Decision) -> Launch:
        def attend(given: Call) -> None:
            if self.closed or is_mixture(given):
                return launcher(given)
            assert given.q is not None and given.out is not None
            refuse_capture(given.q)
            call, has_lse = Call(given.cache, given.batch, given.q, given.options, given.new), given.lse is not None
            try:
                launcher(given)
            except Exception as error:
                self.save(call, decision, {}, has_lse, f"{type(error).__name__}: {error}")
                raise
            if sum(not kept["error"] for kept in self.calls) < self.most:
                self.save(call, decision, {"out": given.out} | ({} if given.lse is None else {"lse": given.lse}), has_lse)

        return attend

    def refused(self, operation: str, call: Call, broken: Sequence[Violation]) -> None:
        """Saves a call that breaks the contract."""
        if type(call) is Call and call.q is not None and not self.closed:
            if call.k is not None and call.v is not None:
                self._written = call.cache, call.batch, {"k": call.k.cpu().clone(), "v": call.v.cpu().clone()}
            self.save(call, None, {}, False, f"ContractError: {broken[0].rule}: {broken[0].given}", broken)

    def save(
        self,
        call: Call,
        decision: Decision | None,
        results: dict[str, torch.Tensor],
        lse: bool,
        error: str = "",
        broken: Sequence[Violation] | None = None,
    ) -> None:
        """Copies a call to the host and writes the file again, this call included."""
        found = violations(call, "full") if broken is None else broken
        written: dict[str, torch.Tensor] = {}
        if self._written is not None and self._written[0] is call.cache and self._written[1] is call.batch:
            written = {f"written_{name}": tensor for name, tensor in self._written[2].items()}
        ids, table = _pages(call, found, self.pages)
        tensors = _tensors(call, ids, table) | written | results
        number = len(self.calls)
        self.tensors |= {f"{number}.{name}": tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        self.calls.append(
            {
                "operation": "step" if written else "attend",
                "error": error,
                "lse": lse,
                "pages": {"saved": len(ids), "of": call.cache.pages},
                "decision": None if decision is None else decision.to_dict(),
                "explanation": "" if decision is None else str(decision),
                "violations": [violation.to_dict() for violation in found],
                **_facts(call),
            }
        )
        tensor_file.save(self.path, self.tensors, {"version": VERSION, "calls": self.calls})


@dataclass
class Recorded:
    """One call of a file, restored on some device."""

    cache: KVCache
    batch: Batch
    q: torch.Tensor
    options: Options
    new: tuple[torch.Tensor, torch.Tensor | None] | None
    out: torch.Tensor | None
    """The output in the program; None if the call raised."""
    lse: torch.Tensor | None
    written: dict[str, torch.Tensor]
    """In a step: the tokens that were written just before, `k`, `v`, and `slots` if they were given."""
    page_ids: torch.Tensor
    """The ids that the saved pages had in the program."""
    metadata: dict[str, Any] = field(repr=False)
    """Everything about the call that is not a tensor: operation, error, decision, violations, machine, versions."""

    @property
    def problem(self) -> Problem:
        call = Call(self.cache, self.batch, self.q, self.options, self._new_rows, with_lse=bool(self.metadata["lse"]))
        return described("attend", call)[0]

    @property
    def extent(self) -> Extent:
        return Extent.of(self.q, self.cache, self.batch)

    @property
    def decision(self) -> str:
        """The dispatch decision where it ran, in words; empty if the call was refused before."""
        return str(self.metadata.get("explanation", self.metadata.get("said", "")))  # "said" in older files

    def violations(self) -> list[Violation]:
        """Violations of the contract: those found when it was recorded, ledger included, or else those found here."""
        then = [Violation(**violation) for violation in self.metadata["violations"]]
        return then or violations(Call(self.cache, self.batch, self.q, self.options, self._new_rows), "full")

    @property
    def _new_rows(self) -> Any:
        """The new keys and values, as a `Call` has them."""
        return None if self.new is None else with_values(self.new, self.cache)

    def replay(self, kernel: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the call here: out, and the LSE."""
        return attend(self.q, self.cache, self.batch, self.options, new=self.new, lse=True, kernel=kernel)

    def lost_tokens(self) -> list[int]:
        """In a step: the rows of k and v whose slots do not hold the values that were written."""
        if not self.written or self.metadata["error"]:
            return []
        slots = self.batch.slots_of_tokens(len(self.written["k"]), self.cache.page_size, self.written.get("slots"))
        if "slots" in self.written and self.metadata["pages"]["saved"] < self.metadata["pages"]["of"]:
            slots = _renumbered(slots, self.page_ids, self.cache.page_size)
        rows = (slots >= 0).nonzero().flatten()
        wrong = torch.zeros(len(rows), dtype=torch.bool, device=self.q.device)
        cache = self.cache
        groups_and_scales = ((cache.k_groups, cache.k_scale), (cache.v_groups, cache.v_scale))
        parts = zip("kv", cache.written_views, groups_and_scales, cache.written_formats)
        for name, view, (groups, scale), format in parts:
            x = self.written[name]
            page, slot = slots[rows] // self.cache.page_size, slots[rows] % self.cache.page_size
            held = view[page, :, slot // view.shape[3], slot % view.shape[3]].flatten(2)
            if groups is not None:
                held = torch.cat((held, groups[page, :, slot // groups.shape[3], slot % groups.shape[3]].flatten(2)), -1)
            if scale is not None:
                scale = scale[page, slot, :, None] if scale.dim() == 3 else scale if scale.dim() == 0 else scale[:, None]
            want = format.quantise(x[rows], scale)
            held = held if held.dtype is want.dtype else held.view(want.dtype)
            if format.pack > 1:
                held, want = format.unpack(held), format.unpack(want)
            # A division may round to either side by one unit in the last place.
            near = _last_place(want, format)
            if x is self.written["k"] and "rotated" in self.written:
                # Kernels rotate in fp32, each in its own order: off by some units in the last place of the largest element.
                near = near + want.float().abs().amax(-1, keepdim=True) * ROTATION_ERROR
            wrong |= ~((held.float() - want.float()).abs() <= near + 1e-30).flatten(1).all(1)
        return rows[wrong].tolist()


def _last_place(stored: torch.Tensor, format: Format) -> torch.Tensor:
    """The distance of stored numbers to their neighbours in the format, at least."""
    if format.group:
        # Codes of a group are up to 2 scales apart, of the largest code, 6. The scale may be another one, 1/8 larger or smaller.
        largest = stored.unflatten(-1, (-1, format.group)).abs().amax(-1).repeat_interleave(format.group, -1)
        return largest * (1 / 3 + 1 / 8)
    return (
        stored.float().abs() * torch.finfo(stored.dtype).eps if stored.dtype.is_floating_point else torch.ones_like(stored).float()
    )


def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> list[Recorded]:
    """The calls of a file, on a device."""
    tensors, metadata = tensor_file.load(path)
    if metadata.get("version") != VERSION:
        raise ArgumentError("FILE", f"{path}, of version {metadata.get('version')}", f"version {VERSION}")
    return [_load(number, call, tensors, torch.device(device)) for number, call in enumerate(metadata["calls"])]


def _cache(own: dict[str, torch.Tensor], metadata: dict[str, Any]) -> KVCache:
    """The cache of a call, over the saved pages."""
    layout, names = layout_named(metadata["layout"]), (metadata["format"], metadata.get("v_format") or metadata["format"])
    k_format, v_format = (FORMATS[name] for name in names)
    scales = own.get("k_scale"), own.get("v_scale")
    v_in_k = metadata.get("v_in_k")
    if v_in_k is None:
        return KVCache(own["k_pages"], own["v_pages"], layout, (k_format, v_format), *scales, None, False)
    v_pages = own["k_pages"][..., : k_format.units_of(v_in_k)]
    return KVCache(own["k_pages"], v_pages, layout, (k_format, v_format), *scales, None, False, True)


def _load(number: int, metadata: dict[str, Any], tensors: dict[str, torch.Tensor], device: torch.device) -> Recorded:
    prefix = f"{number}."
    own = {name.removeprefix(prefix): tensor.to(device) for name, tensor in tensors.items() if name.startswith(prefix)}
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in metadata["options"].items()
    }
    given |= {name: own[name] for name in OPTIONS if name in own}
    return Recorded(
        cache=_cache(own, metadata),
        batch=Batch(
            own["page_table"], own["kv_lens"], own["q_starts"],
            slots=own.get("slots"), max_q_len=metadata["max_q_len"], max_kv_len=metadata["max_kv_len"],
            shard=metadata.get("shard"), spans=own.get("spans"),
            select=selection_of(own.get("select_positions"), own.get("select_columns")),
            prefixes=_prefixes(own, metadata),
        ),
        q=own["q"],
        options=Options(**given) if given else PLAIN,
        new=(own["new_k"], own.get("new_v")) if "new_k" in own else None,
        out=own.get("out"),
        lse=own.get("lse"),
        written={name.removeprefix("written_"): tensor for name, tensor in own.items() if name.startswith("written_")},
        page_ids=own["page_ids"],
        metadata=metadata,
    )  # fmt: skip


def _prefixes(own: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Prefixes | None:
    numbers = metadata.get("prefixes")
    if numbers is None:
        return None
    seqs, sizes, most_pages = numbers
    return Prefixes.restored((seqs, tuple(tuple(size) for size in sizes), most_pages), own)


def refuse_capture(tensor: torch.Tensor) -> None:
    """Raises during the capture of a graph: a recording copies values to the host."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise QuireError("a CUDA graph is being captured, and quire.record and quire.checked(results=True) copy to the host")


def is_mixture(call: Call) -> bool:
    """Whether a call has sequences of both forms, or skips sequences. Only `quire.compat` makes such calls."""
    return call.context_from != 1 or call.only != (0, ANY)


def _tensors(call: Call, ids: torch.Tensor, table: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inputs of a call that are tensors: of the cache the pages `ids`, of the options those that are tensors."""
    cache, batch = call.cache, call.batch
    new_k, new_v = call.new or (None, None)
    new_v = None if cache.v_in_k is not None else new_v
    tensors = {
        "q": call.q,
        "k_pages": _some(cache.k_bytes, ids).view(cache.k.dtype),
        "v_pages": None if cache.v_in_k is not None else _some(cache.v_bytes, ids).view(cache.v.dtype),
        "page_ids": ids,
        "page_table": table,
        "kv_lens": batch.kv_lens,
        "q_starts": batch.q_starts,
        "slots": batch.given_slots,
        "spans": batch.spans,
        "new_k": new_k,
        "new_v": new_v,
        **({} if batch.select is None else {f"select_{batch.select.kind}": batch.select.entries}),
        **({} if batch.prefixes is None else batch.prefixes.tensors),
        **{name: getattr(call.options, name) for name in OPTIONS},
    }
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", None if cache.v_in_k is not None else cache.v_scale)):
        tensors[name] = _some(scale, ids) if scale is not None and scale.dim() == 3 else scale
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def _facts(call: Call) -> dict[str, Any]:
    """Metadata of a call."""
    assert call.q is not None
    cache, batch = call.cache, call.batch
    options = {name: getattr(call.options, name) for name in OPTIONS}
    return {
        "layout": cache.layout.name,
        "format": cache.k_format.name,
        "v_format": cache.v_format.name,
        "v_in_k": cache.v_in_k,
        "page_size": cache.page_size,
        "max_q_len": batch.max_q_len,
        "max_kv_len": batch.max_kv_len,
        "shard": None if batch.shard is None else list(batch.shard),
        "prefixes": None if batch.prefixes is None else batch.prefixes.numbers,
        "options": {name: value for name, value in options.items() if not isinstance(value, torch.Tensor)},
        "strides": {"q": list(call.q.stride()), "k_pages": list(cache.k.stride()), "v_pages": list(cache.v.stride())},
        "device": str(call.q.device),
        "platform": Platform.detect(call.q.device).to_dict(),
        "versions": _versions(),
    }


def _pages(call: Call, found: Sequence[Violation], which: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of the pages to save, in order, and the table with them renumbered. Cells that are not needed become -1; ids out of
    range stay out of range."""
    cache, table = call.cache, call.batch.page_table
    unreadable = any(v.rule in ("index-types", "devices", "shapes") for v in found) or not call.lengths_hold
    if which == "all" or unreadable:
        return torch.arange(cache.pages, device="cpu"), table
    seq, key = call.needed
    cells = torch.unique(torch.stack((seq, key // cache.page_size)), dim=1)
    named = call.page_table[cells[0], cells[1]]
    inside = (named >= 0) & (named < cache.pages)
    ids, new = torch.unique(named[inside], return_inverse=True)
    fresh = torch.full_like(call.page_table, -1)
    moved = torch.where(named >= 0, named - cache.pages + len(ids), named)
    moved[inside] = new
    fresh[cells[0], cells[1]] = moved
    return ids, fresh.to(table.dtype)


def _some(pages: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return pages if len(ids) == len(pages) else pages.index_select(0, ids.to(pages.device))


def _renumbered(slots: torch.Tensor, ids: torch.Tensor, page_size: int) -> torch.Tensor:
    """Slots of the program as slots of the saved pages; -1 where a page was not saved."""
    if not len(ids):
        return torch.full_like(slots, -1)
    page = torch.div(slots, page_size, rounding_mode="floor")
    at = torch.searchsorted(ids, page).clamp(max=len(ids) - 1)
    return torch.where((slots >= 0) & (ids[at] == page), at * page_size + slots % page_size, -1)


def _versions() -> dict[str, str]:
    found = {"python": host.python_version(), "torch": str(torch.__version__)}
    for package in ("quire", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
