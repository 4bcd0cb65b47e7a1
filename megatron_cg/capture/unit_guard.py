"""What capture records about one unit, and the guard of its graph that is built from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megatron_cg.consensus.collectives import collectives_so_far
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.replay.guard import Guard
from megatron_cg.replay.guard.addresses import Addresses
from megatron_cg.replay.guard.inputs import Inputs
from megatron_cg.replay.guard.modes import Autocast, Autograd, Frozen, Numerics, Training
from megatron_cg.replay.guard.objects import Entry, Hooks, Objects, entries, tensor_attributes
from megatron_cg.replay.guard.routing import Routing
from megatron_cg.replay.unit import Unit


class UnitGuard:
    """One unit's conditions, recorded while it is captured.

    Args:
        unit: the layer; its hooks are still installed.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._hooks = Hooks(unit.layer, unit.graphed)
        attributes = tensor_attributes(unit.layer, unit.graphed)
        self._attributes = [(entry, entry[0][entry[1]]) for entry in attributes]
        self._addresses = Addresses(())
        self._before = 0
        self.collectives = unit.collectives
        """Whether the unit's graph contains collectives; final once it is captured."""

    def watch_memory(self, sharding: Sharding) -> None:
        """Find the memory that the graph will address directly; called before the first pass.

        The modules must already hold their unsharded parameters: the sharded parameters that they
        hold between steps are in no graph.
        """
        memory = sharding.watched_memory(self._unit.layer, self._unit.graphed)
        self._addresses = Addresses(memory)

    def pass_begins(self, *, forward: bool) -> None:
        """Record the addresses that this pass reads and writes."""
        self._addresses.note(forward=forward)
        self._before = collectives_so_far()

    def pass_ended(self) -> None:
        """Record whether the pass issued collectives."""
        self.collectives = self.collectives or collectives_so_far() > self._before

    def guard(
        self,
        inputs: Inputs,
        device_type: str,
        read_numerics: Callable[[], Any],
        numerics: Any,
        more: Iterable[Entry] = (),
    ) -> Guard:
        """The guard of the unit's graph.

        Args:
            inputs: the inputs of the graph.
            device_type: where the unit runs, for autocast.
            read_numerics: see :class:`Numerics`.
            numerics: the numerics state at capture.
            more: entries of the table of objects, in addition to those of the layer.
        """
        layer, graphed = self._unit.layer, self._unit.graphed
        kept = [entry for entry, tensor in self._attributes if entry[0].get(entry[1]) is tensor]
        table = [*entries(layer, graphed), *kept, *more]
        with self._unit.in_forward():
            autocast = Autocast(device_type)
        unit = (
            Autograd(),
            autocast,
            Numerics(numerics, read_numerics),
            Training([layer, *graphed]),
            Frozen(layer, graphed),
            Routing(graphed),
            Objects(table),
            self._hooks,
        )
        in_backward = Autocast(device_type, " in its backward pass")
        return Guard(inputs, self._addresses, unit, in_backward)
