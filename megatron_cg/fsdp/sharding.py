"""What a capture has to know about how a model is sharded.

Each way of sharding is one class with the members of :class:`Sharding`: Megatron-FSDP
(``megatron_fsdp.py``), its version 2 (``megatron_fsdp_v2.py``), torch's FSDP2
(``fully_shard.py``), and models whose parameters stay where they are (``unsharded.py``).
``find_sharding.py`` finds the one of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from megatron_cg.errors import Violation
from megatron_cg.fsdp.transform import UnitHooks
from megatron_cg.replay.guard.addresses import Watched
from megatron_cg.replay.unit import Unit


class Sharding(Protocol):
    """How one model is sharded."""

    name: str
    """What users call it, for messages."""
    wrapped: nn.Module
    """The module whose hooks shard the model; the model itself if there is none."""
    network: nn.Module
    """The module in which units are named."""
    megatron_fsdp: Any
    """The ``MegatronFSDP``, whose bookkeeping the fast path shortens; None for anything else."""
    renews_accumulators: bool
    """Whether parameters may get new gradient accumulators for a capture. Otherwise modules hold
    other leaves meanwhile; see ``capture/accumulators.py``."""

    def refusals(self, units: Mapping[str, nn.Module]) -> Iterator[Violation]:
        """Every reason why one of these modules, by name, cannot be captured."""

    def is_unit(self, module: nn.Module) -> bool:
        """Whether the sharding gathers and frees the parameters of this module by themselves."""

    def unit_hooks(self, unit: Unit) -> UnitHooks:
        """The current hooks of a unit, for the backend. Changes nothing.

        Raises HookError if a user's hook would not run as intended.
        """

    def made(self, hook: Callable[..., Any]) -> bool:
        """Whether a hook on a module belongs to the sharding."""

    def observe_step(self, units: Collection[nn.Module]) -> Callable[[], None]:
        """Learn from a step before capture, until the returned function is called."""

    def stable_memory(self, layers: Sequence[nn.Module]) -> Callable[[], None]:
        """Make unsharded parameters of ``layers`` keep their addresses; returns the undo.

        Called between two steps, on all ranks. Issues no collective.
        """

    def capturing(self, layers: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Inside the block, ``layers`` hold unsharded parameters, and hooks can be called alone.

        Issues no collective on entry.
        """

    def watched_memory(self, layer: nn.Module, graphed: Sequence[nn.Module]) -> list[Watched]:
        """Parameters and buffers of ``graphed`` whose addresses the layer's graphs hold.

        Called inside of :meth:`capturing`.
        """

    def states_kept(self, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Restore what a pass without hooks through ``modules`` changes in the sharding."""
