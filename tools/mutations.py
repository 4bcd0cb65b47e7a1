"""The mutants of a module: one thing of its source changed at a time. Pure."""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COUNTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


@dataclass(frozen=True)
class Mutant:
    """One change: its place in the list, where, what was there, and the module's tree with it."""

    number: int
    line: int
    change: str
    tree: ast.Module


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant of a module.

    Comparisons, ``and``/``or`` and conditions are turned round, ``not`` dropped, ``+``/``-`` and
    ``|``/``&`` swapped, True and False swapped, whole numbers raised by one, statements that call,
    assign to what there is already, delete or raise dropped, returned values dropped, and items of
    ``with`` dropped. Docstrings, annotations, ``__all__`` and Symbols are left alone.
    """
    tree = ast.parse(source)
    number = itertools.count()
    for place in _places(tree):
        node = _at(tree, place)
        for change, edit in _edits(node):
            changed = copy.deepcopy(tree)
            edit(changed, place)
            ast.fix_missing_locations(changed)
            yield Mutant(next(number), node.lineno, change, changed)


Place = tuple[tuple[str, int | None], ...]
Edit = Callable[[ast.Module, Place], None]


def _places(node: ast.AST, place: Place = ()) -> Iterator[Place]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        children = value if isinstance(value, list) else [value]
        for number, child in enumerate(children):
            if not isinstance(child, ast.AST) or _left_alone(child):
                continue
            here = (*place, (name, number if isinstance(value, list) else None))
            if hasattr(child, "lineno"):
                yield here
            yield from _places(child, here)


def _left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("Symbol", "fsdp_class", "fsdp_function")
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
        return node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr)


def _at(tree: ast.AST, place: Place) -> Any:
    node: Any = tree
    for name, number in place:
        node = getattr(node, name)
        node = node if number is None else node[number]
    return node


def _put(tree: ast.AST, place: Place, new: ast.AST) -> None:
    name, number = place[-1]
    parent = _at(tree, place[:-1])
    if number is None:
        setattr(parent, name, new)
    else:
        getattr(parent, name)[number] = new


def _replaced(make: Callable[[Any], ast.AST]) -> Edit:
    def edit(tree: ast.Module, place: Place) -> None:
        _put(tree, place, make(_at(tree, place)))

    return edit


def _edits(node: Any) -> Iterator[tuple[str, Edit]]:
    """What can be changed of a node, each in words."""
    text = " ".join(ast.unparse(node).split())[:60] if isinstance(node, ast.expr | ast.stmt) else ""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = _COMPARED[type(node.ops[0])]
        yield f"{text}: {other.__name__}", _replaced(_compare(other))
    elif isinstance(node, ast.BoolOp):
        yield f"{text}: and/or", _replaced(_bool)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"{text}: no not", _replaced(lambda old: old.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _COUNTED:
        yield f"{text}: other operator", _replaced(_count)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        raised = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{text} -> {raised}", _replaced(lambda _old: ast.Constant(raised))
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield f"if {' '.join(ast.unparse(node.test).split())[:60]}: turned round", _turn
    elif _can_go(node):
        yield f"{text}: dropped", _replaced(lambda _old: ast.Pass())
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield f"{text}: None", _replaced(lambda _old: ast.Return(ast.Constant(None)))
    elif isinstance(node, ast.With):
        for number, item in enumerate(node.items):
            if item.optional_vars is None:
                yield f"with {ast.unparse(item)[:60]}: dropped", _without(number)


def _compare(other: type[ast.cmpop]) -> Callable[[Any], ast.AST]:
    return lambda old: ast.Compare(old.left, [other()], old.comparators)


def _bool(old: Any) -> ast.AST:
    return ast.BoolOp(ast.Or() if isinstance(old.op, ast.And) else ast.And(), old.values)


def _count(old: Any) -> ast.AST:
    return ast.BinOp(old.left, _COUNTED[type(old.op)](), old.right)


def _turn(tree: ast.Module, place: Place) -> None:
    node = _at(tree, place)
    node.test = ast.UnaryOp(ast.Not(), node.test)


def _without(number: int) -> Edit:
    def edit(tree: ast.Module, place: Place) -> None:
        node = _at(tree, place)
        del node.items[number]
        if not node.items:
            _put(tree, place, ast.If(ast.Constant(True), node.body, []))

    return edit


def _can_go(node: ast.AST) -> bool:
    """Whether a statement can be dropped with every name that is used later still there."""
    if isinstance(node, ast.Assign):
        return not isinstance(node.targets[0], ast.Name | ast.Tuple)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Yield)
    return isinstance(node, ast.Raise | ast.Delete | ast.AugAssign)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
