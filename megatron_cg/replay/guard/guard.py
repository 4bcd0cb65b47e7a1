"""All conditions of one graph; cheap checks with precise messages come first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_cg.replay.guard.addresses import Addresses
from megatron_cg.replay.guard.inputs import Inputs
from megatron_cg.replay.guard.mismatch import Mismatch
from megatron_cg.replay.guard.modes import Autocast, Autograd, Frozen, Numerics, Training
from megatron_cg.replay.guard.objects import Hooks, Objects
from megatron_cg.replay.guard.routing import Routing

UnitClause = Training | Frozen | Autograd | Autocast | Numerics | Routing | Objects | Hooks


class Guard:
    """One graph's conditions: its inputs, and those that all graphs of its unit share."""

    def __init__(
        self,
        inputs: Inputs,
        addresses: Addresses,
        unit: Sequence[UnitClause],
        in_backward: Autocast,
    ) -> None:
        self.inputs = inputs
        self.addresses = addresses
        self._unit = tuple(unit)
        self._in_backward = in_backward

    def broken(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mismatch | None:
        """What forbids a forward replay with these arguments, or None."""
        found = self.inputs.broken(args, kwargs)
        if found is not None:
            return found
        for clause in self._unit:
            found = clause.broken()
            if found is not None:
                return found
        return self.addresses.broken(forward=True)

    def broken_in_backward(self) -> Mismatch | None:
        """What forbids the backward replay that is about to begin, or None."""
        return self._in_backward.broken() or self.addresses.broken(forward=False)
