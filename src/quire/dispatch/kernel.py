"""A kernel and its limits, as data. One loop, `judge`, asks every limit; choosing and explaining read the same answers."""

from __future__ import annotations

import importlib
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
BUILD = "install a C++17 compiler (g++ or clang++), then Quire once more: its build makes the native kernels"


class Allowed(Protocol):
    """What a limit allows: asked with `in`, printed with `str`."""

    def __contains__(self, given: Any, /) -> bool: ...


@dataclass(frozen=True)
class OneOf:
    """A few values: '16 or 32'."""

    values: tuple[Any, ...]

    def __contains__(self, given: Any) -> bool:
        return given in self.values

    def __str__(self) -> str:
        *most, last = map(words, self.values)
        return f"{', '.join(most)} or {last}" if most else last


@dataclass(frozen=True)
class Except:
    """Anything else than a few values."""

    values: tuple[Any, ...]

    def __contains__(self, given: Any) -> bool:
        return given not in self.values

    def __str__(self) -> str:
        return f"not {OneOf(self.values)}"


@dataclass(frozen=True)
class Span:
    """Whole numbers from `low` to `high`, both included; None is open: '1 to 512', 'at most 16'."""

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
    """Every one of these is among the things given."""

    names: tuple[str, ...]

    def __contains__(self, given: Iterable[str]) -> bool:
        return set(self.names) <= set(given)

    def __str__(self) -> str:
        return " and ".join(self.names)


@dataclass(frozen=True)
class Limit:
    """One question about a call: what is given, and is it allowed?"""

    rule: str
    given: Callable[[Any], Any]
    allowed: Allowed
    change: str | None = None
    """What a person can do to satisfy it; None if it is the machine that refuses."""
    of_batch: bool = False
    """Whether the answer depends on the batch, not on the layer and the machine alone."""


class Finding(NamedTuple):
    """The answer to one limit. One that does not hold is a refusal."""

    rule: str
    given: Any
    allowed: str
    holds: bool
    change: str | None

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "given": list(self.given) if isinstance(self.given, tuple) else self.given}

    def __str__(self) -> str:
        return f"{self.rule}: given {words(self.given)}, allowed {self.allowed}"


def judge(limits: Iterable[Limit], request: Any) -> tuple[Finding, ...]:
    """Asks every limit about a request. None hides a later one: a person who wants to change something needs to know all of it."""
    findings = []
    for limit in limits:
        given = limit.given(request)
        findings.append(Finding(limit.rule, given, str(limit.allowed), given in limit.allowed, limit.change))
    return tuple(findings)


def words(value: Any) -> str:
    """A value as an explanation prints it."""
    if isinstance(value, tuple):
        return ", ".join(map(words, value)) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


class Request(NamedTuple):
    """What the limits of a kernel are asked about."""

    problem: Problem
    extent: Extent
    platform: Platform
    capturing: bool = False


class Launcher(Protocol):
    """Launches calls of one problem with one kernel."""

    def __call__(self, call: Any) -> None: ...


@runtime_checkable
class Compiling(Protocol):
    """A launcher whose kernels are compiled at run time."""

    workspace_bytes: int

    def __call__(self, call: Any) -> None: ...

    def keys(self, extent: Extent | None = None) -> tuple[str, ...]:
        """A key for each kernel that a batch needs; without an extent, that some batch needs."""

    def not_compiled(self, extent: Extent) -> tuple[str, ...]:
        """The names of a batch's kernels that a call would have to compile."""

    def prepare(self, device: int | None) -> Iterable[tuple[str, Callable[[], None]]]:
        """The kernels that some batch needs, by key, and what compiles each, for a device also loads it."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """One implementation of one operation and where it works. A limit of None is no limit.

    Compared by identity: kernels live in a catalogue, and a decision is looked up on every call."""

    name: str
    operation: str
    """attend, write or audit."""
    summary: str
    launcher: str
    """'module:function', imported at the first launch and not before. The function makes the launcher of a problem on a platform,
    which then takes calls."""
    vendors: tuple[str, ...] | None = None
    families: tuple[str, ...] | None = None
    arches: tuple[str, ...] | None = None
    cpu_features: tuple[str, ...] = ()
    """Those a CPU must have, all of them."""
    needs: tuple[str, ...] = ()
    """Modules that must be installed, all of them."""
    library: str | None = None
    """A file of the package that its build makes where there is a compiler."""
    q_dtypes: tuple[str, ...] | None = None
    pairs: tuple[str, ...] | None = None
    """Types of queries over formats of caches, such as 'bf16 over e4m3fn'."""
    formats: tuple[str, ...] | None = None
    scales: tuple[str, ...] | None = None
    layouts: tuple[str, ...] | None = None
    memory: tuple[str, ...] | None = None
    page_size: OneOf | MultipleOf | Span | None = None
    head_dim: OneOf | MultipleOf | Span | None = None
    v_head_dim: OneOf | MultipleOf | Span | None = None
    group: OneOf | Span | None = None
    max_q_len: int | None = None
    max_kv_len: int | None = None
    without: tuple[str, ...] = ()
    """Features it lacks, by their names in `Problem.features`."""
    capturable: bool = True
    """Whether a CUDA graph may record its launch."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_catalogue, (self.operation, self.name)

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        return tuple(_limits(self))

    @cached_property
    def batch_limits(self) -> tuple[Limit, ...]:
        """Those that have to be asked for every batch."""
        return tuple(limit for limit in self.limits if limit.of_batch)

    def launcher_for(self, problem: Problem, platform: Platform) -> Launcher:
        """What launches calls of a problem on a platform."""
        return self._factory(problem, platform)

    def keys_for(self, problem: Problem, extent: Extent, platform: Platform) -> tuple[str, ...]:
        """Keys of the kernels that a batch of a problem needs compiled; empty if nothing is compiled at run time."""
        launcher = self.launcher_for(problem, platform)
        return launcher.keys(extent) if isinstance(launcher, Compiling) else ()

    def not_compiled(self, problem: Problem, extent: Extent, platform: Platform) -> tuple[str, ...]:
        """The names of the kernels that a batch of a problem would have to compile."""
        launcher = self.launcher_for(problem, platform)
        return launcher.not_compiled(extent) if isinstance(launcher, Compiling) else ()

    @cached_property
    def _factory(self) -> Callable[[Problem, Platform], Launcher]:
        return self._import(self.launcher)

    def _import(self, place: str) -> Any:
        module, _, function = place.partition(":")
        try:
            return getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise KernelError(f"kernel {self.name!r} cannot {self.operation}: {place} does not load: {error}") from error


def _of_catalogue(operation: str, name: str) -> Kernel:
    """A kernel that was pickled: those of the catalogue are known by name."""
    from quire.dispatch.catalogue import CATALOGUE

    for kernel in CATALOGUE:
        if (kernel.operation, kernel.name) == (operation, name):
            return kernel
    raise KernelError(f"this version of Quire has no kernel {name!r} for {operation}")


def _limits(kernel: Kernel) -> Iterator[Limit]:
    """The limits of a kernel in the order in which an explanation names them: what nobody can change comes first."""

    def one_of(values: tuple[str, ...] | None) -> OneOf | None:
        return None if values is None else OneOf(values)

    def at_most(most: int | None) -> Span | None:
        return None if most is None else Span(None, most)

    def all_of(names: tuple[str, ...]) -> AllOf | None:
        return AllOf(names) if names else None

    rows: tuple[tuple[str, Callable[[Request], Any], Allowed | None, str | None], ...] = (
        ("vendor", attrgetter("platform.vendor"), one_of(kernel.vendors), None),
        ("family", attrgetter("platform.family"), one_of(kernel.families), None),
        ("arch", attrgetter("platform.arch"), one_of(kernel.arches), None),
        ("cpu_features", attrgetter("platform.cpu_features"), all_of(kernel.cpu_features), None),
        ("installed", lambda _: tuple(filter(find_spec, kernel.needs)), all_of(kernel.needs), "install {}"),
        ("built", lambda _: (PACKAGE / str(kernel.library)).exists(), OneOf((True,)) if kernel.library else None, BUILD),
        ("q_dtype", attrgetter("problem.q_dtype"), one_of(kernel.q_dtypes), "give q as {}"),
        ("types", lambda request: f"{request.problem.q_dtype} over {request.problem.format}", one_of(kernel.pairs), "give {}"),
        ("format", attrgetter("problem.format"), one_of(kernel.formats), "store the cache as {}"),
        ("scales", attrgetter("problem.scales"), one_of(kernel.scales), "set scales to {}"),
        ("layout", attrgetter("problem.layout"), one_of(kernel.layouts), "set layout to {}"),
        (
            "memory",
            attrgetter("problem.memory"),
            one_of(kernel.memory),
            "give contiguous tensors that begin at multiples of 16 bytes",
        ),
        ("page_size", attrgetter("problem.page_size"), kernel.page_size, "set page_size to {}"),
        ("head_dim", attrgetter("problem.head_dim"), kernel.head_dim, "use a head_dim of {}"),
        ("v_head_dim", attrgetter("problem.v_head_dim"), kernel.v_head_dim, "use a v_head_dim of {}"),
        ("group", attrgetter("problem.group"), kernel.group, "use a group (q_heads / kv_heads) of {}"),
        ("max_q_len", attrgetter("extent.max_q_len"), at_most(kernel.max_q_len), "give {} new tokens of a sequence in one call"),
        ("max_kv_len", attrgetter("extent.max_kv_len"), at_most(kernel.max_kv_len), "keep {} tokens in a sequence"),
    )
    for rule, given, allowed, change in rows:
        if allowed is not None:
            yield Limit(rule, given, allowed, change and change.format(allowed), of_batch=rule in ("max_q_len", "max_kv_len"))
    for feature in kernel.without:
        yield Limit(feature, partial(_uses, feature), OneOf((False,)), f"do without {feature}")
    if not kernel.capturable:
        yield Limit("capturing", attrgetter("capturing"), OneOf((False,)), "launch it outside of a CUDA graph")


def _uses(feature: str, request: Request) -> bool:
    return feature in request.problem.features
