"""How vLLM finds Quire: the entry point, the name on the command line, the overrides, and what is refused."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from quire.integrations.engines import ENGINES, Engine, EngineError
from quire.integrations.vllm import register
from quire.integrations.vllm.registration import CLASSES
from quire.integrations.vllm.settings import CHECKED, OVERRIDABLE, OVERRIDE, Settings


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """What the plugin logs, once, whether or not vLLM has configured logging, after which its loggers do not propagate."""
    logger = logging.getLogger("vllm.quire")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_vllm_finds_the_entry_point() -> None:
    (entry,) = (entry for entry in metadata.entry_points(group="vllm.general_plugins") if entry.name == "quire")
    assert entry.load() is register
    load_general_plugins()
    assert "QUIRE" in AttentionBackendEnum.__members__


def test_registering_twice_is_harmless() -> None:
    register()
    register()
    assert AttentionBackendEnum["QUIRE"].get_class().get_name() == "QUIRE"
    assert not any(AttentionBackendEnum[name].is_overridden() for name in OVERRIDABLE)


@pytest.mark.parametrize("name", OVERRIDABLE)
def test_an_override_is_on_request(name: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    register()
    assert "takes the place" not in log.text
    monkeypatch.setenv(OVERRIDE, name.lower())
    try:
        register()
        register()
        assert [record.getMessage() for record in log.records].count(f"Quire takes the place of {name}") == 1
        assert AttentionBackendEnum[name].get_path() == CLASSES[name]
        # vLLM looks the member up by the name that the class returns.
        assert AttentionBackendEnum[name].get_class().get_name() == name
    finally:
        AttentionBackendEnum[name].clear_override()


def test_the_command_line_accepts_the_name() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = EngineArgs.from_cli_args(parser.parse_args(["--model", "any", "--attention-backend", "quire"]))
    # As `create_engine_config` does, which needs a model.
    from vllm.config import AttentionConfig

    assert AttentionConfig(backend=arguments.attention_backend).backend is AttentionBackendEnum["QUIRE"]


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [(OVERRIDE, "CPU_ATTN,FLASH_ATTN", "CPU_ATTN, ROCM_ATTN, TRITON_ATTN"), (CHECKED, "yes", "0, 1, results")],
)
def test_an_unknown_setting_is_refused(variable: str, value: str, allowed: str) -> None:
    with pytest.raises(EngineError) as refused:
        Settings.read({variable: value})
    text = str(refused.value)
    assert variable in text and allowed in text and ("FLASH_ATTN" in text or "yes" in text)


def test_settings() -> None:
    assert Settings.read({}) == Settings((), False, False)
    assert Settings.read({OVERRIDE: " cpu_attn , TRITON_ATTN ", CHECKED: "1"}) == Settings(("CPU_ATTN", "TRITON_ATTN"), True, False)
    assert Settings.read({CHECKED: "results"}) == Settings((), True, True)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "installed", lambda self: "0.31.4")
    monkeypatch.setenv(OVERRIDE, "CPU_ATTN")
    message = r"vllm 0.31.4 is not supported.*0.32.0 or newer, before 0.33"
    with pytest.raises(EngineError, match=message):
        register()
    assert not AttentionBackendEnum["CPU_ATTN"].is_overridden()
    assert ENGINES["vllm"].is_supported("0.32.1")


PLUGINS = "from vllm.plugins import load_general_plugins; load_general_plugins(); load_general_plugins()"


def load_plugins(**settings: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: vLLM has not configured logging when it loads plugins."""
    environment = {"PATH": "/usr/bin:/bin"} | settings
    return subprocess.run((sys.executable, "-c", PLUGINS), env=environment, capture_output=True, text=True, timeout=300)


def test_a_bad_setting_stops_vllm() -> None:
    done = load_plugins(**{OVERRIDE: "NO_SUCH"})
    assert done.returncode and "QUIRE_VLLM_OVERRIDE: got NO_SUCH" in done.stderr


@pytest.mark.parametrize("override", ["", "TRITON_ATTN"])
def test_checks_without_effect_stop_vllm(override: str) -> None:
    done = load_plugins(**{OVERRIDE: override, CHECKED: "1"})
    assert done.returncode and "QUIRE_VLLM_CHECKED: got" in done.stderr and "set QUIRE_VLLM_OVERRIDE=CPU_ATTN" in done.stderr


@pytest.mark.parametrize("override, used", [("", False), ("TRITON_ATTN", False), ("CPU_ATTN", True)])
def test_the_log_says_whether_quire_is_used(override: str, used: bool) -> None:
    done = load_plugins(**{OVERRIDE: override})
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    assert text.count("Quire takes the place of CPU_ATTN") == used
    assert text.count("on a CPU vLLM ignores --attention-backend; to use Quire, set QUIRE_VLLM_OVERRIDE=CPU_ATTN") == (not used)


def test_an_unused_plugin_does_not_stop_another_version(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Engine, "installed", lambda self: "0.31.4")
    register()
    assert "the backend QUIRE is not available: vllm 0.31.4 is not supported" in log.text
