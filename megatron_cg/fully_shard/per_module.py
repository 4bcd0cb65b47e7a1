"""What both kinds of ``fully_shard`` have in common: hooks, and buffers that keep their addresses.

FSDP2 and Megatron-FSDP v2 gather a unit into memory that they free when they reshard it. A graph
needs the same addresses in each step. So units with equal parameters share buffers that are never
freed. How many they need is up to the sharding.

Note [A buffer in use]
    If a group is gathered while another one still holds their buffer, one of the two lies in memory
    of its own, until its next gather finds the buffer free. Which one is up to the sharding, and it
    is an error if neither may move. The guard of a unit's graphs sees that its parameters moved.
    All ranks see the same.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from megatron_cg.errors import Violation
from megatron_cg.fsdp.roles import UnitHooks
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.hooks import HookKind, HookRecord, module_hooks
from megatron_cg.replay.unit import Unit
from megatron_cg.upstream.patch import Undo, combined_undo

Storages = Sequence[torch.UntypedStorage]


class Buffer:
    """Memory for the unsharded parameters of one group at a time."""

    def __init__(self, storages: Storages) -> None:
        self.storages, self.places = storages, 0
        self.holder: Place | None = None
        """The place whose parameters are there."""


class Place:
    """Where the unsharded parameters of one group lie: in a buffer, or aside.

    Groups with equal keys and memory of one layout share one of the ``buffers``. Each sharding has
    a subclass, and its functions are replaced by ones that call :meth:`enter` and :meth:`leave`.
    """

    has_values: Any = False
    """Whether the parameters have values that a move must keep."""

    def __init__(self, group: Any, buffers: dict[Any, Buffer], key: Hashable) -> None:
        self.group = group
        layout = tuple((one.numel(), one.dtype, one.device) for one in self.memory())
        if (key, layout) not in buffers:
            buffers[key, layout] = Buffer(self.allocate())
        self.buffer = buffers[key, layout]
        self.aside = self.has_values
        """Whether they are in memory of their own, if they are anywhere."""

    def memory(self) -> list[torch.Tensor]:
        """The memory of the group's unsharded parameters now."""
        raise NotImplementedError

    def allocate(self) -> Storages:
        return [torch.empty_like(one).untyped_storage() for one in self.memory()]

    def move(self, storages: Storages) -> None:
        """Make the same parameters lie in other memory, with their values if they have some."""
        raise NotImplementedError

    def released(self) -> None:
        """Give the parameters memory of their own again, which is freed if it is not in use."""
        raise NotImplementedError

    def functions_replaced(self) -> Iterator[Undo]:
        raise NotImplementedError

    def to_move(self, holder: Self) -> "Place":
        """This place or ``holder``, which has the buffer. Raises BufferInUseError for neither."""
        raise NotImplementedError

    def taken(self) -> Iterator[Undo]:
        """Use the buffer from now on."""
        self.buffer.places += 1
        if not self.aside:
            self.move(self.buffer.storages)
        yield self.released
        yield from self.functions_replaced()

    def enter(self) -> None:
        """Lie in the buffer, or aside; see Note [A buffer in use]. Raises BufferInUseError."""
        holder: Any = self.buffer.holder
        if holder not in (None, self):
            other = self.to_move(holder)
            if not other.aside:
                other.step_aside()
            if other is self:
                return
        self.buffer.holder = self
        if self.aside:
            self.move(self.buffer.storages)
            self.aside = False

    def leave(self) -> None:
        if self.buffer.holder is self:
            self.buffer.holder = None

    def step_aside(self) -> None:
        self.move(self.allocate())
        self.aside = True


def lies_in(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor like this one, in other memory from its start."""
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storage, 0, tensor.size(), tensor.stride())


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
        Megatron-FSDP v2 may have sharded modules in a unit too, such as the experts of a MoE layer,
        which have another mesh. Their hooks would not run in a replay. So while graphs exist, they
        run around the unit, in eager passes too: all of the unit's weights are gathered before its
        forward and its backward pass, and reduced after it. FSDP2's are refused.
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

    def hooks_around(self, unit: nn.Module, module: nn.Module) -> Iterator[Undo]:
        """Run hooks around the unit; see Note [Sharded modules in a unit]."""
        records = [record for record in module_hooks(module) if self.owns_hook(record.fn)]
        for record in records:
            registry = getattr(module, record.kind.value)
            undo = partial(_put_back, registry, [*registry], record)
            del registry[record.hook_id]
            yield undo
        register: dict[HookKind, Callable[..., Any]] = {
            HookKind.FORWARD_PRE: unit.register_forward_pre_hook,
            HookKind.FORWARD: unit.register_forward_hook,
            HookKind.BACKWARD_PRE: unit.register_full_backward_pre_hook,
            HookKind.BACKWARD: unit.register_full_backward_hook,
        }
        for record in records:

            def around(_unit: nn.Module, *values: Any, fn: Any = record.fn) -> Any:
                return fn(module, *values)

            yield register[record.kind](around).remove

    def in_buffers(
        self, layer: nn.Module, place: int, buffers: dict[Any, Buffer]
    ) -> Iterator[Undo]:
        """Reshard the unit at this place in the order, and put its parameters into buffers."""
        raise NotImplementedError

    @combined_undo
    def stable_memory(self, layers: Sequence[nn.Module]) -> Iterator[Undo]:
        """Let units share buffers that are not freed. They must have run at least once."""
        buffers: dict[Any, Buffer] = {}
        for place, layer in enumerate(layers):
            yield from self.in_buffers(layer, place, buffers)

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
