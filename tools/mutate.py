"""Change one thing of a module at a time, and see whether the tests near it notice.

``python -m tools.mutate`` takes the modules of :data:`NEAR`, makes the mutants of each that
:func:`mutants` describes (a random sample with a fixed seed, where :data:`SAMPLE` says so), runs
the tests named beside the module with each, and prints those that survive.

A mutant never lies on the disk: it is compiled in a process forked from one that has imported torch
and Megatron, and the processes that a test starts are forked from that one in turn.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib.machinery
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS = ROOT / "megatron_cg", "tests/unit"
SEED = 20
_TAPE = (
    "tape/test_mutants_of_memory.py tape/test_contract.py tape/test_replay.py tape/test_standins.py"
)
NEAR: dict[str, str] = {
    "verdict.py": "test_verdict.py test_mutants_of_pure_modules.py",
    "schedule.py": "test_hook_order.py test_mutants_of_pure_modules.py",
    "undo.py": "test_session.py megatron/test_patches.py",
    "hook_order.py": "hooks test_hook_order.py",
    "hooks/extract.py": "hooks fsdp/test_hooks_of_real_models.py",
    "fsdp/recognise.py": "hooks fsdp/test_hooks_of_real_models.py",
    "fsdp/transform.py": "hooks fsdp/test_hooks_of_real_models.py",
    "fsdp/tag.py": "hooks fsdp/test_hooks_of_real_models.py",
    "fsdp/model.py": "test_session.py tape/test_training.py",
    "guard/guard.py": "guard",
    "guard/addresses.py": "guard",
    "guard/modes.py": "guard",
    "guard/parts.py": "guard",
    "guard/inputs.py": "guard",
    "guard/mismatch.py": "guard",
    "agreement.py": "test_mutants_of_agreement.py test_agreement.py",
    "boundary.py": "test_boundary.py test_verdict.py",
    "graphed.py": "test_session.py test_order_of_passes.py",
    "replay.py": "test_session.py test_order_of_passes.py",
    "capture.py": "test_session.py test_capture_memory.py test_broken_captures.py",
    "backends/tape_memory.py": _TAPE,
    "backends/tape_record.py": _TAPE,
    "backends/tape_graphed.py": _TAPE,
    "backends/tape.py": _TAPE,
    "fsdp/fast/buckets.py": "fsdp/fast/test_buckets.py fsdp/fast/test_mutants_of_buckets.py",
    "fsdp/fast/gather.py": "fsdp/fast/test_gather.py fsdp/fast/test_path.py",
    "fsdp/fast/gradients.py": "fsdp/fast/test_hand_off.py fsdp/fast/test_path.py",
    "fsdp/fast/kept.py": "fsdp/fast/test_kept.py fsdp/fast/test_gather.py",
    "fsdp/fast/unshard.py": "fsdp/fast/test_path.py",
    "fsdp/fast/views.py": "fsdp/fast/test_views.py",
    "fsdp/fast/weights.py": "fsdp/fast/test_path.py fsdp/fast/test_zero.py",
}
"""For each module, below the package, the tests below ``tests/unit`` that are run."""

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
    """One change: where, what was there, and the module's whole tree with it."""

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
    for place in _places(tree):
        node = _at(tree, place)
        for change, edit in _edits(node):
            changed = copy.deepcopy(tree)
            edit(changed, place)
            ast.fix_missing_locations(changed)
            yield Mutant(node.lineno, change, changed)


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
        return node.func.id in ("Symbol", "in_both")
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


KILLED, SURVIVED, OVERDUE = "killed", "survived", "overdue"


def tested(file: Path, tree: ast.Module | None, tests: Sequence[str], seconds: int) -> str:
    """How the tests end with ``tree`` as the code of ``file``; None is the module as it is.

    ``seconds`` are of CPU time; a mutant that takes more is overdue, which counts as killed.
    """
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            os.setsid()
            os._exit(_run(file, tree, tests))
        finally:
            os._exit(70)
    limit = time.monotonic() + 20 * seconds
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        if time.monotonic() > limit:
            os.killpg(child, 9)
            os.waitpid(child, 0)
            return OVERDUE
        time.sleep(0.05)
    if os.WIFSIGNALED(status):
        return OVERDUE
    return SURVIVED if os.WEXITSTATUS(status) == 0 else KILLED


def _run(file: Path, tree: ast.Module | None, tests: Sequence[str]) -> int:
    import pytest

    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    if tree is not None:
        _install(file, compile(tree, str(file), "exec"))

    class Forked:
        @pytest.hookimpl(trylast=True)
        def pytest_configure(self) -> None:
            from megatron_cg.cpu import launch

            launch.START = "fork"

    words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", *tests]
    return int(pytest.main(words, plugins=[Forked()]))


def _install(file: Path, code: CodeType) -> None:
    loader: Any = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(found: Any, name: str) -> Any:
        return code if Path(found.path).resolve() == file else original(found, name)

    loader.get_code = get_code


def measure(name: str, tests: str, most: int | None) -> tuple[int, list[tuple[str, Mutant]]]:
    """How many mutants the module has, and how each that was tried ended."""
    file = (PACKAGE / name).resolve()
    paths = [f"{TESTS}/{test}" for test in tests.split()]
    before = os.times()
    if tested(file, None, paths, 600) != SURVIVED:
        raise RuntimeError(f"{' '.join(paths)} fail without any change")
    after = os.times()
    seconds = 20 + 5 * round(sum(after[2:4]) - sum(before[2:4]))
    every = list(mutants(file.read_text(encoding="utf-8")))
    tried = every
    if most is not None and len(every) > most:
        tried = sorted(random.Random(SEED).sample(every, most), key=lambda one: one.line)
    return len(every), [(tested(file, one.tree, paths, seconds), one) for one in tried]


def main(words: Sequence[str] | None = None) -> int:
    """Try the mutants of the modules that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("modules", nargs="*", help="below megatron_cg; none is all of NEAR")
    parser.add_argument("--most", type=int, help="mutants of one module; more are sampled")
    asked = parser.parse_args(words)
    os.chdir(ROOT)
    # What is imported here is shared by all; nothing of this package may be.
    import megatron.core.distributed.fsdp
    import megatron.core.models.gpt  # noqa: F401
    import pytest  # noqa: F401

    gc.collect()
    gc.freeze()
    for name in asked.modules or NEAR:
        try:
            count, ended = measure(name, NEAR[name], asked.most)
        except RuntimeError as error:
            print(f"{name}: not tried: {error}", flush=True)
            continue
        alive = [one for end, one in ended if end == SURVIVED]
        overdue = sum(end == OVERDUE for end, _ in ended)
        print(
            f"{name}: {count} mutants, {len(ended)} tried, {len(ended) - len(alive)} killed "
            f"({overdue} by their time), {len(alive)} survived",
            flush=True,
        )
        for one in alive:
            print(f"  {name}:{one.line}: {one.change}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
