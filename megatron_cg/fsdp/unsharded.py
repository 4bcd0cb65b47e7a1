"""Models whose parameters stay where they are: DistributedDataParallel, or no wrapper at all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_cg.errors import Violation
from megatron_cg.fsdp.transform import (
    CAPTURE_TIME_KEYS,
    UnitHooks,
    check_hook_of_unit,
    never_called,
)
from megatron_cg.hooks import HookRecord, module_hooks
from megatron_cg.replay.guard.addresses import Watched
from megatron_cg.replay.unit import Unit

_REPLACED = (
    "Something replaced or freed this memory after capture. Keep it in place, or delete the graphs "
    "first and capture again."
)


class Unsharded:
    """See :class:`megatron_cg.fsdp.sharding.Sharding`.

    Args:
        wrapped: the ``DistributedDataParallel``, or the model.
    """

    megatron_fsdp = None

    def __init__(self, wrapped: nn.Module) -> None:
        self.wrapped = wrapped
        ddp = isinstance(wrapped, DistributedDataParallel)
        self.network: nn.Module = wrapped.get_submodule("module") if ddp else wrapped
        self.name = "DistributedDataParallel" if ddp else "no sharding"
        self.renews_accumulators = not ddp

    def refusals(self, units: Mapping[str, nn.Module]) -> Iterator[Violation]:
        """None: every module can be a unit."""
        yield from ()

    def is_unit(self, module: nn.Module) -> bool:
        """No module is."""
        return False

    def unit_hooks(self, unit: Unit) -> UnitHooks:
        """None: all hooks are the user's."""
        return hooks_without_sharding(unit, self.made)

    def made(self, hook: Callable[..., object]) -> bool:
        """No hook on a module."""
        return False

    def observe_step(self, units: Collection[nn.Module]) -> Callable[[], None]:
        """Nothing to learn."""
        return lambda: None

    def stable_memory(self, layers: Sequence[nn.Module]) -> Callable[[], None]:
        """Nothing to do."""
        return lambda: None

    def capturing(self, layers: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Nothing to do: parameters are where they are."""
        return nullcontext()

    def watched_memory(self, layer: nn.Module, graphed: Sequence[nn.Module]) -> list[Watched]:
        """All parameters and buffers."""
        return watched_tensors(layer, graphed, lambda _parameter: _REPLACED)

    def states_kept(self, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Nothing to restore."""
        return nullcontext()


def watched_tensors(
    layer: nn.Module, graphed: Sequence[nn.Module], cause: Callable[[nn.Parameter], str]
) -> list[Watched]:
    """Parameters and buffers of ``graphed``; ``cause`` says why a parameter might move."""
    names = {id(module): f"{name}." if name else "" for name, module in layer.named_modules()}
    found: list[Watched] = []
    for module in graphed:
        for name, parameter in module.named_parameters(recurse=False):
            label = f"parameter {names[id(module)]}{name}"
            found.append(Watched(parameter, label, cause(parameter)))
        for name, buffer in module.named_buffers(recurse=False):
            found.append(Watched(buffer, f"buffer {names[id(module)]}{name}", _REPLACED))
    return found


def hooks_without_sharding(unit: Unit, made: Callable[[Callable[..., object]], bool]) -> UnitHooks:
    """No capture-time hooks, after a check of the user's: those that ``made`` does not know.

    Raises HookError for a hook that would not run as intended.
    """

    def of_user(module: nn.Module) -> Iterator[HookRecord]:
        return (record for record in module_hooks(module) if not made(record.fn))

    for record in of_user(unit.layer):
        check_hook_of_unit(unit.layer, record, unit.name)
    for module in unit.graphed:
        if module is not unit.layer:
            for record in of_user(module):
                raise never_called(unit.name, module, record)
    return UnitHooks({key: {} for key in CAPTURE_TIME_KEYS})


def without_fully_shard(name: str, module: nn.Module) -> Violation:
    """The violation of a unit whose parameters are gathered with those of a module around it."""
    return Violation(
        "no-fsdp-unit",
        f"unit {name} is a {type(module).__name__} without fully_shard of its own",
        "its parameters are gathered and freed with those of a module around it, into memory that "
        "moves",
        "call fully_shard on it before the module around it, or name the module that fully_shard "
        "was called on",
    )
