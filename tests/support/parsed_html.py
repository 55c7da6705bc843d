"""A parser for reports: counts tags, and sees one that is never closed."""

from __future__ import annotations

from html.parser import HTMLParser


class ParsedHtml(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def count(self, tag: str, kind: str | None = None) -> int:
        """Tags of this name, and of this class if one is given."""
        return sum(name == tag and (kind is None or kind in str(attrs.get("class")).split()) for name, attrs in self.seen)
