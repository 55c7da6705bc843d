"""MkDocs hooks: pages made from files outside docs/, and links to those files.

DESIGN.md, CONTRIBUTING.md, CHANGELOG.md and the examples are written once, where a reader of the repository looks for them. On the
site they are pages too, so links to them work.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"DESIGN.md": "design.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
"""Files of the repository, and the page that shows each of them. The front page covers what the README says."""
SHOWN = {**PAGES, "src/quire/__init__.py": "api.md"}
"""The targets of links: the file that lists the public names leads to their reference."""
FIGURE = re.compile(r'<img ([^>]*?)src="figures/(\w+)\.svg"([^>]*?)/?>')
"""A figure in a page. Each has a narrow variant, which phones show."""
LINK = re.compile(r"(\]\()([^)\s#]+)([^)\s]*\))")
"""A Markdown link: its target is the second group, an anchor may be in the third."""


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        if source != "README.md":
            files.append(File.generated(config, page, content=relink((ROOT / source).read_text(), source)))
    files.append(File.generated(config, "examples.md", content=examples_page()))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    generated = page.file.generated_by is not None
    return markdown if generated else relink(markdown, f"docs/{page.file.src_uri}")


def on_page_content(html: str, **_: Any) -> str:
    """Figures with their narrow variants."""
    source = r'<source media="(max-width: 44.9em)" srcset="figures/\2_narrow.svg">'
    return FIGURE.sub(rf'<picture>{source}<img \1src="figures/\2.svg"\3></picture>', html)


def relink(markdown: str, source: str) -> str:
    """Links of a file of the repository, as links between pages of the site."""

    def target(found: re.Match[str]) -> str:
        link = found[2]
        if "://" in link:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if path in SHOWN:
            return f"{found[1]}{SHOWN[path]}{found[3]}"
        if path.split("/")[0] == "examples":
            return f"{found[1]}examples.md#{anchor(path)})"
        return f"{found[1]}{posixpath.relpath(path, 'docs')}{found[3]}"

    return LINK.sub(target, markdown)


def examples_page() -> str:
    """The examples, each with its source."""
    parts = ["# Examples\n\nEach file runs as it is: `python examples/01_first_batch.py`.\n"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        parts.append(f"## {path.name} {{ #{anchor(f'examples/{path.name}')} }}\n\n```python\n{path.read_text()}```\n")
    about = "The investigation of a failing test, in several files; [its page](rocm_story.md) shows what it prints."
    parts.append(f"## rocm_story {{ #{anchor('examples/rocm_story')} }}\n\n{about} Run it with `python examples/rocm_story`.\n")
    return "\n".join(parts)


def anchor(path: str) -> str:
    """The heading of an example on the page of examples."""
    name = path.removeprefix("examples").split("/")[1:2]
    return Path(name[0]).stem.replace("_", "-") if name else "examples"


def api_page() -> str:
    """Every public name of the package, under the heading that a user imports it by; mkdocstrings adds the docstrings."""
    homes, public = public_names(ast.parse((ROOT / "src" / "quire" / "__init__.py").read_text()))
    parts = ["# API reference\n\nEverything that `import quire` provides. The text comes from the docstrings.\n"]
    for name in public:
        if name in homes:
            parts.append(f"::: {homes[name]}.{name}\n    options:\n      heading: quire.{name}\n")
    parts.append("::: quire.reference\n    options:\n      heading: quire.reference\n      members: [attention]\n")
    return "\n".join(parts)


def public_names(tree: ast.Module) -> tuple[dict[str, str], list[str]]:
    """Where each name of a module was imported from, and the names in its `__all__`."""
    homes, public = {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "quire":
            homes |= {alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            public = ast.literal_eval(node.value)
    return homes, public
