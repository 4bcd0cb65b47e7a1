"""Traces a region as one rank, forward and backward, by torch's AOT compilation.

What must not be in a graph is refused. Its lines, which ranks compare, have an operation, its
operands and all constants, and where it comes from. Process groups stand in them by role, so ranks
whose groups have other names have the same lines.

Relied on: ``torch.compile(...).forward.aot_compile`` (torch 2.11 to 2.15) makes one graph of a
module's call and of its backward pass, without running it. The compilers below keep the graphs as
ATen operations: Inductor's code names its GPU, and so could not serve other ranks. A graph gets its
device and its process groups when it is loaded (torch's ``post_compile``).

Note [Collectives]
    Dynamo traces torch's collectives as functional ones, but refuses ``async_op=True`` (torch 2.11
    to 2.15). Inside :func:`traceable` an asynchronous collective is issued and waited for at once,
    and its handle is done. Numbers are the same; what ran beside the collective now runs after it.

Note [A tensor that a Function returns and has twice]
    torch 2.11 gives silently zero gradients where a traced ``autograd.Function`` returns a tensor
    that its forward has under two names (pytorch/pytorch#180642): one that it has written in place,
    or that ``contiguous()`` or ``to()`` have returned as it was. Megatron's mappings do this: they
    allocate an output, let a collective write it, and return it. The replacements return a
    functional collective's own result. Any other such Function is refused at load, where its
    gradients are not those of eager.

Note [Operations that only GPUs have]
    ``aten::_fused_rms_norm`` has a kernel for CUDA, and torch's own decomposition for devices
    without a kernel, such as the meta device (torch 2.11, 2.15). So its trace would have the
    separate operations, which round elsewhere than the kernel of an eager pass. With a kernel for
    the meta device, which computes shapes alone, torch keeps the operation.
"""

import dis
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.fx
from torch._dynamo.backends.common import AotAutograd
from torch._inductor.output_code import RegionalOutputCode
from torch.fx.node import map_aggregate

from megatron_cg.compiled.region import (
    ABSENT,
    PREFIX,
    Capability,
    Guards,
    PlainState,
    Region,
    fingerprint,
)
from megatron_cg.errors import PrecompileError
from megatron_cg.hooks import describe, module_hooks
from megatron_cg.upstream.patch import set_attribute
from megatron_cg.upstream.symbols import Symbol

_PARALLEL = "megatron.core.tensor_parallel"
_MAPPINGS, _LAYERS, _RANDOM = (f"{_PARALLEL}.{n}" for n in ("mappings", "layers", "random"))

_TRACKER_CLASS = Symbol(f"{_RANDOM}:CudaRNGStatesTracker", "a tracker of random states")
_TRACKER = Symbol(f"{_RANDOM}:_CUDA_RNG_STATE_TRACKER", "the tracker, or None")
_TRACKER_MADE = Symbol(f"{_RANDOM}:_CUDA_RNG_STATE_TRACKER_INITIALIZED", "whether it is made")
_WARNED = Symbol(
    f"{_LAYERS}:linear_with_grad_accumulation_and_async_allreduce.warned",
    "is set while it is traced, once it has warned",
)
_BOUND = {
    Symbol(f"{module}:{ours}", "a collective of torch, bound at import"): torchs
    for module in (_MAPPINGS, _LAYERS)
    for ours, torchs in (
        ("dist_all_gather_func", "all_gather_into_tensor"),
        ("dist_reduce_scatter_func", "reduce_scatter_tensor"),
    )
}
_ASYNCHRONOUS = (
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all_single"),
    "reduce_scatter_tensor",
)
"""The collectives of ``torch.distributed`` that Dynamo can rewrite."""


@contextmanager
def traceable() -> Iterator[None]:
    """Install the replacements, for torch and for Megatron."""
    with ExitStack() as undo:
        done = {name: _done_at_once(getattr(dist, name)) for name in _ASYNCHRONOUS}
        for name, function in done.items():
            undo.callback(set_attribute(dist, name, function))
        # With a tracker, the trace does not see one being made, as every call would again.
        values = {_TRACKER: _TRACKER_CLASS.find()(), _TRACKER_MADE: True, _WARNED: True}
        values |= {symbol: done[name] for symbol, name in _BOUND.items()}
        # An unknown body is traced as it is, and compared with eager at load.
        values |= {one: _FUNCTIONS[one] for one in _FUNCTIONS if one.unknown_body() is None}
        for symbol, value in values.items():
            owner, name = symbol.place()
            undo.callback(set_attribute(owner, name, value))
        yield


class _Finished:
    """The handle of a collective that is done."""

    def wait(self, _timeout: Any = None) -> bool:
        return True


def _done_at_once(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        collective(*args, **kwargs)
        return _Finished() if async_op else None

    return call


def _mapping(collective: Callable[[torch.Tensor, Any], torch.Tensor]) -> Callable[..., Any]:
    """One of Megatron's mappings, whose result is that of a functional collective."""

    def call(
        input_: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if group.size() == 1:
            return input_
        if sizes is not None:
            raise ValueError(
                "ranks hold different numbers of rows: compiled code cannot gather them"
            )
        return collective(input_.contiguous(), group)

    return call


_reduce = _mapping(lambda rows, group: functional.all_reduce(rows, "sum", group))
_gather_first = _mapping(lambda rows, group: functional.all_gather_tensor(rows, 0, group))
_scatter_first = _mapping(
    lambda rows, group: functional.reduce_scatter_tensor(rows, "sum", 0, group)
)


def _fresh_memory(
    _buffer: Any, shape: Any, dtype: torch.dtype, _name: str, _context: Any = None
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=torch.device("meta"))


def _no_fork(*_args: Any, **_kwargs: Any) -> Any:
    return nullcontext()


_FUNCTIONS = {
    Symbol(path, "a function that is traced otherwise", fingerprints=(fingerprint,)): function
    for function, path, fingerprint in (
        (_reduce, f"{_MAPPINGS}:_reduce", "354fa3ca19004b07"),
        (_gather_first, f"{_MAPPINGS}:_gather_along_first_dim", "a4e3ac604c4824f4"),
        (_scatter_first, f"{_MAPPINGS}:_reduce_scatter_along_first_dim", "b16fab690c1237cd"),
        (_fresh_memory, "megatron.core.utils:GlobalMemoryBuffer.get_tensor", "517236bbbf6756e2"),
        (_no_fork, f"{_RANDOM}:CudaRNGStatesTracker.fork", "b6ca8a68776218dc"),
    )
}


_OF_DYNAMO = ("__compiled_fn", "__import_torch_dot_", "__import_builtins", "__import_operator")
"""Beginnings of the names that bytecode of Dynamo needs itself (torch 2.11 and 2.15)."""
_WITH_GROUPS = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor")

Code = Mapping[str, Sequence[tuple[str, str]]]
"""Of each part (``forward``, ``backward``, ``outputs``) the operations, each with its place."""

_AOT_COMPILED = Symbol(
    "torch._dynamo.aot_compile:AOTCompiledFunction",
    "a compiled function that can be saved",
    attributes=("serialize", "fn", "disable_guard_check", "source_info"),
)
_OUTPUT_CODE = Symbol(
    "torch._inductor.output_code:RegionalOutputCode",
    "serialises a graph, and calls post_compile after loading",
    attributes=("post_compile", "prepare_for_serialization", "_graph_module"),
)
_FRESH_CACHE = Symbol(
    "torch._inductor.utils:fresh_cache", "compiles with a new cache on disk in a block"
)
_NORM = Symbol("torch.ops:aten._fused_rms_norm", "RMSNorm as one operation")
RELIES_ON = (
    *(_TRACKER, _TRACKER_MADE, _TRACKER_CLASS, _WARNED, *_BOUND, *_FUNCTIONS),
    *(_AOT_COMPILED, _OUTPUT_CODE, _FRESH_CACHE, _NORM),
)


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
    """Replace the names of this rank's process groups by :data:`PREFIX` and their roles, in place.

    Raises PrecompileError if a collective runs on a group that has no role.
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
                "to Region.groups, or leave this module out of the region"
            )
        rename(node, {group: roles[group]})
    graph_module.recompile()


def rename(node: torch.fx.Node, names: Mapping[str, str]) -> None:
    """Replace names in a collective's operands, wherever they stand."""
    change_operands(
        node, lambda value: names.get(value, value) if isinstance(value, str) else value
    )


def change_operands(node: torch.fx.Node, change: Callable[[Any], Any]) -> None:
    node.args = map_aggregate(node.args, change)
    node.kwargs = map_aggregate(node.kwargs, change)


def is_collective(node: torch.fx.Node) -> bool:
    return getattr(node.target, "namespace", None) in _WITH_GROUPS


def graph_lines(graph_module: torch.fx.GraphModule) -> list[tuple[str, str]]:
    """The operations of a graph whose groups have been named by role, and all constants."""
    lines = []
    for node in graph_module.graph.nodes:
        text = f"{node.name} = {node.op} {node.target} {node.args} {dict(node.kwargs)}"
        if node.op == "get_attr":
            text += f" {_constant(attrgetter(str(node.target))(graph_module))}"
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
    """The innermost line outside of torch that a node comes from.

    If it does not know it, as in an autograd.Function, that of the operation before.
    """
    while node.op != "root":
        lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
        frames = [line for line in lines if line.startswith("File ")]
        if frames:
            return next((f for f in reversed(frames) if "/torch/" not in f), frames[-1])
        node = node.prev
    return "unknown source"


@dataclass(frozen=True)
class Trace:
    code: Code
    fingerprint: Mapping[str, str]
    state: Mapping[str, str]
    """Plain Python values that are constants of the code; see ``region.py``."""
    compiled: Any
    """torch's compiled function, which can be saved."""


def trace(region: Region, rank: int, capability: Capability) -> Trace:
    """Trace the region of a rank, on the meta device.

    Raises PrecompileError if it cannot be traced, or its graph must not be saved; names the module.
    """
    if region.device().type != "meta":
        raise PrecompileError(
            f"{type(region.module).__name__} is on {region.device()}: build the module, and the "
            'arguments, under torch.device("meta")'
        )
    refuse_modules(region.module)
    names = {str(group.group_name): f"{PREFIX}{role}" for role, group in region.groups.items()}
    graphs: dict[str, torch.fx.GraphModule] = {}
    guards = Guards()

    def compiler(part: str) -> Callable[..., Any]:
        def compile_graph(graph_module: torch.fx.GraphModule, _examples: Any) -> Any:
            refuse_random_numbers(graph_module)
            name_groups(graph_module, names)
            graphs[part] = graph_module
            return _RankedOutputCode(graph_module, ops_filter=_any_operation)

        return compile_graph

    caches: Any = torch.compiler.config
    with (
        torch._dynamo.config.patch(enable_aot_compile=True),
        # What can be saved is an entry of torch's cache of compiled code, which may be turned off.
        torch._functorch.config.patch(enable_autograd_cache=True),
        caches.patch(force_disable_caches=False),
        # The cache on disk would answer instead of our compilers, with a pickle of who knows whom.
        _FRESH_CACHE.find()(),
        nullcontext() if capability is None else _fused_norms_kept(),
        traceable(),
        _naming_the_place(rank),
    ):
        compiled: Any = torch.compile(
            region.module,
            fullgraph=True,
            dynamic=False,
            backend=AotAutograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward")),
            options={"guard_filter_fn": guards},
        )
        function = compiled.forward.aot_compile((region.args, dict(region.kwargs)))
    refuse_globals(function.fn.__code__)
    code = {part: graph_lines(graph) for part, graph in graphs.items()}
    code |= {"outputs": bytecode_lines(function.fn.__code__)}
    state = PlainState(guards.questions(function)).texts(region.module)
    known = {name: text for name, text in state.items() if text != ABSENT}
    return Trace(code, fingerprint(region, capability), known, function)


def _any_operation(_name: str) -> bool:
    """Collectives may be saved too; by default ATen operations alone may."""
    return True


@contextmanager
def _naming_the_place(rank: int) -> Iterator[None]:
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
        reason = lines[0] if lines else type(error).__name__
        where = next((f", at {line}" for line in lines[::-1] if line.startswith("File ")), "")
        raise PrecompileError(
            f"as rank {rank}, the region cannot be traced as one graph: {reason}{where}. Leave "
            "this module out of the region"
        ) from error


@contextmanager
def _fused_norms_kept() -> Iterator[None]:
    """Trace RMSNorm as on a GPU; see Note [Operations that only GPUs have]."""
    _NORM.find()
    library = torch.library.Library("aten", "IMPL")
    implementation: Any = library.m
    # Library.impl refuses the meta device where torch has a decomposition.
    implementation.impl("_fused_rms_norm", "Meta", _shapes_of_norm, False)
    try:
        yield
    finally:
        library._destroy()


def _shapes_of_norm(
    given: torch.Tensor, normalized_shape: Sequence[int], _weight: Any, _eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs like those of the CUDA kernel: the result, and the reciprocal deviation."""
    ones = len(normalized_shape)
    kept = [*given.shape[: given.dim() - ones], *[1] * ones]
    dtype = torch.promote_types(given.dtype, torch.float32)
    return given.new_empty(given.shape), given.new_empty(kept, dtype=dtype)


_loading: ContextVar[tuple[torch.device, Mapping[str, str]]] = ContextVar("loading")
"""What differs between ranks that load the same code: the device, and the names of the process
groups by ``mcg::`` and the role."""


@contextmanager
def loading_for(device: torch.device, groups: Mapping[str, str]) -> Iterator[None]:
    """Code that is loaded in the block runs on this device and these groups."""
    token = _loading.set((device, groups))
    try:
        yield
    finally:
        _loading.reset(token)


class _RankedOutputCode(RegionalOutputCode):
    """A graph on the meta device with roles for groups; on a rank once it is loaded."""

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Give the loaded graph this rank's device and groups."""
        if self._graph_module is not None:
            return  # In the process that traced it, where it is not run.
        super().post_compile(example_inputs, constants, graph_kwargs)
        device, groups = _loading.get()

        def placed(value: Any) -> Any:
            is_meta = isinstance(value, torch.device) and value.type == "meta"
            return device if is_meta else value

        graph_module: Any = self._graph_module
        for node in graph_module.graph.nodes:
            change_operands(node, placed)
            if is_collective(node):
                rename(node, groups)
        graph_module.recompile()
