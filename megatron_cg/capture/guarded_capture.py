"""Runs the backend's capture and records what a replay depends on: every graph gets a guard."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from megatron_cg.backends.base import Backend
from megatron_cg.capture.accumulators import OtherLeaves, forget_accumulators
from megatron_cg.capture.hook_order import HookOrder
from megatron_cg.capture.marked_weights import MarkedWeights
from megatron_cg.capture.observers import PassEvents
from megatron_cg.capture.other_parameters import other_parameters_refused
from megatron_cg.capture.refusals import clear_frames, refusal
from megatron_cg.capture.static_inputs import StaticInputs
from megatron_cg.capture.transaction import buffers_kept, without_gradients
from megatron_cg.capture.unit_guard import UnitGuard, UnitGuards
from megatron_cg.errors import CaptureError
from megatron_cg.events import PassesBegin, PassesDone, emit
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.fsdp.transform import UnitHooks
from megatron_cg.replay.eager_passes import EagerPasses
from megatron_cg.replay.guard.inputs import Inputs
from megatron_cg.replay.guard.moe_metrics import metric_entries, metrics_kept
from megatron_cg.replay.guarded_graph import GuardedGraph
from megatron_cg.replay.in_flight import InFlight
from megatron_cg.replay.mismatch_policy import MismatchPolicy
from megatron_cg.replay.unit import Unit

logger = logging.getLogger(__name__)

Args = list[tuple[torch.Tensor, ...]]
Kwargs = list[dict[str, torch.Tensor]]


class GuardedCapture:
    """One capture of given units; to be created while their hooks are still installed.

    Args:
        sharding: how the model is sharded.
        units: the layers, in the order of their forward passes.
        backend: captures the graphs.
        mismatches: the mismatch policy of the graphs.
        static_inputs: which inputs of the units never change; units in the same order.
    """

    def __init__(
        self,
        sharding: Sharding,
        units: Sequence[Unit],
        backend: Backend,
        mismatches: MismatchPolicy,
        static_inputs: StaticInputs,
    ) -> None:
        self._sharding, self._units, self._backend = sharding, tuple(units), backend
        self._mismatches, self._static_inputs = mismatches, static_inputs
        self._guards = UnitGuards(UnitGuard(unit) for unit in self._units)
        self._in_flight: defaultdict[int, InFlight] = defaultdict(InFlight)
        """By microbatch."""
        self._leaves: OtherLeaves | None = None
        self.eager_passes: tuple[EagerPasses, ...] = ()
        """One for each unit, once its graphs are captured."""

    def run(
        self,
        hooks: Sequence[UnitHooks],
        args: Args,
        kwargs: Kwargs,
        options: Mapping[str, Any],
        *,
        begin: Callable[[], None],
        joins: bool,
    ) -> tuple[GuardedGraph, ...]:
        """Capture; returns a guarded graph for each sample.

        Args:
            hooks: the hooks of each unit.
            args: positional static inputs of each graph.
            kwargs: keyword static inputs of each graph.
            options: other arguments of TE's ``make_graphed_callables``.
            begin: called when all is ready and before the first hook runs; may raise.
            joins: whether to run the hooks that other ranks wait for after a failure.

        Raises:
            OutOfStepError: capture failed in a way that leaves other ranks waiting.
        """
        order = HookOrder(
            [unit.layer for unit in self._units],
            len(args),
            [unit.capture_time for unit in hooks],
            options,
            (
                PassEvents([unit.name for unit in self._units]),
                self._guards,
                MarkedWeights(self._units),
            ),
        )
        numbers_of = [order.samples_of(index) for index in range(len(self._units))]
        borrowed = self._borrow(numbers_of, kwargs)
        for guard in self._guards:
            guard.watch_memory(self._sharding)
        if self._sharding.renews_accumulators:
            forget_accumulators(module for unit in self._units for module in unit.graphed)
        else:
            self._leaves = OtherLeaves(unit.layer for unit in self._units)
        begin()
        try:
            graphs = self._capture(order, args, kwargs, options)
        except Exception as error:
            refused = self._refusal(error, order)
            if joins:
                # The frames hold incomplete graphs, and the hooks may need their memory.
                clear_frames(error)
                order.run_rest()
            if refused is None:
                raise
            raise refused from error
        self.eager_passes = tuple(
            EagerPasses(unit.name, self._mismatches, collectives=guard.collectives)
            for unit, guard in zip(self._units, self._guards, strict=True)
        )
        return self._guarded_graphs(
            graphs, numbers_of, args, kwargs, borrowed=borrowed, options=options
        )

    def _capture(
        self,
        order: HookOrder,
        args: Args,
        kwargs: Kwargs,
        options: Mapping[str, Any],
    ) -> Sequence[Any]:
        layers = tuple(unit.layer for unit in self._units)
        emit(PassesBegin(order.warmup_passes, order.passes))
        with (
            self._leaves.held() if self._leaves is not None else nullcontext(),
            other_parameters_refused(self._sharding.wrapped, self._units, lambda: order.under_way),
        ):
            graphs = self._backend.capture(
                layers, args, sample_kwargs=kwargs, capture_time_hooks=order.wrapped, **options
            )
        if self._leaves is not None:
            for graph in graphs:
                self._leaves.replays(self._backend.replay_function(graph))
        order.check_finished()
        emit(PassesDone())
        return graphs

    def _refusal(self, error: Exception, order: HookOrder) -> CaptureError | None:
        """What CUDA refused, by module and line; None for any other error.

        Never raises, although the advice comes from Megatron's code: the hooks that other ranks
        wait for must still run.
        """
        under_way = order.under_way
        if under_way is None:
            return None
        index, in_backward = under_way
        try:
            return refusal(error, self._units[index], in_backward)
        except Exception:
            logger.exception("megatron_cg: the place of a failed capture could not be found")
            return None

    def _borrow(self, numbers_of: Sequence[Sequence[int]], kwargs: Kwargs) -> list[torch.Tensor]:
        """Replace samples that never change by the model's own tensors; returns these tensors."""
        borrowed: list[torch.Tensor] = []
        for index, numbers in enumerate(numbers_of):
            for number in numbers:
                own = self._static_inputs.replace_in(index, kwargs[number])
                borrowed += [own[name] for name in own if own[name] is not kwargs[number][name]]
                kwargs[number] = own
        return borrowed

    def _guarded_graphs(
        self,
        graphs: Sequence[Any],
        numbers_of: Sequence[Sequence[int]],
        args: Args,
        kwargs: Kwargs,
        *,
        borrowed: Sequence[torch.Tensor],
        options: Mapping[str, Any],
    ) -> tuple[GuardedGraph, ...]:
        made: list[GuardedGraph | None] = [None] * len(graphs)
        for index, numbers in enumerate(numbers_of):
            unit = self._units[index]
            inputs = [Inputs(args[n], kwargs[n], borrowed, unit.inputs) for n in numbers]
            guards = self._guards[index].guards(
                inputs,
                args[numbers[0]][0].device.type,
                self._backend.numerics,
                self._backend.captured_numerics(index, options),
                [*metric_entries(), *self._backend.entries(unit.graphed)],
            )
            for microbatch, (number, guard) in enumerate(zip(numbers, guards, strict=True)):
                made[number] = GuardedGraph(
                    graphs[number],
                    guard,
                    unit,
                    microbatch,
                    self._mismatches,
                    index=index,
                    in_flight=self._in_flight[microbatch],
                    eager_passes=self.eager_passes[index],
                    replay=self._backend.replay_function(graphs[number]),
                    kept=partial(self._kept, unit),
                )
        return tuple(graph for graph in made if graph is not None)

    @contextmanager
    def _kept(self, unit: Unit) -> Iterator[None]:
        """Restore everything that one pass through ``unit`` changes."""
        modules = list(unit.layer.modules())
        with ExitStack() as stack:
            stack.enter_context(self._sharding.states_kept(modules))
            stack.enter_context(buffers_kept(modules))
            stack.enter_context(metrics_kept())
            if self._leaves is not None:
                stack.enter_context(self._leaves.held())
            stack.enter_context(without_gradients(list(unit.layer.parameters())))
            stack.enter_context(self._backend.preserved([unit.layer]))
            stack.enter_context(self._backend.without_updates())
            yield
