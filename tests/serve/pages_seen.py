"""An HTML page as a test sees it: what it would fetch, its text, its tags. What is not closed in order fails at once."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = ("meta", "link", "br")


class Page(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "srcset") and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
