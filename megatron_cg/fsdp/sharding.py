"""What a capture has to know about how a model is sharded.

Each way of sharding is a :class:`Sharding`, in a file of its own. ``megatron_fsdp.py``
finds the one of a model.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from megatron_cg.errors import Violation
from megatron_cg.fsdp.roles import CAPTURE_TIME_KEYS, UnitHooks, check_hook_of_unit, never_called
from megatron_cg.hooks import HookRecord, is_idle, module_hooks
from megatron_cg.replay.borders import exchanges
from megatron_cg.replay.guard import Watched, is_quantized
from megatron_cg.replay.unit import Unit
from megatron_cg.upstream.patch import Undo

if TYPE_CHECKING:
    from megatron_cg.units.unsharded import OtherLeaves

REPLACED = (
    "Something replaced or freed this memory after capture. Keep it in place, or delete the graphs "
    "first and capture again."
)


class Sharding:
    """How one model is sharded; its members here are those of a model that nothing shards."""

    name: str
    """What users call it, for messages."""
    wrapped: nn.Module
    """The module whose hooks shard the model; the model itself if there is none."""
    network: nn.Module
    """The module in which units are named."""
    megatron_fsdp: Any = None
    """The ``MegatronFSDP``, whose bookkeeping the fast path shortens; None for anything else."""
    groups: Sequence[Any] = ()
    """Megatron-FSDP v2's groups of parameters, for which the same is done."""
    counts_gradients = False
    """Whether gradients are reduced as soon as all parameters of a bucket have got theirs; see
    ``replay/guarded_graph.py``."""
    opens_spans = False
    """Whether its hooks are those of FSDP2, with spans for a profiler."""
    varies_sums = False
    """Whether autograd sums a gradient with ``grad_dtype`` in another dtype in some passes."""
    moved = REPLACED
    """Why a parameter may have moved after capture, and what to do instead."""

    def refusals(self, units: Mapping[str, nn.Module]) -> Iterable[Violation]:
        """Every reason why one of these modules, by name, cannot be captured."""
        return ()

    def is_distributed(self, module: nn.Module) -> bool:
        """Whether weights of this module are DTensors in its forward pass."""
        return False

    def is_unit(self, module: nn.Module) -> bool:
        """Whether the sharding gathers and frees the parameters of this module by themselves."""
        return False

    def unit_hooks(self, unit: Unit) -> UnitHooks:
        """The current hooks of a unit, for the backend. Changes nothing.

        Here there are no capture-time hooks: all but those of :meth:`owns_hook` are the user's.

        Raises HookError if a user's hook would not run as intended.
        """
        for record in self._of_user(unit.layer):
            check_hook_of_unit(unit.layer, record, unit.name)
        for module in unit.graphed:
            if module is not unit.layer:
                for record in self._of_user(module):
                    if not exchanges(record.fn) and not is_idle(record.fn):
                        raise never_called(unit.name, module, record)
        return UnitHooks({key: {} for key in CAPTURE_TIME_KEYS})

    def owns_hook(self, hook: Callable[..., Any]) -> bool:
        """Whether a hook on a module belongs to the sharding."""
        return False

    def hoists_hook(self, hook: Callable[..., Any]) -> bool:
        """Whether such a hook inside of a unit runs around the unit while there are graphs.

        Otherwise no module in a unit may be a unit.
        """
        return False

    def observe_step(self, units: Collection[nn.Module]) -> Undo:
        """Learn from a step before capture, until the returned function is called."""
        return lambda: None

    def stable_memory(self, layers: Sequence[nn.Module]) -> Undo:
        """Make unsharded parameters of ``layers`` keep their addresses; returns the undo.

        Called between two steps, on all ranks. Issues no collective.
        """
        return lambda: None

    def capturing(self, layers: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Inside the block, ``layers`` hold unsharded parameters, and hooks can be called alone.

        Issues no collective on entry.
        """
        return nullcontext()

    def other_leaves(self, layers: Sequence[nn.Module]) -> "OtherLeaves | None":
        """What ``layers`` hold during a capture if their gradient accumulators must stay.

        None: they get new ones. A sharding reduces gradients by hooks of its own, elsewhere.
        """
        return None

    def watched_memory(self, layer: nn.Module, graphed: Sequence[nn.Module]) -> list[Watched]:
        """Parameters and buffers of ``graphed`` whose addresses the layer's graph holds.

        Called inside of :meth:`capturing`. Here all of them.
        """
        names = {id(module): f"{name}." if name else "" for name, module in layer.named_modules()}
        kinds = (("parameter", self.moved), ("buffer", REPLACED))
        return [
            Watched(tensor, f"{kind} {names[id(module)]}{name}", moved)
            for module in graphed
            for kind, moved in kinds
            for name, tensor in getattr(module, f"named_{kind}s")(recurse=False)
        ]

    def gradients(self) -> Iterator[tuple[str, Any]]:
        """What the optimizer gets for each parameter, if anything, the last parameter first.

        All ranks call it, behind the last backward pass of a step.
        """
        for name, parameter in reversed(list(self.network.named_parameters())):
            for attribute in ("grad", "decoupled_grad"):
                yield name, getattr(parameter, attribute, None)

    def gradient_owners(self) -> Iterable[tuple[Any, str]]:
        """What may hold a gradient between steps besides modules' parameters: object, attribute."""
        return ()

    def states_kept(self, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Restore what a pass without hooks through ``modules`` changes in the sharding."""
        return nullcontext()

    def prepare_backward(self, layer: nn.Module) -> bool:
        """Let weights of a unit in its forward pass hold what its backward pass reads, if they can.

        Returns whether they do. Issues no collective.
        """
        return not any(map(is_quantized, layer.parameters()))

    def _of_user(self, module: nn.Module) -> Iterator[HookRecord]:
        return (record for record in module_hooks(module) if not self.owns_hook(record.fn))
