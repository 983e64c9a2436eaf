"""Links of the finished site: each one that stays on it must lead to a file, and a place in it.

What a page loads, such as pictures, styles and scripts, must be on the site.
"""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value and name in ("href", "src"):
                self.links.append(value)
                if tag not in ("a", "area"):
                    self.loaded.append(value)
            elif value and name in ("id", "name"):
                self.places.add(value)


def broken(site: Path) -> Iterator[str]:
    """Yield links that lead to nothing, with their page."""
    pages = {path: _Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for link in page.loaded:
            if urlsplit(link).netloc:
                yield f"{path.relative_to(site)}: {link} is loaded from elsewhere"
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            if not target.is_file():
                yield f"{path.relative_to(site)}: {link} is no file"
            elif place and target in pages and place not in pages[target].places:
                yield f"{path.relative_to(site)}: {link} has no such place"
