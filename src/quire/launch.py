"""The launch path: from a call to its problem, from the problem to a kernel, and from both to a launcher, which is cached.

    Call -> Problem, Extent -> Kernel -> KernelLauncher -> compiled kernels

Every operation uses it: `attend`, `write`, `step`, vLLM's operators (`quire.compat`) and torch operators (`quire.ops`).
`launcher_for` and `described_attend` run in every call, so each is one function without helpers.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import NamedTuple

import torch

from quire.cache.format import FORMATS
from quire.cache.kv_cache import Storage
from quire.contract.call import Call
from quire.contract.check import Level, enforce, watching
from quire.contract.fast import is_certainly_legal
from quire.dispatch.choose import able_kernels, choose, kernel_for
from quire.dispatch.kernel import SHORT, Kernel, KernelLauncher
from quire.options import PLAIN, Traits
from quire.platform import Platform
from quire.problem import ALIGNED, ANY, FIELDS, Extent, Problem, default_out_dtype, dtype_name, is_aligned
from quire.rope import RopeTraits

MAX_PROBLEMS = 4096
"""The size of the launcher cache."""
AUTO = "auto"
NO_TYPES: tuple[tuple[str, torch.dtype], ...] = ()
NO_SELECTION: tuple[str, torch.dtype | None] = ("none", None)


class KnownProblem:
    """An entry of the launcher cache: one problem, the kernels that can run it, and their launchers."""

    __slots__ = ("able", "launchers", "out_dtype", "platform", "problem")

    def __init__(self, problem: Problem, platform: Platform):
        self.problem, self.platform = problem, platform
        self.out_dtype = FORMATS[problem.out_dtype].dtype
        self.able: dict[tuple[str, bool], tuple[Kernel, ...]] = {}
        """By operation, and whether the call is captured into a CUDA graph; the most preferred kernel first."""
        self.launchers: dict[Kernel, KernelLauncher] = {}


_not_audited: set[Problem] = set()
"""Problems that a warning has named: their ledger is not checked."""
_known: dict[int, KnownProblem] = {}
"""The launcher cache. Equal problems are one object, so the key is its id; the entry keeps the object alive."""


def launcher_for(
    operation: str, call: Call, kernel: str | None = None, check: Level = "auto", checked: bool = True
) -> KernelLauncher:
    """The launcher of a call. The call is checked first, unless the caller has `checked` it. Results of an attend that are not
    given are allocated last. Raises ContractError if the call violates the contract, and KernelError if no kernel can run it or
    the kernel requested by name cannot."""
    watch, in_host_memory = watching.get(), getattr(getattr(call.cache, "k_view", None), "is_cpu", True)
    # On a GPU no values are read: if the fast static check accepts the call, nothing else is checked.
    if not checked and (watch is not None or check is not AUTO or in_host_memory or not is_certainly_legal(call)):
        enforce(operation, call, check)
    problem, extent = DESCRIBE[operation](call)
    call.extent, device = extent, call.cache.k_view.device
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    known = _known.get(id(problem)) or add_problem(problem, device)
    if (operation, capturing) not in known.able:
        known.able[operation, capturing] = able_kernels(problem, known.platform, operation, None, capturing)
    for chosen in known.able[operation, capturing] if kernel is None else ():
        fits = (extent.max_q_len <= chosen.longest_q) & (extent.max_kv_len <= chosen.longest_kv)
        fits &= (extent.max_q_len <= SHORT) | (extent.tokens * problem.q_heads <= chosen.most_long_rows)
        if fits & (extent.saved_keys >= chosen.shares):
            break
    else:
        chosen = kernel_for(problem, extent, known.platform, operation, kernel, capturing)
    if chosen not in known.launchers:
        known.launchers[chosen] = chosen.launcher_for(problem, known.platform)
    if operation == "attend":
        tokens, heads, _ = call.q.shape  # type: ignore[union-attr]
        if call.out is None:
            call.out = torch.empty((tokens, heads, call.cache.v_head_dim), dtype=known.out_dtype, device=device)
            call.zero_padding = True
        if call.with_lse and call.lse is None:
            call.lse = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    if watch is None or watch.recorder is None:
        return known.launchers[chosen]
    decision = choose(problem, extent, known.platform, operation=operation, kernel=kernel, capturing=capturing)
    return watch.recorder.around(operation, known.launchers[chosen], decision)


def described(operation: str, call: Call) -> tuple[Problem, Extent]:
    """The problem (what a kernel is compiled for) and the extent (how large the batch is) of a call, from shapes, strides, types
    and options. No value is read."""
    return DESCRIBE[operation](call)


def described_attend(call: Call) -> tuple[Problem, Extent]:
    """As `described`, for an attend or an audit."""
    cache, batch, q, options, out, new = call.cache, call.batch, call.q, call.options, call.out, call.new
    storage, table, kv_lens, q_starts = cache.storage, batch.page_table, batch.kv_lens, batch.q_starts
    aligned = storage.aligned_pages and table.stride(1) == kv_lens.stride(0) == q_starts.stride(0) == 1
    k_unit, v_unit = storage.stride_units
    assert q is not None
    tensors, out_dtype, new_dtype, q_scale, out_scale, types = [(q, k_unit)], q.dtype, None, "none", "none", NO_TYPES
    if out is not None:
        tensors.append((out, v_unit))
        out_dtype = out.dtype
    elif out_dtype.itemsize == 1 or options.out_scale is not None:
        out_dtype = default_out_dtype(out_dtype, options.out_scale is not None)
    if new is not None:
        tensors += [(new[0], k_unit), (new[1], v_unit)]
        new_dtype = new[0].dtype
    if options is not PLAIN:
        aligned = aligned and (options.mask is None or options.mask.stride(1) == 1)
        q_scale, out_scale = _scale_kind(options.q_scale, q.device), _scale_kind(options.out_scale, q.device)
        types = tuple([(name, tensor.dtype) for name, tensor in options.typed_tensors])
    for tensor, unit in tensors:
        # As `is_aligned`. Units are powers of two, so both strides are tested at once.
        token, head, last = tensor.stride()
        if last != 1 or (token | head) % unit or (token | head * tensor.shape[1]) >= 2**31:
            aligned = False
        elif (tensor.data_ptr() or tensor.storage_offset() * tensor.element_size()) % ALIGNED:
            aligned = False
    index = (table.dtype, kv_lens.dtype, q_starts.dtype)
    facts = Facts(
        *(q.shape[1], q.dtype, out_dtype, new_dtype, index, types, q_scale, out_scale, call.with_lse, aligned, q.device),
        *(call.context_from, call.only, batch.shard is not None, getattr(batch.spans, "dtype", None)),
        *(getattr(batch.select, "traits", NO_SELECTION), batch.prefixes is not None),
    )
    (tokens, _, _), (seqs, columns), max_q_len = q.shape, table.shape, batch.max_q_len
    max_kv_len = batch.max_kv_len if batch.shard is None else batch.max_keys
    longest_q, capacity = tokens if max_q_len is None else min(tokens, max_q_len), columns * cache.page_size
    saved = getattr(batch.prefixes, "saved_pages", 0) * cache.page_size
    extent = Extent(seqs, tokens, longest_q, capacity if max_kv_len is None else min(capacity, max_kv_len), saved)
    return _problem(storage, options.traits, facts), extent


def described_write(call: Call) -> tuple[Problem, Extent]:
    """As `described`, for a write: keys and values take the place of queries."""
    cache, batch, k, v = call.cache, call.batch, call.k, call.v
    assert k is not None and v is not None
    storage, table, kv_lens, q_starts = cache.storage, batch.page_table, batch.kv_lens, batch.q_starts
    aligned = storage.aligned_pages and table.stride(1) == kv_lens.stride(0) == q_starts.stride(0) == 1
    aligned = aligned and is_aligned(k, storage.stride_units[0]) and is_aligned(v, storage.stride_units[1])
    index = (table.dtype, kv_lens.dtype, q_starts.dtype)
    facts = Facts(storage.kv_heads, k.dtype, k.dtype, None, index, NO_TYPES, "none", "none", False, aligned, k.device)
    if batch.shard is not None:
        facts = facts._replace(shard=True)
    if call.rope is not None:
        facts = _with_rope(call, facts)
    return _problem(storage, PLAIN.traits, facts), Extent.of(k, cache, batch)


def _with_rope(call: Call, facts: Facts) -> Facts:
    """The facts of a write that rotates queries too, or keys alone."""
    q, q_out, unit = call.q_in, call.q_out, call.cache.storage.stride_units[0]
    assert call.rope is not None
    if q is None:
        return facts._replace(rope=call.rope.traits(False))
    aligned = facts.aligned and is_aligned(q, unit) and (q_out is None or is_aligned(q_out, unit))
    return facts._replace(rope=call.rope.traits(True), q_heads=q.shape[1], aligned=aligned)


DESCRIBE = {"attend": described_attend, "write": described_write, "audit": described_attend}


class Facts(NamedTuple):
    """The properties of a call that neither its cache nor its options have."""

    q_heads: int
    q_dtype: torch.dtype
    out_dtype: torch.dtype
    new_dtype: torch.dtype | None
    index_types: tuple[torch.dtype, torch.dtype, torch.dtype]
    tensor_types: tuple[tuple[str, torch.dtype], ...]
    """The types of the options' tensors."""
    q_scale: str
    out_scale: str
    lse: bool
    aligned: bool
    device: torch.device
    context_from: int = 1
    only: tuple[int, int] = (0, ANY)
    shard: bool = False
    spans: torch.dtype | None = None
    select: tuple[str, torch.dtype | None] = NO_SELECTION
    prefixes: bool = False
    rope: RopeTraits | None = None


_OF_CACHE = tuple(name for name in FIELDS if name in Storage._fields)
"""The fields of a problem that describe the cache."""


@lru_cache(maxsize=MAX_PROBLEMS)
def _problem(storage: Storage, traits: Traits, facts: Facts) -> Problem:
    """Equal facts give one object: it is made once, and found by its identity from then on."""
    types = [dtype_name(dtype) for dtype in facts.index_types]
    return Problem(
        **vars(traits) | {name: dtype_name(dtype) for name, dtype in facts.tensor_types},
        **{name: getattr(storage, name) for name in _OF_CACHE},
        q_heads=facts.q_heads,
        q_dtype=dtype_name(facts.q_dtype),
        out_dtype=dtype_name(facts.out_dtype),
        index=types[0] if len(set(types)) == 1 else "+".join(types),
        form="full" if facts.new_dtype is None else "context",
        lse=facts.lse,
        device=str(facts.device),
        memory="aligned" if facts.aligned else "generic",
        new_dtype="" if facts.new_dtype is None else dtype_name(facts.new_dtype),
        q_scale=facts.q_scale,
        out_scale=facts.out_scale,
        context_from=facts.context_from,
        only=facts.only,
        shard=facts.shard,
        rope=facts.rope,
        spans="none" if facts.spans is None else dtype_name(facts.spans),
        select=facts.select[0],
        select_index="" if facts.select[1] is None else dtype_name(facts.select[1]),
        prefixes=facts.prefixes,
    )


def _scale_kind(scale: float | torch.Tensor | None, device: torch.device) -> str:
    if scale is None:
        return "none"
    return "tensor" if isinstance(scale, torch.Tensor) and scale.device == device else "number"


def add_problem(problem: Problem, device: torch.device) -> KnownProblem:
    """Adds a problem to the launcher cache."""
    if len(_known) >= MAX_PROBLEMS:
        _known.clear()
    known = _known[id(problem)] = KnownProblem(problem, Platform.detect(device))
    return known


def audit(call: Call) -> None:
    """Compares a cache with its ledger on the device; where no kernel can, a warning says so, once for each problem. In host memory
    the ledger is checked before every call instead."""
    if call.cache.ledger is None or call.cache.device.type == "cpu":
        return
    problem, extent = described("audit", call)
    if choose(problem, extent, Platform.detect(call.cache.device), operation="audit").chosen is not None:
        launcher_for("audit", call)(call)
    elif problem not in _not_audited:
        _not_audited.add(problem)
        said = "quire: the cache keeps a ledger, and no kernel compares it here (quire.explain(..., operation='audit') says why)"
        warnings.warn(f"{said}: tokens that were never written are not found for {problem}", RuntimeWarning, stacklevel=3)
