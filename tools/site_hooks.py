"""MkDocs hooks: pages made from files outside docs/, and links to those files.

DESIGN.md, CONTRIBUTING.md, CHANGELOG.md and the examples are written once, where a reader of the repository looks for them. On the
site they are pages too, so links to them work.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any, NamedTuple

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
            files.append(File.generated(config, page, content=relink((ROOT / source).read_text(), source, page)))
    files.append(File.generated(config, "examples.md", content=examples_page()))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


BOOSTED = {"explain.md": 3}
"""Pages that a search lists first: "which kernel ran" occurs in many."""
ALONE = ("index.md", "rocm_story.md")
"""Pages that are a tab by themselves: a list of the pages of their section would have one entry."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri in ALONE:
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri in BOOSTED:
        page.meta["search"] = {"boost": BOOSTED[page.file.src_uri]}
    generated = page.file.generated_by is not None
    return markdown if generated else relink(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def on_page_content(html: str, **_: Any) -> str:
    """Figures with their narrow variants."""
    source = r'<source media="(max-width: 44.9em)" srcset="figures/\2_narrow.svg">'
    return FIGURE.sub(rf'<picture>{source}<img \1src="figures/\2.svg"\3></picture>', html)


def relink(markdown: str, source: str, page: str) -> str:
    """Links of a file of the repository, as links from its page to other pages of the site."""
    folder = posixpath.dirname(page) or "."

    def target(found: re.Match[str]) -> str:
        link = found[2]
        if "://" in link:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if path in SHOWN:
            return f"{found[1]}{posixpath.relpath(SHOWN[path], folder)}{found[3]}"
        if path.split("/")[0] == "examples":
            return f"{found[1]}{posixpath.relpath('examples.md', folder)}#{anchor(path)})"
        return f"{found[1]}{posixpath.relpath(path, posixpath.join('docs', folder))}{found[3]}"

    return LINK.sub(target, markdown)


FOLDERS = ("", "integrations", "distributed")
"""The folders of examples that the site shows with their source."""


def examples_page() -> str:
    """The examples, each with its source."""
    parts = ["# Examples\n\nEach file runs as it is: `python examples/01_first_batch.py`.\n"]
    for path in (path for folder in FOLDERS for path in sorted((ROOT / "examples" / folder).glob("*.py"))):
        name = path.relative_to(ROOT / "examples").as_posix()
        parts.append(f"## {name} {{ #{anchor(f'examples/{name}')} }}\n\n```python\n{path.read_text()}```\n")
    about = "The investigation of a failing test, in several files; [its page](rocm_story.md) shows what it prints."
    parts.append(f"## rocm_story {{ #{anchor('examples/rocm_story')} }}\n\n{about} Run it with `python examples/rocm_story`.\n")
    return "\n".join(parts)


def anchor(path: str) -> str:
    """The heading of an example on the page of examples."""
    names = path.split("/")[1:]
    shown = names[:1] if names[:1] == ["rocm_story"] else names
    return "-".join(shown).removesuffix(".py").replace("_", "-") or "examples"


OTHERS = {
    "Sequence": "quire.cache.sequence",
    "Usage": "quire.cache.pool",
    "PrefixUsage": "quire.cache.prefix_cache",
    "HostPages": "quire.cache.swap",
    "Ledger": "quire.cache.ledger",
    "Kernel": "quire.dispatch.kernel",
    "Candidate": "quire.dispatch.decision",
    "QuantisationWarning": "quire.errors",
}
"""Classes that the public functions return or give, and where they are defined. A user does not import them."""


def api_page() -> str:
    """Every public name of the package, under the heading that a user imports it by; mkdocstrings adds the docstrings."""
    homes, public = public_names(ast.parse(source_of("quire")))
    entries = [Entry(f"quire.{name}", homes[name], name) for name in public if name in homes]
    entries.append(Entry("quire.reference.attention", "quire.reference", "attention"))
    others = [Entry(name, home, name) for name, home in OTHERS.items()]
    vllm_homes, vllm = public_names(ast.parse(source_of("quire.compat.vllm")))
    operators = [Entry(f"quire.compat.vllm.{name}", vllm_homes[name], name) for name in vllm]
    return "\n".join(
        [
            "# API reference\n",
            "Everything that `import quire` provides. The text comes from the docstrings.\n",
            *overview(entries),
            "Classes of results and handles:\n",
            *overview(others),
            "vLLM's operators, in `quire.compat.vllm` ([migrating](migrating.md#from-vllm)):\n",
            *overview(operators),
            *(entry.section() for entry in [*entries, *others, *operators]),
        ]
    )


class Entry(NamedTuple):
    """A name of the reference: as a user knows it, and the module that defines it."""

    title: str
    home: str
    name: str

    @property
    def path(self) -> str:
        """What mkdocstrings documents, whose path is the anchor: the public name, unless a module has it too."""
        module = (ROOT / "src").joinpath(*self.title.split(".")).with_suffix(".py")
        return self.title if self.title.startswith("quire.") and not module.exists() else f"{self.home}.{self.name}"

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        for node in reversed(ast.parse(source_of(self.home)).body):  # after its overloads
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == self.name:
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                sentences = re.split(r"(?<=\.) ", text)
                # vLLM's operators name their output in the first sentence, and say in the second what they compute.
                return " ".join(sentences[: 2 if len(sentences[0]) < 25 else 1]).rstrip(":.").replace("|", "\\|")
        raise ValueError(f"{self.home} does not define {self.name}")

    def section(self) -> str:
        # Short anchors also for functions, whose modules have their names.
        short = "" if self.path == self.title else f'<a id="{self.title}"></a>\n\n'
        inherited = "      inherited_members: true\n" if self.name == "Problem" else ""
        return f"{short}::: {self.path}\n    options:\n      heading: {self.title}\n{inherited}"


def overview(entries: list[Entry]) -> list[str]:
    return ["| name | |", "|---|---|", *(f"| [`{entry.title}`](#{entry.path}) | {entry.summary} |" for entry in entries), ""]


def source_of(module: str) -> str:
    path = (ROOT / "src").joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def public_names(tree: ast.Module) -> tuple[dict[str, str], list[str]]:
    """Where each name of a module was imported from, and the names in its `__all__`."""
    homes, public = {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "quire":
            homes |= {alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            public = ast.literal_eval(node.value)
    return homes, public
