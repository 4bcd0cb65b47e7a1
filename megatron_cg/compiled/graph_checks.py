"""What must not be in a traced graph, each refused by name before anything is written."""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from megatron_cg.compiled.graph_code import place_of
from megatron_cg.errors import PrecompileError
from megatron_cg.hooks.hook_records import describe, module_hooks

PREFIX = "mcg::"
"""Begins the name of a role in saved code: ``mcg::tp``."""

_FUNCTION = "autograd_function_apply"
_OF_DYNAMO = ("__compiled_fn", "__import_torch_dot_", "__import_builtins", "__import_operator")
"""Beginnings of the names that bytecode of Dynamo needs itself (torch 2.11 and 2.15)."""

_WITH_GROUPS = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor")


def refuse_modules(module: torch.nn.Module) -> None:
    """Raise PrecompileError for modules of Transformer Engine, and for modules with hooks."""
    for name, inner in module.named_modules():
        for hook in module_hooks(inner):
            raise PrecompileError(
                f"{name or 'the region'} has the hook {describe(hook.fn)}, which would become part "
                "of the code: build the module without hooks, and register them where it is loaded"
            )
        if type(inner).__module__.partition(".")[0] == "transformer_engine":
            raise PrecompileError(
                f"{name or 'the region'} is Transformer Engine's {type(inner).__name__}, which "
                "Dynamo must not trace (torch._dynamo.disable in its code). Build the region from "
                "Megatron's local spec, get_gpt_layer_local_spec, or of plain modules"
            )


def refuse_zero_gradients(graph_module: torch.fx.GraphModule) -> None:
    """Raise PrecompileError for an autograd.Function whose gradients would silently be zero.

    See Note [A tensor that a Function returns and has twice]. Takes Dynamo's graph.
    """
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or _FUNCTION not in str(node.target):
            continue
        forward = getattr(graph_module, str(node.args[0].target))
        outputs = next(iter(reversed(forward.graph.nodes))).args[0][0]
        used = {user.args[1] for user in node.users if "getitem" in str(user.target)}
        for index in used:
            if _has_twice(outputs, index):
                raise PrecompileError(
                    f"an autograd.Function in {place_of(node)} returns a tensor that its forward "
                    f"has under two names ({place_of(outputs[index])}): it was written in place, "
                    "or is the result of a contiguous() or to() that had nothing to do. torch "
                    f"{torch.__version__} silently traces it with zero gradients "
                    "(pytorch/pytorch#180642). Return a clone, or the result of a functional "
                    "operation such as those of torch.distributed._functional_collectives"
                )


def _has_twice(outputs: Sequence[Any], index: int) -> bool:
    """Whether the tensor at ``index`` is the same object as that at another index."""
    values = [getattr(output, "meta", {}).get("example_value") for output in outputs]
    found = values[index]
    others = (value for place, value in enumerate(values) if place != index)
    return found is not None and any(value is found for value in others)


def refuse_in_graph(graph_module: torch.fx.GraphModule) -> None:
    """Raise PrecompileError for random numbers, and for constants that have no values."""
    for node in graph_module.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            raise PrecompileError(
                f"{place_of(node)} draws random numbers ({node.target}), and Megatron's random "
                "states are not part of compiled code: set hidden_dropout and attention_dropout "
                "to 0"
            )
        if node.op == "get_attr":
            value = getattr(graph_module, str(node.target), None)
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                raise PrecompileError(
                    f"{place_of(node)} has a constant tensor, {node.target}, made on the meta "
                    "device, which has no values: register it as a buffer, which load takes from "
                    "the rank's own module"
                )


def refuse_globals(code: CodeType) -> None:
    """Raise PrecompileError if Dynamo's bytecode reads or changes variables of modules.

    What was traced then depends on the offline process, or every call would change other code's
    state: a layer that was traced before Megatron's random states were seeded would delete them.
    Attributes of the region's own modules may be written; eager does the same.
    """
    found = {
        str(step.argval).removeprefix("__import_").replace("_dot_", ".")
        for step in dis.get_instructions(code)
        if step.opname in {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"}
        and not str(step.argval).startswith(_OF_DYNAMO)
    }
    if found:
        raise PrecompileError(
            f"the region reads or changes variables of {', '.join(sorted(found))} at each call, "
            "such as a counter, a cache or a list of losses, or returns an object of a class of "
            "its own. Compiled code holds operations on tensors: leave that part out of the "
            "region, and return tensors or tuples of them"
        )


def name_groups(graph_module: torch.fx.GraphModule, roles: Mapping[str, str]) -> set[str]:
    """Replace the names of process groups by roles; returns the roles that the graph uses.

    Args:
        graph_module: the graph; changed in place.
        roles: ``mcg::`` and the role, by the name of the group on this rank.

    Raises:
        PrecompileError: a collective runs on a group that has no role.
    """
    used = set()
    for node, name in _groups(graph_module):
        if name not in roles:
            raise PrecompileError(
                f"{place_of(node)} runs {node.target} on a process group that the region does not "
                f"name. Its roles are {', '.join(sorted(roles.values())) or 'none'}: add the group "
                "to Region.groups"
            )
        used.add(roles[name])
        rename(node, {name: roles[name]})
    graph_module.recompile()
    return used


def rename(node: torch.fx.Node, names: Mapping[Any, Any]) -> None:
    """Replace constants of a collective's operands, wherever they stand."""

    def renamed(value: Any) -> Any:
        return names.get(value, value) if isinstance(value, str) else value

    node.args = map_aggregate(node.args, renamed)
    node.kwargs = map_aggregate(node.kwargs, renamed)


def _groups(graph_module: torch.fx.GraphModule) -> Iterator[tuple[torch.fx.Node, str]]:
    """Collectives of a graph, each with the name of its group: by schema, its last string."""
    for node in graph_module.graph.nodes:
        if not is_collective(node):
            continue
        schema = node.target._schema.arguments
        for place, argument in enumerate(schema):
            if argument.name == "group_name":
                given = node.args[place] if place < len(node.args) else node.kwargs[argument.name]
                yield node, given


def is_collective(node: torch.fx.Node) -> bool:
    """Whether a node is a functional collective."""
    return getattr(node.target, "namespace", None) in _WITH_GROUPS
