"""A fingerprint of a function's code that ignores its formatting.

It stays the same if comments, docstrings, annotations or line breaks change, and for every version
of Python that parses the function into the same syntax tree.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from typing import Any

_NOT_CODE = {"annotation", "returns", "type_comment", "type_params", "ctx", "kind"}
_WITH_DOCSTRING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def of_function(function: Any) -> str | None:
    """The fingerprint of a function, or of a code object; None if its source is missing.

    Args:
        function: decorators with ``__wrapped__`` are unwrapped; the source includes them.
    """
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    return of_source(textwrap.dedent(source))


@cache
def of_source(source: str, path: str = "") -> str | None:
    """The fingerprint of Python source, or of the definition in it that ``path`` names.

    ``path`` is as in ``Symbol.path`` after the colon. None if there is no such definition, or
    the source is not valid Python.
    """
    try:
        found: ast.AST = ast.parse(source)
    except SyntaxError:
        return None
    if not path and isinstance(found, ast.Module) and len(found.body) == 1:
        found = found.body[0]
    for name in path.replace(".<locals>", "").split(".") if path else ():
        inside = (node for node in _definitions(found) if node.name == name)
        definition = next(inside, None)
        if definition is None:
            return None
        found = definition
    return blake2b(_code(found).encode(), digest_size=8).hexdigest()


def _definitions(
    owner: ast.AST,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The functions and classes that ``owner`` defines; not those inside them."""
    for node in ast.iter_child_nodes(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
        else:
            yield from _definitions(node)


def _code(node: Any) -> str:
    if isinstance(node, list):
        return f"[{' '.join(map(_code, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _NOT_CODE}
    if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = fields["body"][1:]
    # Absent and empty count as equal: versions of Python differ in which one they use.
    kept = (f"{name}={_code(value)}" for name, value in fields.items() if value not in (None, []))
    return f"{type(node).__name__}({' '.join(kept)})"
