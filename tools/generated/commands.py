"""The help texts of the commands, as a terminal of 100 columns shows them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_cg import __main__ as launcher_module
from megatron_cg.tools.cli import main as cli

_COLUMNS = "100"


def launcher() -> str:
    """``python -m megatron_cg --help``."""
    return f"```text\n{launcher_module._USAGE}\n```"


def all_commands() -> str:
    """A heading and the help text of each command of ``megatron-cg``."""
    parts: list[str] = []
    for name, parser in parsers().items():
        with _columns():
            text = parser.format_help()
        parts += [f"## `megatron-cg {name}`", f"```text\n{text.rstrip()}\n```"]
    return "\n\n".join(parts)


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, as ``megatron-cg`` makes it."""
    seen: dict[str, argparse.ArgumentParser] = {}
    for name in cli.COMMANDS:
        seen[name] = _parser_of(name)
    return seen


def _parser_of(name: str) -> argparse.ArgumentParser:
    import importlib

    module = importlib.import_module(cli.COMMANDS[name])
    text = (module.__doc__ or "").strip()
    parser = argparse.ArgumentParser(prog=f"megatron-cg {name}", description=text)
    module.add_arguments(parser)
    return parser


@contextmanager
def _columns() -> Iterator[None]:
    """As wide as :data:`_COLUMNS`; the environment tells argparse how wide a terminal is."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _COLUMNS
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
