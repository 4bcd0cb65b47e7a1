"""MkDocs hooks: what is generated comes from the code, and drawings become part of the page.

A line ``<!-- generated: NAME WORDS -->`` of a page is replaced, when the site is built, by what the
generator of that name makes of the words: see :data:`GENERATORS`. Nothing generated is committed,
so nothing can go stale.

Relied on: MkDocs 1.6, https://www.mkdocs.org/dev-guide/plugins/#events.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.generated import commands, flags, modules, refused, relied_on, sections, tried

ROOT = Path(__file__).parents[1]

GENERATORS: dict[str, Callable[..., str]] = {
    "flags": flags.our_flags,
    "settings": flags.settings,
    "rules": flags.rules,
    "variables": flags.variables,
    "launcher": commands.launcher,
    "commands": commands.all_commands,
    "relied-on": relied_on.relied_on,
    "section": sections.section,
    "changelog": sections.changelog,
    "tried": tried.tried,
    "features": refused.features,
}
"""Each takes the words after its name, and returns Markdown."""

_MARKER = re.compile(r"^<!-- generated: (\S+)(.*?) -->$", re.MULTILINE)
_DRAWING = re.compile(r'<img alt="([^"]*)" src="(?:\.\./)*drawings/([a-z-]+)\.svg"\s*/?>')
_PAGE_NAMED = re.compile(r"`docs/([a-z_-]+)\.md`")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave out of the navigation what may be absent and is; name the reference's pages in it."""
    optional = {
        page
        for page in config.extra["optional_pages"]
        if not (Path(config.docs_dir) / page).is_file()
    }
    if config.nav is not None:
        config.nav = with_reference(without_pages(config.nav, optional))
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of the reference."""
    for name, names in modules.rooms().items():
        files.append(File.generated(config, _reference(name), content=modules.page(names)))
    return files


def with_reference(nav: Sequence[Any]) -> list[Any]:
    """The navigation with a page for each room instead of the entry ``reference``."""
    whole: list[Any] = []
    for entry in nav:
        ((title, inside),) = entry.items()
        if inside == "reference":
            inside = [{name: _reference(name)} for name in modules.rooms()]
        elif isinstance(inside, list):
            inside = with_reference(inside)
        whole.append({title: inside})
    return whole


def _reference(room: str) -> str:
    return f"reference/{room}.md"


def without_pages(nav: Sequence[Any], left_out: set[str]) -> list[Any]:
    """The navigation without those pages."""
    kept: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, inside),) = entry.items()
            if isinstance(inside, list):
                kept.append({title: without_pages(inside, left_out)})
            elif inside not in left_out:
                kept.append(entry)
        elif entry not in left_out:
            kept.append(entry)
    return kept


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in what is generated, and let ``docs/x.md`` in code be a link to that page."""
    text = expand(markdown, page.file.src_uri)
    known = {file.src_uri for file in files.documentation_pages()}

    def link(found: re.Match[str]) -> str:
        name = f"{found[1]}.md"
        return f"[{found[1]}]({name})" if name in known else found[0]

    return text if "/" in page.file.src_uri else _PAGE_NAMED.sub(link, text)


def expand(markdown: str, page: str) -> str:
    """Put in what is generated. Raises PluginError for a marker that nothing generates."""

    def generated(found: re.Match[str]) -> str:
        name, words = found[1], found[2].split()
        if name not in GENERATORS:
            raise PluginError(f"{page}: nothing generates {name!r}: {', '.join(GENERATORS)}")
        return GENERATORS[name](*words)

    return _MARKER.sub(generated, markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put drawings into the page, so that they follow its colour scheme."""
    return with_drawings(html, Path(config.docs_dir) / "drawings")


def with_drawings(html: str, folder: Path) -> str:
    """The page with each drawing of ``folder`` instead of its image."""

    def drawing(found: re.Match[str]) -> str:
        svg = (folder / f"{found[2]}.svg").read_text(encoding="utf-8")
        # A style sheet inside a page holds for the whole page; extra.css has what is needed.
        svg = re.sub(r"<style>.*?</style>\n", "", svg, flags=re.DOTALL)
        return f'<span class="drawing-frame">{svg}</span>'

    return _DRAWING.sub(drawing, html)
