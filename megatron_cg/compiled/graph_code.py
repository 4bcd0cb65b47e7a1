"""The code of a traced graph as lines that can be compared between ranks.

A line has the operation, its operands and all constants, and where it comes from. Process groups
stand in it by role, so ranks whose groups have other names have the same lines.
"""

from __future__ import annotations

import dis
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from types import CodeType
from typing import Any

import torch
import torch.fx
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Line:
    """One operation of a graph."""

    text: str
    constants: tuple[str, ...]
    """Its operands that are no results of other operations, in order."""
    where: str
    """The module, and the line of its source."""


@dataclass(frozen=True)
class Difference:
    """Where two ranks' code differs first."""

    part: str
    """``forward``, ``backward`` or ``outputs``."""
    where: str
    one: str
    other: str

    def text(self, rank: int, other_rank: int) -> str:
        """What differs, in words."""
        return (
            f"{self.part} code of {self.where} has {self.one} on rank {rank} and {self.other} on "
            f"rank {other_rank}"
        )


Code = Mapping[str, Sequence[Line]]
"""The lines of each part."""


def digest(code: Code) -> str:
    """The SHA-256 of all lines, constants included."""
    state = sha256()
    for part, lines in sorted(code.items()):
        state.update(f"{part}\n".encode())
        for line in lines:
            state.update(f"{line.text}\n".encode())
    return state.hexdigest()


def graph_lines(graph_module: torch.fx.GraphModule) -> list[Line]:
    """The lines of a graph whose process groups have been named by role."""
    return [_line(node, graph_module) for node in graph_module.graph.nodes]


def bytecode_lines(code: CodeType) -> list[Line]:
    """Dynamo's bytecode around the graph: where it takes inputs from, and what it returns."""
    lines = []
    for step in dis.get_instructions(code):
        # The graph's own name is another in each trace.
        value = "the graph" if str(step.argval).startswith("__compiled_fn") else repr(step.argval)
        constants = (value,) if step.opname == "LOAD_CONST" else ()
        lines.append(Line(f"{step.opname} {value}", constants, "the region's outputs"))
    return lines


def first_difference(one: Code, other: Code) -> Difference | None:
    """Where the code of two ranks differs first, with the constant if it is one."""
    for part in one:
        mine, theirs = one[part], other[part]
        for left, right in zip(mine, theirs, strict=False):
            if left.text != right.text:
                return Difference(part, left.where, *_what(left, right))
        if len(mine) != len(theirs):
            longer = mine if len(mine) > len(theirs) else theirs
            place = longer[min(len(mine), len(theirs))].where
            sizes = [f"{len(lines)} operations" for lines in (mine, theirs)]
            return Difference(part, place, *sizes)
    return None


def place_of(node: torch.fx.Node) -> str:
    """The innermost module of a node, with its class, and the last line of source.

    Operations inside of an autograd.Function do not know their module: it is then that of the
    operation before it.
    """
    source = _source(node.meta.get("stack_trace") or "")
    return ", ".join(filter(None, (_module(node), source))) or node.name


def _module(node: torch.fx.Node) -> str:
    at = node
    while at.op != "root":
        stack = at.meta.get("nn_module_stack") or at.meta.get("fwd_nn_module_stack")
        if stack:
            path, kind = list(stack.values())[-1]
            name = getattr(kind, "__name__", str(kind).rpartition(".")[2])
            inner = _attributes(path)
            return f"{inner} ({name})" if inner else name
        at = at.prev
    return ""


def _attributes(path: str) -> str:
    """``mlp.linear_fc1`` for Dynamo's ``L['self']._modules['mlp']._modules['linear_fc1']``."""
    for noise in ("L['self']", "L['fn']", "_modules[", "_orig_mod", "'", '"', "]", "["):
        path = path.replace(noise, "")
    return ".".join(filter(None, path.split(".")))


def _source(stack: str) -> str:
    """``layers.py:271 in forward`` of the innermost frame of a stack trace."""
    frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    if not frames:
        return ""
    file, line, function = (part.strip() for part in frames[-1].split(",", 2))
    name = file.removeprefix('File "').removesuffix('"').rpartition("/")[2]
    return f"{name}:{line.removeprefix('line ')} {function}"


def _line(node: torch.fx.Node, owner: torch.fx.GraphModule) -> Line:
    constants = tuple(
        _constant(leaf)
        for leaf in tree_leaves((node.args, node.kwargs))
        if not isinstance(leaf, torch.fx.Node)
    )
    operands = f"{_shown(node.args)} {_shown(node.kwargs)}"
    text = f"{node.name} = {node.op} {node.target} {operands}"
    if node.op == "get_attr":
        value = _constant(_attribute(owner, str(node.target)))
        text, constants = f"{text} {value}", (*constants, value)
    return Line(text, constants, place_of(node))


def _attribute(owner: torch.nn.Module, path: str) -> Any:
    value: Any = owner
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _shown(value: Any) -> str:
    if isinstance(value, torch.fx.Node):
        return f"%{value.name}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_shown(item) for item in value) + ")"
    return _constant(value)


def _constant(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return f"a tensor {tuple(value.shape)} without values"
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"a tensor {tuple(value.shape)} {value.dtype} {sha256(data).hexdigest()[:16]}"
    if isinstance(value, torch.fx.GraphModule):
        return digest({"inner": graph_lines(value)})
    return str(value) if isinstance(value, torch.SymInt) else repr(value)


def _what(one: Line, other: Line) -> tuple[str, str]:
    """The constants that differ, or the lines if the operations differ."""
    if len(one.constants) == len(other.constants):
        pairs = zip(one.constants, other.constants, strict=True)
        different = [pair for pair in pairs if pair[0] != pair[1]]
        if different:
            mine, theirs = zip(*different, strict=True)
            return f"constant {', '.join(mine)}", f"constant {', '.join(theirs)}"
    return f"`{one.text}`", f"`{other.text}`"
