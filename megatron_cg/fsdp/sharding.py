"""What a capture has to know about how a model is sharded.

Each way of sharding is a :class:`Sharding`, in a file of its own. ``find_sharding.py`` finds the
one of a model.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from megatron_cg.errors import Violation
from megatron_cg.fsdp.buffers import Buffer
from megatron_cg.fsdp.roles import CAPTURE_TIME_KEYS, UnitHooks, check_hook_of_unit, never_called
from megatron_cg.hooks import HookKind, HookRecord, is_idle, module_hooks
from megatron_cg.replay.borders import exchanges
from megatron_cg.replay.guard import Watched, is_quantized
from megatron_cg.replay.unit import Unit
from megatron_cg.upstream.patch import Undo, combine_undos

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

    def observe_step(self, units: Collection[nn.Module]) -> Callable[[], None]:
        """Learn from a step before capture, until the returned function is called."""
        return lambda: None

    def stable_memory(self, layers: Sequence[nn.Module]) -> Callable[[], None]:
        """Make unsharded parameters of ``layers`` keep their addresses; returns the undo.

        Called between two steps, on all ranks. Issues no collective.
        """
        return lambda: None

    def capturing(self, layers: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Inside the block, ``layers`` hold unsharded parameters, and hooks can be called alone.

        Issues no collective on entry.
        """
        return nullcontext()

    def may_renew_accumulators(self, layers: Sequence[nn.Module]) -> bool:
        """Whether parameters of ``layers`` may get new gradient accumulators for a capture.

        Otherwise modules hold other leaves meanwhile; see ``capture/guarded_capture.py``. A
        sharding reduces gradients by hooks of its own, elsewhere.
        """
        return True

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


class PerModule(Sharding):
    """The sharding of a model on whose modules ``fully_shard`` was called, one after another.

    Note [Hooks of fully_shard stay where they are]
        FSDP2 and Megatron-FSDP v2 hook the call of a module, the autograd graph around it and its
        parameters, and a replay replaces ``forward`` alone. So in training their hooks gather,
        prefetch, free and reduce around a replay as around an eager pass. Only the capture calls
        units without hooks. It computes with synthetic inputs, but with real weights, of this unit
        or of one that shares its buffer.

    Note [Unsharded parameters for the whole capture]
        Between two steps a module holds its sharded parameters. A backend reads the list of a
        unit's parameters before the first hook runs, and the guards read it after the last one. So
        modules hold the unsharded ones for the whole capture.

    Note [Sharded modules in a unit]
        ``fully_shard`` may have been called on modules in a unit too, such as the experts of an MoE
        block, which may have another mesh. Their hooks would not run in a replay. So while graphs
        exist, they run around the unit, in eager passes too: all of the unit's weights are gathered
        before its forward and its backward pass, and reduced after it.
    """

    def __init__(self, model: nn.Module) -> None:
        sharded = [module for module in model.modules() if self.is_unit(module)]
        below = set(sharded[0].modules())
        self.wrapped = self.network = sharded[0] if below.issuperset(sharded) else model

    def refusals(self, units: Mapping[str, nn.Module]) -> Iterable[Violation]:
        """Units that ``fully_shard`` was not called on, and :meth:`refusals_of` the others."""
        for name, module in units.items():
            if self.is_unit(module):
                yield from self.refusals_of(name, module)
                continue
            yield Violation(
                "no-fsdp-unit",
                f"unit {name} is a {type(module).__name__} without fully_shard of its own",
                "its parameters are gathered and freed with those of a module around it, into "
                "memory that moves",
                "call fully_shard on it before the module around it, or name the module that "
                "fully_shard was called on",
            )

    def refusals_of(self, name: str, module: nn.Module) -> Iterable[Violation]:
        """Why the memory of a sharded module cannot be kept."""
        raise NotImplementedError

    def elsewhere(self, name: str, unit: nn.Module, module: nn.Module) -> Iterator[Violation]:
        """``module``, sharded in a unit, is elsewhere too, where nobody would gather it."""
        paths = list(self.network.named_modules(remove_duplicate=False))
        within = tuple(path and f"{path}." for path, each in paths if each is unit)
        for path, each in paths:
            if each is module and not path.startswith(within):
                yield Violation(
                    "shared-module",
                    f"fully_shard was called on {path}, which is in unit {name} too",
                    "hooks of fully_shard inside a unit run around the unit while there are graphs",
                    f"leave unit {name} out of units, or do not call fully_shard on {path} itself",
                )

    def hoists_hook(self, hook: Callable[..., Any]) -> bool:
        return self.owns_hook(hook)

    def hooks_around(self, unit: nn.Module, module: nn.Module, *, prepend: bool) -> Iterator[Undo]:
        """Run hooks around the unit; see Note [Sharded modules in a unit].

        ``prepend`` says that those before a forward pass run before the unit's own.
        """
        records = [record for record in module_hooks(module) if self.owns_hook(record.fn)]
        for record in records:
            registry = getattr(module, record.kind.value)
            undo = partial(_put_back, registry, [*registry], record)
            del registry[record.hook_id]
            yield undo
        register: dict[HookKind, Callable[..., Any]] = {
            HookKind.FORWARD: unit.register_forward_hook,
            HookKind.BACKWARD_PRE: unit.register_full_backward_pre_hook,
            HookKind.BACKWARD: unit.register_full_backward_hook,
        }
        for record in records:

            def around(_unit: nn.Module, *values: Any, fn: Any = record.fn) -> Any:
                return fn(module, *values)

            if record.kind is HookKind.FORWARD_PRE:
                keywords = record.hook_id in module._forward_pre_hooks_with_kwargs
                register[record.kind] = partial(
                    unit.register_forward_pre_hook, prepend=prepend, with_kwargs=keywords
                )
            yield register[record.kind](around).remove

    def in_buffers(self, layer: nn.Module, buffers: dict[Any, Buffer]) -> Iterator[Undo]:
        """Reshard a unit and put its unsharded parameters into buffers, each by its key."""
        raise NotImplementedError

    def stable_memory(self, layers: Sequence[nn.Module]) -> Undo:
        """Let units share buffers that are not freed. They must have run at least once."""
        buffers: dict[Any, Buffer] = {}
        return combine_undos(undo for layer in layers for undo in self.in_buffers(layer, buffers))

    def fill(self, layer: nn.Module) -> None:
        """Gather a unit into its buffer, where its weights stay until others need the buffer."""
        raise NotImplementedError

    def hold(self, layer: nn.Module, *, sharded: bool) -> None:
        """Set the layer's sharded or its unsharded parameters on its modules."""
        raise NotImplementedError

    def unit_hooks(self, unit: Unit) -> UnitHooks:
        """Before each forward pass of the capture, gather the unit's weights."""
        hooks = super().unit_hooks(unit)
        hooks.capture_time["forward_pre_hooks"][0] = self.fill
        return hooks

    @contextmanager
    def capturing(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """See Note [Unsharded parameters for the whole capture]."""
        with ExitStack() as stack:
            for layer in layers:
                stack.callback(self.hold, layer, sharded=True)
                self.hold(layer, sharded=False)
            yield


def _put_back(registry: dict[int, Any], order: Sequence[int], record: HookRecord) -> None:
    """Add a hook in its place in this order of ids; handles refer to the registry itself."""
    hooks = {**registry, record.hook_id: record.fn}
    registry.clear()
    registry.update({key: hooks.pop(key) for key in order if key in hooks})
    registry.update(hooks)
