"""Docstrings as Markdown: roles become links, notes paragraphs with a heading."""

from __future__ import annotations

import griffe
import pytest

from tools.docstrings import as_markdown

SOURCE = '''
class Session:
    """A session; see :meth:`close`."""

    def close(self):
        """Close it."""

    def _hidden(self):
        """Not shown."""

    bare = 1


def make():
    """Make one."""
'''


@pytest.fixture
def module() -> griffe.Module:
    return griffe.visit("mod", filepath=None, code=SOURCE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":meth:`close` it", "[`close`][mod.Session.close] it"),
        (":func:`make`", "[`make`][mod.make]"),
        (":class:`Session`", "[`Session`][mod.Session]"),
        (":meth:`_hidden`", "`_hidden`"),
        (":data:`bare`", "`bare`"),
        (":func:`nothing.of_that_name`", "`nothing.of_that_name`"),
        ("no role: `close`", "no role: `close`"),
    ],
)
def test_a_role_is_a_link_where_what_it_names_is_shown(
    module: griffe.Module, text: str, expected: str
) -> None:
    assert as_markdown(text, module["Session"]) == expected


def test_a_note_is_a_paragraph_with_its_title(module: griffe.Module) -> None:
    text = "First.\n\nNote [Two stacks]\n    One thing,\n    another.\n\nRelied on: torch."
    assert as_markdown(text, module) == (
        "First.\n\n**Note: Two stacks.** One thing,\nanother.\n\nRelied on: torch."
    )
