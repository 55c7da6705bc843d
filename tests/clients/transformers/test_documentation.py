"""The page and the example of this integration run as they are shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.transformers_models import model, prompts

ROOT = Path(__file__).parents[3]


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    paths = {}
    for name in ("llama", "bloom", "mpt"):
        paths[name] = str(tmp_path / name)
        model(name, "eager").save_pretrained(paths[name])
    page = (ROOT / "docs" / "integrations" / "transformers.md").read_text()
    parts = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(parts) == 4
    for own in ("bloom", "mpt"):
        session: dict[str, Any] = {"path": paths["llama"], "bloom_or_mpt": paths[own], "prompts": prompts(9, 30)}
        for part in parts:
            exec(compile(part, "transformers.md", "exec"), session)
        assert len(session["results"]) == 2


def test_the_example_runs() -> None:
    command = (sys.executable, str(ROOT / "examples" / "integrations" / "transformers_generate.py"))
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("those of eager attention") == 2
