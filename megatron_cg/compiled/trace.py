"""Traces a region as one rank, forward and backward, by torch's AOT compilation.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._dynamo.backends.common import AotAutograd
from torch._inductor.output_code import RegionalOutputCode
from torch.fx.node import map_aggregate

from megatron_cg.compiled.collectives import traceable
from megatron_cg.compiled.graph import (
    Code,
    bytecode_lines,
    graph_lines,
    is_collective,
    name_groups,
    refuse_globals,
    refuse_modules,
    refuse_random_numbers,
    rename,
)
from megatron_cg.compiled.plain_state import ABSENT, Guards, PlainState
from megatron_cg.compiled.region import PREFIX, Capability, Region, fingerprint
from megatron_cg.errors import PrecompileError
from megatron_cg.upstream.symbols import Symbol

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
RELIES_ON = (_AOT_COMPILED, _OUTPUT_CODE, _FRESH_CACHE, _NORM)


@dataclass(frozen=True)
class Trace:
    """What one rank's trace came to."""

    code: Code
    fingerprint: Mapping[str, str]
    state: Mapping[str, str]
    """Plain Python values that are constants of the code; see ``plain_state.py``."""
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

    settings = torch._dynamo.config.patch(enable_aot_compile=True)
    # What can be saved is an entry of torch's cache of compiled code, which may be turned off.
    entry = torch._functorch.config.patch(enable_autograd_cache=True)
    caches: Any = torch.compiler.config
    fused = nullcontext() if capability is None else _fused_norms_kept()
    # torch's cache on disk would answer instead of our compilers, with a pickle of who knows whom.
    with (
        settings,
        entry,
        caches.patch(force_disable_caches=False),
        fused,
        _FRESH_CACHE.find()(),
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
    state = PlainState(guards.questions(function), region.module).texts(region.module)
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
        places = [line for line in lines if line.startswith("File ")]
        reason = lines[0] if lines else type(error).__name__
        where = f", at {places[-1]}" if places else ""
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
    rows = given.shape[: given.dim() - len(normalized_shape)]
    kept = [*rows, *(1 for _ in normalized_shape)]
    dtype = torch.promote_types(given.dtype, torch.float32)
    return given.new_empty(given.shape), given.new_empty(kept, dtype=dtype)


_Rank = tuple[torch.device, Mapping[str, str]]
"""What differs between the ranks that load the same code: the device, and the names of the process
groups by ``mcg::`` and the role."""
_loading: ContextVar[_Rank] = ContextVar("loading")


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
            node.args = map_aggregate(node.args, placed)
            node.kwargs = map_aggregate(node.kwargs, placed)
            if is_collective(node):
                rename(node, groups)
        graph_module.recompile()
