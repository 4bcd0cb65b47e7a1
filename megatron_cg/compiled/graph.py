"""Traced graphs: what must not be in them, groups by role, and lines that ranks can compare.

A line has an operation, its operands and all constants, and where it comes from. Process groups
stand in it by role, so ranks whose groups have other names have the same lines.
"""

import dis
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest
from types import CodeType
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from megatron_cg.errors import PrecompileError
from megatron_cg.hooks import describe, module_hooks

_OF_DYNAMO = ("__compiled_fn", "__import_torch_dot_", "__import_builtins", "__import_operator")
"""Beginnings of the names that bytecode of Dynamo needs itself (torch 2.11 and 2.15)."""
_WITH_GROUPS = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor")

Code = Mapping[str, Sequence[tuple[str, str]]]
"""Of each part (``forward``, ``backward``, ``outputs``) the operations, each with its place."""


def refuse_modules(module: torch.nn.Module) -> None:
    """Raise PrecompileError for modules with hooks, and for frozen parameters."""
    for name, inner in module.named_modules():
        for hook in module_hooks(inner):
            raise PrecompileError(
                f"{name or 'the region'} has the hook {describe(hook.fn)}, which would become part "
                "of the code: build the module without hooks, and register them where it is loaded"
            )
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            raise PrecompileError(
                f"{name} is frozen, and the code would give it no gradient later either: build "
                "the module with all parameters trainable"
            )


def refuse_random_numbers(graph_module: torch.fx.GraphModule) -> None:
    """Raise PrecompileError for random numbers."""
    for node in graph_module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise PrecompileError(
                f"{place_of(node)} draws random numbers ({node.target}), and Megatron's random "
                "states are not part of compiled code: set hidden_dropout and attention_dropout "
                "to 0"
            )


def refuse_globals(code: CodeType) -> None:
    """Raise PrecompileError if Dynamo's bytecode reads or changes variables of modules.

    What was traced then depends on the offline process, or every call would change other code's
    state: a layer that was traced before Megatron's random states were seeded would delete them.
    Attributes of the region's own modules may be written; eager does the same.
    """
    names = {
        str(step.argval).removeprefix("__import_").replace("_dot_", ".")
        for step in dis.get_instructions(code)
        if step.opname in {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"}
        and not str(step.argval).startswith(_OF_DYNAMO)
    }
    if names:
        raise PrecompileError(
            f"the region reads or changes variables of {', '.join(sorted(names))} at each call, "
            "such as a counter, a cache or a list of losses, or returns an object of a class of "
            "its own. Compiled code holds operations on tensors: leave that part out of the "
            "region, and return tensors or tuples of them"
        )


def name_groups(graph_module: torch.fx.GraphModule, roles: Mapping[str, str]) -> None:
    """Replace the names of process groups by roles, in place.

    ``roles`` are the prefix and the role, by the name of the group on this rank. Raises
    PrecompileError if a collective runs on a group that has no role.
    """
    for node in filter(is_collective, graph_module.graph.nodes):
        names = [argument.name for argument in node.target._schema.arguments]
        if "group_name" not in names:  # It waits for another one.
            continue
        place = names.index("group_name")
        group = node.args[place] if place < len(node.args) else node.kwargs["group_name"]
        if group not in roles:
            raise PrecompileError(
                f"{place_of(node)} runs {node.target} on a process group that the region does not "
                f"name. Its roles are {', '.join(sorted(roles.values())) or 'none'}: add the group "
                "to Region.groups"
            )
        rename(node, {group: roles[group]})
    graph_module.recompile()


def rename(node: torch.fx.Node, names: Mapping[Any, Any]) -> None:
    """Replace constants of a collective's operands, wherever they stand."""

    def renamed(value: Any) -> Any:
        return names.get(value, value) if isinstance(value, str) else value

    node.args = map_aggregate(node.args, renamed)
    node.kwargs = map_aggregate(node.kwargs, renamed)


def is_collective(node: torch.fx.Node) -> bool:
    return getattr(node.target, "namespace", None) in _WITH_GROUPS


def graph_lines(graph_module: torch.fx.GraphModule) -> list[tuple[str, str]]:
    """The operations of a graph whose groups have been named by role, and all constants."""
    lines = []
    for node in graph_module.graph.nodes:
        text = f"{node.name} = {node.op} {node.target} {node.args} {dict(node.kwargs)}"
        if node.op == "get_attr":
            value: Any = graph_module
            for name in str(node.target).split("."):
                value = getattr(value, name)
            text += f" {_constant(value)}"
        lines.append((text, place_of(node)))
    return lines


def _constant(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return f"a tensor {tuple(value.shape)} without values"
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"a tensor {tuple(value.shape)} {value.dtype} {sha256(data).hexdigest()[:16]}"
    if isinstance(value, torch.fx.GraphModule):
        return str([text for text, _place in graph_lines(value)])
    return repr(value)


def bytecode_lines(code: CodeType) -> list[tuple[str, str]]:
    """Dynamo's bytecode around the graph: where it takes inputs from, and what it returns."""
    lines = []
    for step in dis.get_instructions(code):
        # The graph's own name is another in each trace.
        value = "the graph" if str(step.argval).startswith("__compiled_fn") else repr(step.argval)
        lines.append((f"{step.opname} {value}", "the region's outputs"))
    return lines


def first_difference(one: Code, other: Code, rank: int, other_rank: int) -> str | None:
    """Where the code of two ranks differs first, in words."""
    for part in sorted({*one, *other}):
        for mine, theirs in zip_longest(one.get(part, ()), other.get(part, ())):
            if mine is None or theirs is None or mine[0] != theirs[0]:
                _, place = mine or theirs
                texts = [line[0] if line else "nothing" for line in (mine, theirs)]
                return (
                    f"{part} code has `{texts[0]}` on rank {rank} and `{texts[1]}` on rank "
                    f"{other_rank}, at {place}"
                )
    return None


def place_of(node: torch.fx.Node) -> str:
    """The line of source that a node comes from: the innermost one outside of torch.

    Operations inside of an autograd.Function may not know it: it is then that of the operation
    before.
    """
    while node.op != "root":
        lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
        frames = [line for line in lines if line.startswith("File ")]
        if frames:
            return next((f for f in reversed(frames) if "/torch/" not in f), frames[-1])
        node = node.prev
    return "unknown source"
