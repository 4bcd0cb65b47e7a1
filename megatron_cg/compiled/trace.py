"""Traces a region, forward and backward, by torch's AOT compilation, and refuses what is unsafe.

Relied on: ``torch.compile(...).forward.aot_compile`` (torch 2.11 to 2.15) makes one graph of a
module's call and of its backward pass, without running it. The compilers below keep the graphs as
ATen operations: Inductor's code names its GPU, and so could not serve other ranks. A graph gets its
device and its process groups when it is loaded (torch's ``post_compile``).

Note [Operations that only GPUs have]
    ``aten::_fused_rms_norm`` has a kernel for CUDA, and torch's own decomposition for devices
    without a kernel, such as the meta device (torch 2.11, 2.15). So its trace would have the
    separate operations, which round elsewhere than the kernel of an eager pass. With a kernel for
    the meta device, which computes shapes alone, torch keeps the operation.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import torch.fx
from torch._dynamo.backends.common import AotAutograd
from torch._inductor.output_code import RegionalOutputCode
from torch.fx.node import map_aggregate

from megatron_cg.compiled.collectives import traceable
from megatron_cg.compiled.region import PREFIX, Capability, Region
from megatron_cg.errors import ArtifactRefusedError, PrecompileError
from megatron_cg.hooks.hook_records import describe, module_hooks
from megatron_cg.upstream.symbols import Symbol

_AOT_COMPILED = Symbol(
    "torch",
    "torch._dynamo.aot_compile:AOTCompiledFunction",
    "a compiled function that can be saved",
    attributes=("save_compiled_function", "fn", "disable_guard_check"),
)
_OUTPUT_CODE = Symbol(
    "torch",
    "torch._inductor.output_code:RegionalOutputCode",
    "serialises a graph, and calls post_compile after loading",
    attributes=("post_compile", "prepare_for_serialization", "_graph_module"),
)
_GUARDS = Symbol(
    "torch", "torch.compiler:skip_all_guards_unsafe", "leaves all guards out of compiled code"
)
_FRESH_CACHE = Symbol(
    "torch", "torch._inductor.utils:fresh_cache", "compiles with a new cache on disk in a block"
)
_CACHES = Symbol(
    "torch",
    "torch._functorch._aot_autograd.autograd_cache:should_use_local_autograd_cache",
    "whether compiled code gets an entry of a cache, which is what can be saved",
)
_NORM = "_fused_rms_norm"
_HAS_KERNEL = Symbol(
    "torch",
    "torch._C:_dispatch_has_kernel_for_dispatch_key",
    "whether an operation has a kernel for a device",
)
_OPERATION = Symbol("torch", f"torch.ops:aten.{_NORM}", "RMSNorm as one operation")
RELIES_ON = (_AOT_COMPILED, _OUTPUT_CODE, _GUARDS, _FRESH_CACHE, _CACHES, _HAS_KERNEL, _OPERATION)

_OF_DYNAMO = ("__compiled_fn", "__import_torch_dot_", "__import_builtins", "__import_operator")
"""Beginnings of the names that bytecode of Dynamo needs itself (torch 2.11 and 2.15)."""
_WITH_GROUPS = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor")


@dataclass(frozen=True)
class Trace:
    """What a trace came to."""

    graphs: Mapping[str, torch.fx.GraphModule]
    """The graphs of the ``forward`` and ``backward`` passes."""
    roles: frozenset[str]
    """The roles whose groups the code uses, with the prefix ``mcg::``."""
    compiled: Any
    """torch's compiled function, which can be saved."""


def trace(region: Region, capability: Capability) -> Trace:
    """Trace a region.

    Args:
        region: on the meta device.
        capability: see :func:`~megatron_cg.compiled.region.fingerprint`.

    Raises:
        PrecompileError: the region cannot be traced, or its graph must not be saved; names the
            module.
    """
    if region.device().type != "meta":
        raise PrecompileError(
            f"{type(region.module).__name__} is on {region.device()}: build the module, and the "
            'arguments, under torch.device("meta")'
        )
    if not _CACHES.find()():
        raise PrecompileError(
            "torch's cache of compiled code is turned off in this process, and an entry of it is "
            "what can be saved: unset TORCHINDUCTOR_AUTOGRAD_CACHE and "
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES here. Runs that load the code may have them"
        )
    refuse_modules(region.module)
    names = {str(group.group_name): f"{PREFIX}{role}" for role, group in region.groups.items()}
    graphs: dict[str, torch.fx.GraphModule] = {}
    roles: set[str] = set()

    def compiler(part: str) -> Callable[..., Any]:
        def compile_graph(graph_module: torch.fx.GraphModule, _examples: Any) -> Any:
            refuse_in_graph(graph_module)
            roles.update(name_groups(graph_module, names))
            graphs[part] = graph_module
            return RankedOutputCode(graph_module, ops_filter=_any_operation)

        return compile_graph

    settings = torch._dynamo.config.patch(enable_aot_compile=True)
    fused = nullcontext() if capability is None else fused_norms_kept()
    # torch's cache on disk would answer instead of our compilers, with a pickle of who knows whom.
    with settings, fused, _FRESH_CACHE.find()(), traceable(), _naming_the_place():
        compiled: Any = torch.compile(
            region.module,
            fullgraph=True,
            dynamic=False,
            backend=AotAutograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward")),
            options={"guard_filter_fn": _GUARDS.find()},
        )
        function = compiled.forward.aot_compile((region.args, dict(region.kwargs)))
    refuse_globals(function.fn.__code__)
    return Trace(graphs, frozenset(roles), function)


def _any_operation(_name: str) -> bool:
    """Collectives may be saved too; by default ATen operations alone may."""
    return True


@contextmanager
def _naming_the_place() -> Iterator[None]:
    """Turn errors of the compiler in the block into a PrecompileError that names the place."""
    try:
        yield
    except Exception as error:
        inner: Any = error
        while inner is not None:  # Dynamo wraps our own refusals when a backend raises them.
            if isinstance(inner, PrecompileError):
                raise inner from None
            inner = getattr(inner, "inner_exception", None) or inner.__cause__
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        places = [line for line in lines if line.startswith("File ")]
        reason = lines[0] if lines else type(error).__name__
        where = f", at {places[-1]}" if places else ""
        raise PrecompileError(
            f"the region cannot be traced as one graph: {reason}{where}. Leave this "
            "module out of the region"
        ) from error


@contextmanager
def fused_norms_kept() -> Iterator[None]:
    """Trace RMSNorm as on a GPU; see Note [Operations that only GPUs have]."""
    _OPERATION.find()
    if _HAS_KERNEL.find()(f"aten::{_NORM}", "Meta"):
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    implementation: Any = library.m
    # Library.impl refuses the meta device where torch has a decomposition.
    implementation.impl(_NORM, "Meta", _shapes_of_norm, False)
    try:
        yield
    finally:
        library._destroy()


def _shapes_of_norm(
    given: torch.Tensor, normalized_shape: Sequence[int], _weight: Any, _eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs like those of the CUDA kernel: the result, and the reciprocal deviation."""
    rows = given.shape[: given.dim() - len(normalized_shape)]
    kept = [*rows, *(1 for _ in normalized_shape)]
    dtype = torch.promote_types(given.dtype, torch.float32)
    return given.new_empty(given.shape), given.new_empty(kept, dtype=dtype)


@dataclass(frozen=True)
class Rank:
    """What differs between the ranks that load the same code."""

    device: torch.device
    groups: Mapping[str, str]
    """The names of this rank's process groups, by ``mcg::`` and the role."""


_loading: ContextVar[Rank | None] = ContextVar("loading", default=None)


@contextmanager
def loading_for(rank: Rank) -> Iterator[None]:
    """Code that is loaded in the block runs on this rank."""
    token = _loading.set(rank)
    try:
        yield
    finally:
        _loading.reset(token)


class RankedOutputCode(RegionalOutputCode):
    """A graph on the meta device with roles for groups; on a rank once it is loaded."""

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Give the loaded graph this rank's device and groups."""
        if self._graph_module is not None:
            return  # In the process that traced it, where it is not run.
        super().post_compile(example_inputs, constants, graph_kwargs)
        rank = _loading.get()
        if rank is None:
            raise ArtifactRefusedError(
                "this code belongs to no rank yet: load it by megatron_cg.compiled.load.load"
            )
        give_to(rank, self._graph_module)


def give_to(rank: Rank, graph_module: Any) -> None:
    """Replace the meta device and the roles in a graph, in place."""

    def placed(value: Any) -> Any:
        is_meta = isinstance(value, torch.device) and value.type == "meta"
        return rank.device if is_meta else value

    for node in graph_module.graph.nodes:
        node.args = map_aggregate(node.args, placed)
        node.kwargs = map_aggregate(node.kwargs, placed)
        if is_collective(node):
            rename(node, rank.groups)
    graph_module.recompile()


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


def refuse_in_graph(graph_module: torch.fx.GraphModule) -> None:
    """Raise PrecompileError for random numbers, and for constants that have no values."""
    for node in graph_module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise PrecompileError(
                f"{place_of(node)} draws random numbers ({node.target}), and Megatron's random "
                "states are not part of compiled code: set hidden_dropout and attention_dropout "
                "to 0"
            )
        value = getattr(graph_module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            raise PrecompileError(
                f"{place_of(node)} has a constant tensor, {node.target}, made on the meta device, "
                "which has no values: register it as a buffer, which load takes from the rank's "
                "own module"
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
        roles: the prefix and the role, by the name of the group on this rank.

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
    """Collectives of a graph, each with the name of its group."""
    for node in filter(is_collective, graph_module.graph.nodes):
        for place, argument in enumerate(node.target._schema.arguments):
            if argument.name == "group_name":
                yield (
                    node,
                    node.args[place] if place < len(node.args) else node.kwargs["group_name"],
                )


def is_collective(node: torch.fx.Node) -> bool:
    """Whether a node is a functional collective."""
    return getattr(node.target, "namespace", None) in _WITH_GROUPS


def place_of(node: torch.fx.Node) -> str:
    """The innermost module of a node, with its class, and the last line of source.

    Operations inside of an autograd.Function do not know their module: it is then that of the
    operation before it.
    """
    frames = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    frames = [line for line in frames if line.startswith("File ")]
    source = ""
    if frames:
        file, line, function = (part.strip() for part in frames[-1].split(",", 2))
        name = file.removeprefix('File "').removesuffix('"').rpartition("/")[2]
        source = f"{name}:{line.removeprefix('line ')} {function}"
    return ", ".join(filter(None, (_module(node), source))) or node.name


def _module(node: torch.fx.Node) -> str:
    """``mlp.linear_fc1 (Linear)`` for ``L['self']._modules['mlp']._modules['linear_fc1']``."""
    at = node
    while at.op != "root":
        stack = at.meta.get("nn_module_stack") or at.meta.get("fwd_nn_module_stack")
        if stack:
            path, kind = list(stack.values())[-1]
            name = getattr(kind, "__name__", str(kind).rpartition(".")[2])
            for noise in ("L['self']", "L['fn']", "_modules[", "_orig_mod", "'", '"', "]", "["):
                path = path.replace(noise, "")
            inner = ".".join(filter(None, path.split(".")))
            return f"{inner} ({name})" if inner else name
        at = at.prev
    return ""
