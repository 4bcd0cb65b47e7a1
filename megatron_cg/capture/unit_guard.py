"""What capture notes of one unit, and the guards of its graphs made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from megatron_cg.consensus.collectives import collectives_so_far
from megatron_cg.fsdp.buffers import watched_memory
from megatron_cg.fsdp.transform import CaptureTimeHook, CaptureTimeHooks
from megatron_cg.replay.guard import Guard
from megatron_cg.replay.guard.addresses import Addresses
from megatron_cg.replay.guard.inputs import Inputs
from megatron_cg.replay.guard.modes import Autocast, Autograd, Numerics, Training
from megatron_cg.replay.guard.objects import Entry, Hooks, Parts, entries
from megatron_cg.replay.unit import Unit

_FIRST, _LAST = -1, -2
"""Keys of our own capture-time hooks; torch counts hook ids from 0."""


class UnitGuard:
    """One unit's conditions, noted while it is captured.

    Args:
        unit: the layer; its hooks are still on it.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._hooks = Hooks(unit.layer, unit.graphed)
        self._addresses = Addresses(())
        self._before = 0
        self.collectives = unit.collectives
        """Whether the unit's graphs hold any; complete once they are captured."""

    def observe(self, fsdp: nn.Module, hooks: CaptureTimeHooks) -> CaptureTimeHooks:
        """``hooks`` with ours innermost: after those before a pass, before those after it.

        ``fsdp`` is the ``MegatronFSDP``, and the modules hold their raw parameters already: the
        sharded ones that they hold between steps are in no graph.
        """
        memory = watched_memory(fsdp, self._unit.layer, self._unit.graphed)
        self._addresses = Addresses(memory)
        return {
            "forward_pre_hooks": _with_last(hooks["forward_pre_hooks"], self._forward_begins),
            "forward_hooks": _with_first(hooks["forward_hooks"], self._pass_ends),
            "backward_pre_hooks": _with_last(hooks["backward_pre_hooks"], self._backward_begins),
            "backward_hooks": _with_first(hooks["backward_hooks"], self._pass_ends),
        }

    def guards(
        self,
        inputs: Sequence[Inputs],
        device_type: str,
        read_numerics: Callable[[], Any],
        numerics: Any,
        more: Iterable[Entry] = (),
    ) -> list[Guard]:
        """A guard for each of the unit's graphs, whose ``inputs`` are given.

        Args:
            inputs: of each graph.
            device_type: where the unit runs, for autocast.
            read_numerics: see :class:`Numerics`.
            numerics: what the graphs were captured with.
            more: entries of the table of objects that are not the layer's own.
        """
        layer, graphed = self._unit.layer, self._unit.graphed
        table = [*entries(layer, graphed), *more]
        unit = (
            Autograd(),
            Autocast(device_type),
            Numerics(numerics, read_numerics),
            Training([layer, *graphed]),
            Parts(table),
            self._hooks,
        )
        return [Guard(own, self._addresses, unit) for own in inputs]

    def _forward_begins(self, _module: nn.Module) -> None:
        self._addresses.note_forward()
        self._before = collectives_so_far()

    def _backward_begins(self, _module: nn.Module) -> None:
        self._addresses.note_backward()
        self._before = collectives_so_far()

    def _pass_ends(self, _module: nn.Module) -> None:
        self.collectives = self.collectives or collectives_so_far() > self._before


def _with_last(
    hooks: Mapping[int, CaptureTimeHook], hook: CaptureTimeHook
) -> dict[int, CaptureTimeHook]:
    return {**hooks, _LAST: hook}


def _with_first(
    hooks: Mapping[int, CaptureTimeHook], hook: CaptureTimeHook
) -> dict[int, CaptureTimeHook]:
    return {_FIRST: hook, **hooks}
