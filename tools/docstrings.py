"""Docstrings of this package as Markdown, for mkdocstrings: roles become links, notes headings.

A docstring here says ``:meth:`close``` as Sphinx would have it, and ``Note [Two stacks]`` with its
text indented below. Neither is Markdown.

Relied on: griffe 2, https://mkdocstrings.github.io/griffe/guide/users/extending/.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([\w.]+)`")
_NOTE = re.compile(r"^Note \[(.+?)\]\n((?:    .*\n?|\n(?=    ))+)", re.MULTILINE)


class MarkdownDocstrings(griffe.Extension):
    """Rewrites the docstrings of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, loader: Any, **kwargs: Any) -> None:
        """Rewrite every docstring below ``pkg``."""
        _rewrite(pkg, set())


def _rewrite(item: Any, seen: set[str]) -> None:
    if item.is_alias or item.path in seen:
        return
    seen.add(item.path)
    if item.docstring is not None:
        item.docstring.value = as_markdown(item.docstring.value, item)
    for member in item.members.values():
        _rewrite(member, seen)


def as_markdown(text: str, item: Any) -> str:
    """The docstring of ``item`` with roles as links where what they name is found."""

    def link(found: re.Match[str]) -> str:
        path = _resolved(found[1], item)
        return f"[`{found[1]}`][{path}]" if path else f"`{found[1]}`"

    def note(found: re.Match[str]) -> str:
        return f"**Note: {found[1]}.** {textwrap.dedent(found[2]).strip()}\n"

    return _ROLE.sub(link, _NOTE.sub(note, text))


def _resolved(name: str, item: Any) -> str | None:
    """The full path of what ``name`` means where ``item`` is, or None for what is not shown."""
    scope = item
    while scope is not None:
        places = scope.modules_collection if name.startswith("megatron_cg.") else scope
        try:
            target = places[name]
        except (KeyError, ValueError):
            scope = scope.parent
            continue
        private = any(part.startswith("_") for part in target.path.split("."))
        return str(target.path) if target.has_docstring and not private else None
    return None
