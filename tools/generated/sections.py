"""Parts of README.md and CHANGELOG.md, which are the one source of what they say."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


class SectionError(ValueError):
    """README.md has no such section."""


def section(*words: str) -> str:
    """The text below the heading of README.md with that title, to the next of its level."""
    title = " ".join(words)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
        raise SectionError(f"README.md has no section {title!r}; it has {', '.join(titles)}")
    return found[1].strip()


def changelog() -> str:
    """CHANGELOG.md without its title."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return text.partition("\n")[2].strip()
