"""A kernel and its limits, as data. `check_limits` evaluates them; choosing a kernel and explaining the choice use the same
results."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from quire.errors import KernelError
from quire.platform import Platform
from quire.problem import Extent, Problem

PACKAGE = Path(__file__).parents[1]
FEWER_ROWS = "pass at most 16 new tokens of a sequence, or {} query rows, in one call"
BUILD = "install a C++17 compiler (g++ or clang++), then reinstall Quire, which builds the native kernels"


class Allowed(Protocol):
    """A set of allowed values: tested with `in`, printed with `str`."""

    def __contains__(self, given: Any, /) -> bool: ...


@dataclass(frozen=True)
class OneOf:
    """One of several values: '16 or 32'."""

    values: tuple[Any, ...]

    def __contains__(self, given: Any) -> bool:
        return given in self.values

    def __str__(self) -> str:
        *most, last = map(as_text, self.values)
        return f"{', '.join(most)} or {last}" if most else last


@dataclass(frozen=True)
class EachOf(OneOf):
    """One of several values, for a value or for each of a tuple."""

    def __contains__(self, given: Any) -> bool:
        return all(one in self.values for one in (given if isinstance(given, tuple) else (given,)))


@dataclass(frozen=True)
class Except:
    """Any value except these."""

    values: tuple[Any, ...]

    def __contains__(self, given: Any) -> bool:
        return given not in self.values

    def __str__(self) -> str:
        return f"not {OneOf(self.values)}"


@dataclass(frozen=True)
class IntRange:
    """Integers from `low` to `high`, inclusive; None is unbounded: '1 to 512', 'at most 16'."""

    low: int | None
    high: int | None

    def __contains__(self, given: int) -> bool:
        return (self.low is None or given >= self.low) and (self.high is None or given <= self.high)

    def __str__(self) -> str:
        if self.low is None:
            return f"at most {self.high}"
        return f"at least {self.low}" if self.high is None else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class MultipleOf:
    """'a multiple of 16'."""

    unit: int

    def __contains__(self, given: int) -> bool:
        return given % self.unit == 0

    def __str__(self) -> str:
        return f"a multiple of {self.unit}"


@dataclass(frozen=True)
class AllOf:
    """All of these names are required."""

    names: tuple[str, ...]

    def __contains__(self, given: Iterable[str]) -> bool:
        return set(self.names) <= set(given)

    def __str__(self) -> str:
        return " and ".join(self.names)


@dataclass(frozen=True)
class Limit:
    """One limit of a kernel: a property of the call, and its allowed values."""

    rule: str
    given: Callable[[Any], Any]
    """None if a call does not have the property."""
    allowed: Allowed
    change: str | None = None
    """What the user can change to satisfy it; None if it depends on the machine."""
    of_batch: bool = False
    """Whether the property depends on the batch, and not only on the layer and the machine."""


class LimitResult(NamedTuple):
    """The result of evaluating one limit. One that does not hold is a refusal."""

    rule: str
    given: Any
    allowed: str
    holds: bool
    change: str | None

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "given": list(self.given) if isinstance(self.given, tuple) else self.given}

    def __str__(self) -> str:
        return f"{self.rule}: given {as_text(self.given)}, allowed {self.allowed}"


def check_limits(limits: Iterable[Limit], query: Any) -> tuple[LimitResult, ...]:
    """Evaluates every limit, also after one that does not hold: the user needs to know all of them."""
    findings = []
    for limit in limits:
        given = limit.given(query)
        holds = given is None or given in limit.allowed
        findings.append(LimitResult(limit.rule, given, str(limit.allowed), holds, limit.change))
    return tuple(findings)


def as_text(value: Any) -> str:
    """A value as an explanation prints it."""
    if isinstance(value, tuple):
        return ", ".join(map(as_text, value)) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


_OF_BATCH = ("max_q_len", "long_rows", "max_kv_len", "saved_keys")
"""The limits that depend on `Extent`."""
SHORT = 16
"""A query of at most so many new tokens is short."""


class LimitQuery(NamedTuple):
    """What the limits of a kernel depend on."""

    problem: Problem
    extent: Extent
    platform: Platform
    capturing: bool = False


class KernelLauncher(Protocol):
    """Launches calls of one problem with one kernel."""

    def __call__(self, call: Any) -> None: ...


@runtime_checkable
class CompilingLauncher(Protocol):
    """A launcher whose kernels are compiled at run time."""

    workspace_bytes: int

    def __call__(self, call: Any) -> None: ...

    def keys(self, extent: Extent | None = None) -> tuple[str, ...]:
        """A key for each kernel that a batch of this extent needs; without an extent, that any batch needs."""

    def not_compiled(self, extent: Extent) -> tuple[str, ...]:
        """The names of the kernels that a call with a batch of this extent would have to compile."""

    def prepare(self, device: int | None) -> Iterable[tuple[str, Callable[[], None]]]:
        """For each kernel that any batch needs: its key and a function that compiles it, and loads it if a device is given."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """One implementation of one operation, with its limits. None means no limit.

    Compared by identity, because the catalogue holds each kernel once and every call looks one up."""

    name: str
    """The name, as `attend(..., kernel=...)` takes it."""
    operation: str
    """attend, write or audit."""
    summary: str
    """What it does, in one line."""
    launcher: str
    """'module:function', imported at the first launch. The function makes the launcher of a problem on a platform."""
    vendors: tuple[str, ...] | None = None
    """Of `Platform.vendor`; this and the next fields are limits."""
    families: tuple[str, ...] | None = None
    """Of `Platform.family`."""
    arches: tuple[str, ...] | None = None
    """Of `Platform.arch`."""
    cpu_features: tuple[str, ...] = ()
    """CPU features that are all required."""
    needs: tuple[str, ...] = ()
    """Modules that must all be installed."""
    library: str | None = None
    """A file of the package that must exist; it is built on installation if there is a compiler."""
    q_dtypes: tuple[str, ...] | None = None
    """Types of the queries."""
    pairs: tuple[str, ...] | None = None
    """Query types with cache formats, such as 'bf16 over fp16'."""
    formats: tuple[str, ...] | None = None
    """Formats of the cache, of both K and V."""
    scales: tuple[str, ...] | None = None
    """Of `Problem.scales`."""
    layouts: tuple[str, ...] | None = None
    """Layouts of the cache."""
    memory: tuple[str, ...] | None = None
    """Of `Problem.memory`."""
    page_size: OneOf | MultipleOf | IntRange | None = None
    """Slots of a page."""
    head_dim: OneOf | MultipleOf | IntRange | None = None
    """Sizes of a head of K."""
    v_head_dim: OneOf | MultipleOf | IntRange | None = None
    """Sizes of a head of V. This and `head_dim` are of caches in which V is no part of K."""
    latent_dim: IntRange | None = None
    """Sizes of a head of K of which V is a part."""
    latent_memory: int | None = None
    """The least bytes of shared memory for products in fp32 with keys of which V is a part, in tiles wider than 576."""
    group: OneOf | IntRange | None = None
    """Query heads per KV head."""
    max_q_len: int | None = None
    """The most new tokens of a sequence."""
    long_rows: int | None = None
    """The most query rows (tokens times query heads) of a batch in which a sequence may have more than `SHORT` new tokens."""
    max_kv_len: int | None = None
    """The most tokens of a sequence."""
    shares: int = 0
    """The fewest reads of keys that must be saved by reading shared prefixes once: it runs batches with prefixes alone. 0 for
    kernels that read the pages of each sequence."""
    without: tuple[str, ...] = ()
    """Unsupported features, by their names in `Problem.features`."""
    capturable: bool = True
    """Whether its launch can be captured into a CUDA graph."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_catalogue, (self.operation, self.name)

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        """All limits, as an explanation lists them."""
        return tuple(_limits(self))

    @cached_property
    def batch_limits(self) -> tuple[Limit, ...]:
        """The limits that depend on the batch."""
        return tuple(limit for limit in self.limits if limit.of_batch)

    @cached_property
    def longest_q(self) -> int:
        """`max_q_len` as a number."""
        return sys.maxsize if self.max_q_len is None else self.max_q_len

    @cached_property
    def most_long_rows(self) -> int:
        """`long_rows` as a number."""
        return sys.maxsize if self.long_rows is None else self.long_rows

    @cached_property
    def longest_kv(self) -> int:
        """`max_kv_len` as a number."""
        return sys.maxsize if self.max_kv_len is None else self.max_kv_len

    @property
    def not_installed(self) -> tuple[str, ...]:
        """The modules it needs that this machine lacks."""
        return tuple(name for name in self.needs if find_spec(name) is None)

    def launcher_for(self, problem: Problem, platform: Platform) -> KernelLauncher:
        """The launcher of calls of a problem on a platform. What a kernel does not read is not part of its problem:
        with prefixes a layer has the same compiled kernels as without, and those for shared prefixes."""
        if problem.prefixes and not self.shares:
            problem = problem.replace(prefixes=False)
        return self._factory(problem, platform)

    def keys_for(self, problem: Problem, extent: Extent, platform: Platform) -> tuple[str, ...]:
        """Keys of the kernels that a batch of a problem needs compiled; empty if nothing is compiled at run time,
        and where the compiler is missing."""
        if self.not_installed:
            return ()
        launcher = self.launcher_for(problem, platform)
        return launcher.keys(extent) if isinstance(launcher, CompilingLauncher) else ()

    def not_compiled(self, problem: Problem, extent: Extent, platform: Platform) -> tuple[str, ...]:
        """The names of the kernels that a batch of a problem would have to compile; empty where the compiler is missing."""
        if self.not_installed:
            return ()
        launcher = self.launcher_for(problem, platform)
        return launcher.not_compiled(extent) if isinstance(launcher, CompilingLauncher) else ()

    @cached_property
    def _factory(self) -> Callable[[Problem, Platform], KernelLauncher]:
        return self._import(self.launcher)

    def _import(self, place: str) -> Any:
        module, _, function = place.partition(":")
        try:
            return getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise KernelError(f"kernel {self.name!r} cannot {self.operation}: {place} does not load: {error}") from error


def _of_catalogue(operation: str, name: str) -> Kernel:
    """Unpickles a kernel: it is looked up in the catalogue by name."""
    from quire.dispatch.catalogue import CATALOGUE

    for kernel in CATALOGUE:
        if (kernel.operation, kernel.name) == (operation, name):
            return kernel
    raise KernelError(f"this version of Quire has no kernel {name!r} for {operation}")


def _at_most(most: int | None) -> IntRange | None:
    return None if most is None else IntRange(None, most)


def _at_least(least: int | None) -> IntRange | None:
    return IntRange(least, None) if least else None


def _limits(kernel: Kernel) -> Iterator[Limit]:
    """The limits of a kernel in the order in which an explanation lists them: those of the machine come first."""

    def one_of(values: tuple[str, ...] | None) -> OneOf | None:
        return None if values is None else OneOf(values)

    def all_of(names: tuple[str, ...]) -> AllOf | None:
        return AllOf(names) if names else None

    rows: tuple[tuple[str, Callable[[LimitQuery], Any], Allowed | None, str | None], ...] = (
        ("vendor", attrgetter("platform.vendor"), one_of(kernel.vendors), None),
        ("family", attrgetter("platform.family"), one_of(kernel.families), None),
        ("arch", attrgetter("platform.arch"), one_of(kernel.arches), None),
        ("cpu_features", attrgetter("platform.cpu_features"), all_of(kernel.cpu_features), None),
        ("installed", partial(_installed, kernel.needs), all_of(kernel.needs), "install {}"),
        ("built", lambda _: (PACKAGE / str(kernel.library)).exists(), OneOf((True,)) if kernel.library else None, BUILD),
        ("q_dtype", attrgetter("problem.q_dtype"), one_of(kernel.q_dtypes), "pass q as {}"),
        (
            "types",
            lambda query: f"{query.problem.q_dtype} over {query.problem.format}",
            one_of(kernel.pairs),
            "use {} (queries over cache)",
        ),
        ("format", _formats, None if kernel.formats is None else EachOf(kernel.formats), "store the cache as {}"),
        ("scales", attrgetter("problem.scales"), one_of(kernel.scales), "set scales to {}"),
        ("layout", attrgetter("problem.layout"), one_of(kernel.layouts), "set layout to {}"),
        (
            "memory",
            attrgetter("problem.memory"),
            one_of(kernel.memory),
            "pass contiguous tensors that start at multiples of 16 bytes",
        ),
        ("page_size", attrgetter("problem.page_size"), kernel.page_size, "set page_size to {}"),
        ("head_dim", _size_of("head_dim", latent=False), kernel.head_dim, "use a head_dim of {}"),
        ("v_head_dim", _size_of("v_head_dim", latent=False), kernel.v_head_dim, "use a v_head_dim of {}"),
        ("latent_dim", _size_of("head_dim", latent=True), kernel.latent_dim, "use a head_dim of {}"),
        (
            "latent_memory",
            _latent_memory,
            _at_least(kernel.latent_memory),
            "store the cache in 16 bits, with queries of the same type",
        ),
        ("group", attrgetter("problem.group"), kernel.group, "use a group (q_heads / kv_heads) of {}"),
        ("max_q_len", attrgetter("extent.max_q_len"), _at_most(kernel.max_q_len), "pass {} new tokens of a sequence in one call"),
        ("long_rows", _long_rows, _at_most(kernel.long_rows), FEWER_ROWS),
        ("max_kv_len", attrgetter("extent.max_kv_len"), _at_most(kernel.max_kv_len), "keep {} tokens in a sequence"),
        (
            "saved_keys",
            attrgetter("extent.saved_keys"),
            _at_least(kernel.shares),
            "pass a batch with prefixes that save {} reads of keys",
        ),
    )
    for rule, given, allowed, change in rows:
        if allowed is not None:
            yield Limit(rule, given, allowed, change and change.format(allowed), of_batch=rule in _OF_BATCH)
    for feature in kernel.without:
        yield Limit(feature, partial(_uses, feature), OneOf((False,)), f"do not use {feature}")
    if not kernel.capturable:
        yield Limit("capturing", attrgetter("capturing"), OneOf((False,)), "launch it outside of a CUDA graph")


def _installed(needs: tuple[str, ...], query: LimitQuery) -> tuple[str, ...]:
    """The modules that are installed. Another machine is assumed to have all of them."""
    return tuple(name for name in needs if query.platform.is_only_named or find_spec(name))


def _long_rows(query: LimitQuery) -> int:
    """The query rows of a batch with long queries; 0 if all are short."""
    return query.extent.tokens * query.problem.q_heads if query.extent.max_q_len > SHORT else 0


def _size_of(name: str, latent: bool) -> Callable[[LimitQuery], int | None]:
    """A size of heads that have, or do not have, V as a part of K; None for others."""
    return lambda query: getattr(query.problem, name) if query.problem.v_in_k is latent else None


def _latent_memory(query: LimitQuery) -> int | None:
    """The memory of an NVIDIA GPU, where a key of a latent cache takes wide tiles that are multiplied in fp32. AMD's have queries
    in registers."""
    applies = query.problem.is_wide_latent and query.problem.in_fp32 and query.platform.vendor == "nvidia"
    return query.platform.program_memory if applies else None


def _formats(query: LimitQuery) -> str | tuple[str, str]:
    """The format of the cache, or those of K and V where they differ."""
    problem = query.problem
    return problem.formats if problem.mixed_formats else problem.format


def _uses(feature: str, query: LimitQuery) -> bool:
    return feature in query.problem.features
