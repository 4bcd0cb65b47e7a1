"""Runs of the real Megatron-FSDP whose order is checked."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megatron_cg.fastpath import install_parts
from megatron_cg.fastpath.install_parts import install
from megatron_cg.fastpath.part import find_cell
from megatron_cg.fully_shard import models
from megatron_cg.tape import train
from megatron_cg.tape.fakes import replaced
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.patch import IN_CELL, set_attribute, wrap_method
from tests.unit.fastpath.test_fast_path import BorrowingTape, with_frozen
from tests.unit.ordering.check import races
from tests.unit.ordering.device import modelled_device
from tests.unit.ordering.trace import Site, Trace
from tests.unit.trainers import UNPOOLED, evaluate, trainer_of

HAS_V2 = bool(models.RELIES_ON)
LAYERS = 3
"""More units than double buffers."""
STEPS = 2


@dataclass(frozen=True)
class Run:
    """What is trained, and how.

    ``graphs`` are scopes as in Megatron's ``cuda_graph_modules``, None is no graphs; ``only`` are
    the layers that get them. ``fast`` is the fast path, with graphs or without.
    """

    graphs: tuple[str, ...] | None = None
    fast: bool = True
    shape: Mapping[str, Any] = field(default_factory=dict)
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    only: tuple[int, ...] | None = None
    microbatches: int = 2
    evaluates: bool = False
    backend: Callable[[], Any] = TapeBackend
    frozen: str = ""
    """Weights with this in their name are not trained: a bucket of their own in each unit."""
    before: Callable[[Any], object] | None = None
    """Called with the trainer before its first step."""
    around: Callable[[Any, Trace], Any] | None = None
    """A context that the traced steps run in."""
    built: bool = False
    """Whether all is traced, from the building of the model on."""


def _hooked(trainer: Any) -> None:
    """Give weights a user hook: their gradients are left to Megatron-FSDP."""
    for name, parameter in trainer.model.module.raw_param.items():
        if name.endswith("mlp.linear_fc2.weight"):
            parameter.register_post_accumulate_grad_hook(lambda _: None)


@contextmanager
def _on_another_stream(name: str, trainer: Any, trace: Trace) -> Iterator[None]:
    """Let the gradients of weights called ``name`` be computed and hooked on another stream.

    Autograd runs a node on the stream of its forward pass, here that of a branch of its own. The
    branch begins with the backward pass, for whose stream it waits, and its end is waited for
    when the pass is over (torch 2.11, ``engine.cpp``: leaf streams).
    """
    names = {id(p): n for n, p in trainer.model.module.raw_param.items()}
    main: Any = torch.cuda.current_stream()
    side: Any = torch.cuda.Stream()
    fsdp = trainer.model.module
    hook = find_cell(fsdp, "_process_post_backward_gradients")
    own = hook.cell_contents

    def begins() -> None:
        side.wait_stream(main)

    def ends() -> None:
        main.wait_stream(side)

    def called(parameters: list[Any]) -> None:
        parameter, *more = parameters
        if more or not names[id(parameter)].endswith(name):
            own(parameters)
            return
        with trace.switched(on=False):
            parameter.grad = parameter.grad.clone()
        with torch.cuda.stream(side):
            parameter.grad.mul_(1)
            own(parameters)

    with ExitStack() as undo:
        undo.callback(set_attribute(hook, IN_CELL, called))
        undo.callback(wrap_method(trainer, "_forward", before=ends))
        undo.callback(wrap_method(trainer, "_forward", after=begins))
        undo.callback(wrap_method(fsdp, "finish_grad_sync", before=ends))
        yield


DENSE = ("attn", "mlp")
EXPERTS: dict[str, Any] = {"graphs": ("attn", "moe_router"), "shape": {"experts": 4, "topk": 2}}
_SHORT = {"suggested_communication_unit_size": 1000}
"""Parameters; fewer than a layer has, so that reductions are waited for early."""
_OUTER = {"num_distributed_optimizer_instances": 2}
_OUTER_SHARDS = {**_OUTER, "outer_dp_sharding_strategy": "optim"}


def _sharded(strategy: str) -> dict[str, Any]:
    return {"data_parallel_sharding_strategy": strategy}


_V2 = {"megatron_fsdp_version": 2}
_UNDER_V2 = {
    "v2": Run(DENSE, fsdp=_V2, evaluates=True),
    "v2, attention": Run(("attn",), fsdp=_V2),
    "v2, experts": Run(**EXPERTS, fsdp=_V2),
    "v2, no graphs, from the first step": Run(fsdp=_V2, built=True),
}
"""With megatron-core 0.20."""
RUNS: dict[int, dict[str, Run]] = {
    1: {"one rank": Run(DENSE, evaluates=True), "one rank, experts": Run(**EXPERTS)},
    2: {
        "dense": Run(DENSE, evaluates=True),
        "attention, three microbatches": Run(("attn",), microbatches=3),
        "experts": Run(**EXPERTS, evaluates=True),
        "first and last layer": Run(DENSE, only=(0, 2), evaluates=True),
        "borrowed memory": Run(DENSE, backend=BorrowingTape),
        "frozen weights": Run(DENSE, frozen="linear_proj"),
        "short queue, one microbatch": Run(DENSE, fsdp=_SHORT, microbatches=1),
        "buffers of the largest unit": Run(
            **EXPERTS, fsdp={"megatron_fsdp_max_pool_double_buffer": True}
        ),
        "ZeRO-2": Run(DENSE, fsdp=_sharded("optim_grads")),
        "no shards": Run(DENSE, fsdp=_sharded("no_shard")),
        "no graphs, gradients in fp32": Run(
            evaluates=True, fsdp={"megatron_fsdp_main_grads_dtype": torch.float32}
        ),
        "no graphs, no double buffers": Run(fsdp=UNPOOLED, evaluates=True),
        "a hook of the user's": Run(before=_hooked),
        **{
            f"the {which} gradient from another stream": Run(
                around=partial(_on_another_stream, weight)
            )
            for which, weight in (
                ("first", "mlp.linear_fc2.weight"),
                ("last", "input_layernorm.weight"),
            )
        },
        **(_UNDER_V2 if HAS_V2 else {}),
    },
    4: {
        "outer groups": Run(DENSE, fsdp=_OUTER),
        "outer groups, shards": Run(DENSE, fsdp=_OUTER_SHARDS),
    },
}
"""By the number of ranks. With double buffers, unless the name says otherwise."""


def traced(run: Run) -> Trace:
    """Train a few steps, and return the trace of the last ones, on this rank.

    Steps before the fast path is put in or graphs are captured, and the capture itself, are not
    traced. All work of theirs is over when the trace begins.
    """
    with ExitStack() as stack:
        trace = stack.enter_context(modelled_device())
        small = {"hidden_size": 16, "ffn_hidden_size": 16, "sequence_length": 4}
        modules = {} if run.graphs is None else {"graph_modules": run.graphs}
        shape = CpuModelConfig(
            **{"layers": LAYERS, **small, **modules, **run.shape}, fsdp_options=run.fsdp
        )
        graphs = run.graphs is not None
        if run.frozen:
            stack.enter_context(replaced(train, "GPTModel", with_frozen(GPTModel, run.frozen)))
        with trace.switched(on=run.built):
            trainer = stack.enter_context(
                trainer_of(shape, graphs=graphs, microbatches=run.microbatches)
            )
            if run.before is not None:
                run.before(trainer)
            trainer.step()
        if graphs:
            backend = run.backend()
            if isinstance(backend, BorrowingTape):  # It lends itself what a pool of CUDA would.
                stack.enter_context(replaced(install_parts, "IdlePool", lambda _: backend))
            trainer.capture(backend, only=run.only, fast_path=run.fast)
        elif run.fast and not shape.under_v2:
            stack.callback(install(trainer.model.module).close)
        if run.around is not None:
            stack.enter_context(run.around(trainer, trace))
        with trace.switched(on=True):
            for _ in range(STEPS):
                trainer.step()
                if run.evaluates:
                    evaluate(trainer)
        return trace


def check_all(places: frozenset[Site]) -> dict[str, Any]:
    """Check every run for this number of ranks; on one rank also without each wait in turn."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    results: dict[str, Any] = {}
    missed: dict[Site, str] = {}
    for name, run in RUNS[ranks].items():
        trace = traced(run)
        there = races(trace.entries)
        results[name] = {
            "races": list(dict.fromkeys(race.described(trace) for race in there)),
            "entries": len(trace.entries),
        }
        if there or rank > 0:
            continue
        met = {entry.at for entry in trace.entries if entry.at in places}
        left = met - missed.keys()
        # Many runs need none of those that are left.
        for place in left if races(trace.entries, without=left) else ():
            if without := races(trace.entries, without=[place]):
                missed[place] = without[0].described(trace)
    return {"results": results, "missed": [[*place, text] for place, text in missed.items()]}
