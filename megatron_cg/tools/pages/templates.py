"""Renders the templates of the commands' pages; autoescape is on."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_cg.tools.pages.theme import DARK, LIGHT, variables
from megatron_cg.version import __version__


def render(template: str, **context: Any) -> str:
    """The page made of ``template``, a path in ``megatron_cg/tools``, with ``context``."""
    return _environment().get_template(template).render(context)


@cache
def _environment() -> Environment:
    """Keeps the templates that it compiled."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shared = {"DARK": DARK, "LIGHT": LIGHT, "variables": variables, "version": __version__}
    environment.globals |= shared
    return environment
