"""Traces a region as one rank, forward and backward, by torch's AOT compilation.

Relied on: ``torch.compile(...).forward.aot_compile`` (torch 2.11 to 2.15) makes one graph of a
module's call and of its backward pass, without running it. The compilers below keep the graphs as
ATen operations: Inductor's code names its GPU, and so could not serve other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._dynamo.backends.common import AotAutograd

from megatron_cg.compiled.collectives import traceable
from megatron_cg.compiled.fingerprint import Capability, fingerprint
from megatron_cg.compiled.fused_norm import fused_norms_kept
from megatron_cg.compiled.graph_checks import (
    PREFIX,
    name_groups,
    refuse_globals,
    refuse_in_graph,
    refuse_modules,
    refuse_zero_gradients,
)
from megatron_cg.compiled.graph_code import Line, bytecode_lines, graph_lines
from megatron_cg.compiled.output_code import RankedOutputCode
from megatron_cg.compiled.region import Region
from megatron_cg.compiled.zero_dropout import remove_zero_dropout
from megatron_cg.errors import PrecompileError
from megatron_cg.upstream.symbols import Symbol

_AOT_AUTOGRAD = Symbol(
    "torch",
    "torch._dynamo.backends.common:AotAutograd",
    "a backend made of compilers for forward and backward graphs",
)
_AOT_COMPILED = Symbol(
    "torch",
    "torch._dynamo.aot_compile:AOTCompiledFunction",
    "a compiled function that can be saved",
    attributes=("save_compiled_function", "source_info", "fn", "disable_guard_check"),
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
RELIES_ON = (_AOT_AUTOGRAD, _AOT_COMPILED, _GUARDS, _FRESH_CACHE, _CACHES)


@dataclass(frozen=True)
class Trace:
    """What one rank's trace came to."""

    rank: int
    code: Mapping[str, list[Line]]
    fingerprint: Mapping[str, str]
    roles: frozenset[str]
    """The roles whose groups the code uses, with the prefix ``mcg::``."""
    compiled: Any
    """torch's compiled function, which can be saved."""


def trace(region: Region, rank: int, capability: Capability) -> Trace:
    """Trace the region of a rank.

    Args:
        region: on the meta device.
        rank: for messages.
        capability: see :func:`~megatron_cg.compiled.fingerprint.fingerprint`.

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
    made = _Graphs(region)
    settings = torch._dynamo.config.patch(enable_aot_compile=True)
    # torch's cache on disk would answer instead of our compilers, with a pickle of who knows whom.
    fused = nullcontext() if capability is None else fused_norms_kept()
    with settings, fused, _FRESH_CACHE.find()(), traceable(), _naming_the_place(rank):
        backend = _Checked(
            fw_compiler=made.compiler("forward"), bw_compiler=made.compiler("backward")
        )
        compiled: Any = torch.compile(
            region.module,
            fullgraph=True,
            dynamic=False,
            backend=backend,
            options={"guard_filter_fn": _GUARDS.find()},
        )
        function = compiled.forward.aot_compile((region.args, dict(region.kwargs)))
    refuse_globals(function.fn.__code__)
    code = {part: graph_lines(graph) for part, graph in sorted(made.graphs.items())}
    code |= {"outputs": bytecode_lines(function.fn.__code__)}
    found = fingerprint(region, capability)
    return Trace(rank, code, found, frozenset(made.roles), function)


def _any_operation(_name: str) -> bool:
    """Collectives may be saved too; by default ATen operations alone may."""
    return True


class _Graphs:
    """The compilers of the forward and backward graphs, and the graphs."""

    def __init__(self, region: Region) -> None:
        self._names = {
            str(group.group_name): f"{PREFIX}{role}" for role, group in region.groups.items()
        }
        self.graphs: dict[str, torch.fx.GraphModule] = {}
        self.roles: set[str] = set()

    def compiler(self, part: str) -> Callable[..., Any]:
        def compile_graph(graph_module: torch.fx.GraphModule, _examples: Any) -> Any:
            refuse_in_graph(graph_module)
            self.roles |= name_groups(graph_module, self._names)
            self.graphs[part] = graph_module
            return RankedOutputCode(graph_module, ops_filter=_any_operation)

        return compile_graph


class _Checked(AotAutograd):
    """The backend, with a look at Dynamo's graph first; AOT compilation asks for this class."""

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        refuse_zero_gradients(gm)
        remove_zero_dropout(gm)
        return super().__call__(gm, example_inputs, **kwargs)


@contextmanager
def _naming_the_place(rank: int) -> Iterator[None]:
    """Turn errors of the compiler in the block into a PrecompileError that names the place."""
    try:
        yield
    except PrecompileError:
        raise
    except Exception as error:
        refusal = _refusal_inside(error)
        if refusal is not None:
            raise refusal from error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        places = [line for line in lines if line.startswith("File ")]
        reason = lines[0] if lines else type(error).__name__
        where = f", at {places[-1]}" if places else ""
        raise PrecompileError(
            f"as rank {rank}, the region cannot be traced as one graph: {reason}{where}. Leave "
            "this module out of the region"
        ) from error


def _refusal_inside(error: BaseException | None) -> PrecompileError | None:
    """Our own refusal, which Dynamo wraps when a backend raises it."""
    while error is not None:
        if isinstance(error, PrecompileError):
            return error
        error = getattr(error, "inner_exception", None) or error.__cause__
    return None
