"""Check the built site: every link and anchor leads somewhere, nothing is loaded from outside.

    python -m tools.check_site build/site

MkDocs checks the links of Markdown pages. This checks what was built: generated pages, raw HTML,
and what the theme adds. A link to another site is left alone; what a page *loads* from one is an
error, since the site is to be read where there is no network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

_LOADS = {
    "audio": "src",
    "iframe": "src",
    "img": "src",
    "link": "href",
    "script": "src",
    "source": "src",
    "video": "src",
}
_NOT_LOADED = {"canonical", "next", "prev"}
"""Relations of a <link> that a browser does not fetch."""
_CSS_URL = re.compile(r"""(?:url\(\s*|@import\s+)["']?(https?:)?//[^"')\s]+""")


@dataclass
class Page:
    """What one HTML file has: anchors, links, and addresses that it loads."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        for name in ("id", "name"):
            if name in given:
                self.page.anchors.add(given[name])
        if tag == "a" and "href" in given:
            self.page.links.append(given["href"])
        if tag in _LOADS and _LOADS[tag] in given and given.get("rel") not in _NOT_LOADED:
            self.page.loads.append(given[_LOADS[tag]])


def read_page(html: str) -> Page:
    """The anchors, links and loads of a page."""
    reader = _Reader()
    reader.feed(html)
    return reader.page


def problems(site: Path) -> Iterator[str]:
    """Everything that is wrong with the site, in words."""
    pages = {
        path.relative_to(site).as_posix(): read_page(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
    }
    if not pages:
        yield f"{site} holds no page"
    for name, page in pages.items():
        # The page that a server shows for what is not there is asked for from anywhere.
        base = "/" if name == "404.html" else f"/{name}"
        for target in page.loads:
            if urlsplit(target).netloc:
                yield f"{name}: loads {target} from outside"
        for target in [*page.links, *page.loads]:
            parts = urlsplit(target)
            if not parts.scheme and not parts.netloc:
                yield from _broken(name, target, base, site, pages)
    for path in sorted(site.rglob("*.css")):
        for found in _CSS_URL.finditer(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)}: loads {found[0]} from outside"


def _broken(name: str, target: str, base: str, site: Path, pages: dict[str, Page]) -> Iterator[str]:
    parts = urlsplit(urljoin(base, target))
    path = unquote(parts.path).lstrip("/") or "index.html"
    if path.endswith("/"):
        path += "index.html"
    if not (site / path).is_file():
        yield f"{name}: {target} leads to no file"
    elif parts.fragment and path in pages:
        anchor = unquote(parts.fragment)
        if anchor not in pages[path].anchors:
            yield f"{name}: {target} leads to no anchor"


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    found = list(problems(Path(sys.argv[1])))
    for line in found:
        print(line)
    print(f"{len(found)} problems" if found else "all links lead somewhere; nothing from outside")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
