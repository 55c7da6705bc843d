"""Reports as HTML files that need nothing else: no network, no other file, no library in the browser.

Templates are jinja2 with autoescape. Charts are inline SVG and CSS drawn by the templates: they follow the reader's light or dark
colors and the width of the screen. A plotting library would add a large dependency (matplotlib) or megabytes of script to each file
(plotly), and does neither.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: Any) -> str:
    """The report that a template of `quire/html/templates` makes of these values."""
    return _environment().get_template(f"{template}.html.j2").render(**values)


@lru_cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("quire.html"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
