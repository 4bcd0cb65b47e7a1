"""Places in the code that order something: in the sources, and at run time."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

import megatron_cg
from tests.unit.ordering.trace import Site

ORDERING = frozenset(
    {"wait_stream", "wait_event", "record_event", "record", "wait", "synchronize", "record_stream"}
    | {"wait_current_stream"}
)
"""Methods of streams, events, tensors and works that order something, and of shared experts."""
_NOT_CALLERS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent / "doubles"),
    str(Path(megatron_cg.__file__).parent / "tools" / "cpu" / "fakes.py"),
    str(Path(megatron_cg.__file__).parent / "backends" / "tape"),
    "<",
)


def caller() -> Site | None:
    """The innermost call that is none of torch's, of a tape's or of the doubles' of CUDA."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not _is_passed_over(code.co_filename):
            return _site(code, frame.f_lasti)
        frame = frame.f_back
    return None


@cache
def _is_passed_over(file: str) -> bool:
    return file.startswith(_NOT_CALLERS) or file.endswith("/contextlib.py")


@cache
def _site(code: CodeType, instruction: int) -> Site:
    line, _, column, _ = list(code.co_positions())[instruction // 2]
    return Site(short(code.co_filename), line or 0, column or 0)


@cache
def short(file: str) -> str:
    """A file's name, from its top-level package on."""
    path = Path(file).resolve()
    top = path.parent
    while (top.parent / "__init__.py").exists() or top.parent.name in ("megatron", "tests"):
        top = top.parent
    return str(path.relative_to(top.parent))


def ordering_places(file: Path) -> Iterator[tuple[Site, str]]:
    """Where a source file names one of :data:`ORDERING`, with the text of the call.

    All methods with these names are found, also of other objects, and names passed as arguments.
    """
    tree = ast.parse(file.read_text())
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ORDERING:
            found = calls.get(id(node), node)
            yield Site(short(str(file)), found.lineno, found.col_offset), ast.unparse(found)
