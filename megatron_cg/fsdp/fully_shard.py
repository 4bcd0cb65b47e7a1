"""torch's FSDP2 (``fully_shard``) as a way of sharding.

Note [FSDP2's hooks stay where they are]
    FSDP2 hooks the call of a module and the autograd graph around it, and a replay replaces
    ``forward`` alone. So in training its hooks gather, free and reduce around a replay as around an
    eager forward pass. Only the capture calls units without hooks. It computes with synthetic
    inputs, but with real weights, of this unit or of one that shares its buffer.

Note [Unsharded parameters for the whole capture]
    Between two steps a module holds its sharded parameters. A backend reads the list of a unit's
    parameters before the first hook runs, and the guards read it after the last one. So modules
    hold the unsharded ones for the whole capture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_cg.errors import Violation
from megatron_cg.fsdp.fully_shard_memory import group_of, notice_unsharded, stable_memory
from megatron_cg.fsdp.sharding import Sharding, without_fully_shard
from megatron_cg.fsdp.transform import UnitHooks
from megatron_cg.replay.unit import Unit
from megatron_cg.upstream.symbols import Symbol

_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
RELIES_ON = (
    Symbol("torch", f"{_PARAM}._setattr_on_modules", "what sets it", parameters=("param",)),
)


class FullyShard(Sharding):
    """See :class:`megatron_cg.fsdp.sharding.Sharding`.

    Args:
        root: a module with all those in it that ``fully_shard`` was called on.
    """

    name = "FSDP2"
    moved = (
        "The memory of a unit under fully_shard moved after capture. Keep its parameters in place, "
        "or delete the graphs first and capture again."
    )

    def __init__(self, root: nn.Module) -> None:
        self.wrapped = self.network = root
        self._at_once: set[Any] = set()

    def refusals(self, units: Mapping[str, nn.Module]) -> Iterator[Violation]:
        """Units that ``fully_shard`` was not called on, or whose parameters it cannot keep."""
        for name, module in units.items():
            if not self.is_unit(module):
                yield without_fully_shard(name, module)
                continue
            if not _own_parameters(module):
                yield Violation(
                    "fsdp2-no-parameters",
                    f"unit {name} is a {type(module).__name__} without parameters of its own",
                    "fully_shard gathers nothing for it",
                    "leave the unit out of units, or name the modules in it that have parameters",
                )
                continue
            yield from _unknown_parameters(name, module)

    def is_unit(self, module: nn.Module) -> bool:
        """Whether ``fully_shard`` was called on it."""
        return _is_sharded(module)

    def unit_hooks(self, unit: Unit) -> UnitHooks:
        """Before each forward pass, gather the unit's weights.

        No hook of FSDP2 matters: capture removes all hooks of units, and no unit is in another.
        """
        hooks = super().unit_hooks(unit)
        hooks.capture_time["forward_pre_hooks"][0] = _fill
        return hooks

    def observe_step(self, units: Collection[nn.Module]) -> Callable[[], None]:
        """Learn which units are unsharded at the same time; they get buffers of their own.

        Examples are ``set_reshard_after_backward(False)``, which users call for all microbatches
        but the last one, and units whose inputs need no gradient, which FSDP2 reshards at the end
        of the backward pass.
        """
        return notice_unsharded(list(map(group_of, units)), self._at_once.add)

    def stable_memory(self, layers: Sequence[nn.Module]) -> Callable[[], None]:
        """See Note [One buffer for many units] in ``fully_shard_memory.py``."""
        return stable_memory(map(group_of, layers), apart=self._at_once)

    @contextmanager
    def capturing(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """See Note [Unsharded parameters for the whole capture]."""
        with ExitStack() as stack:
            for layer in layers:
                stack.callback(_hold_sharded, layer)
                _hold_unsharded(layer)
            yield


def _fill(layer: Any) -> None:
    """Gather a unit into its buffer, where its weights stay until others need the buffer."""
    layer.unshard()
    group_of(layer)._to_sharded()
    _hold_unsharded(layer)


def _hold_unsharded(layer: nn.Module) -> None:
    for param in group_of(layer).fsdp_params:
        param._setattr_on_modules(param._unsharded_param)


def _hold_sharded(layer: nn.Module) -> None:
    for param in group_of(layer).fsdp_params:
        param._setattr_on_modules(param.sharded_param)


def _own_parameters(module: nn.Module) -> bool:
    """Whether a parameter of ``module`` is in no other module in it that was sharded."""
    inner = [each for each in module.modules() if each is not module and _is_sharded(each)]
    others = {parameter for each in inner for parameter in each.parameters()}
    return any(parameter not in others for parameter in module.parameters())


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _unknown_parameters(name: str, module: nn.Module) -> Iterator[Violation]:
    group = group_of(module)
    if len(group.modules) > 1:
        yield Violation(
            "fsdp2-group-of-modules",
            f"unit {name} is one of {len(group.modules)} modules of one fully_shard call",
            "they are gathered with the first and freed with the last of them",
            "call fully_shard on each of them",
        )
    yield from _tensor_parallel(name, group.fsdp_params)
    for param in group.fsdp_params:
        child = param._module_info.param_name
        local = param.sharded_param.to_local()
        if hasattr(local, "fsdp_pre_all_gather"):
            yield Violation(
                "fsdp2-extension",
                f"parameter {child} of unit {name} is a {type(local).__name__}",
                "it makes its unsharded parameter itself, in memory that is not known here",
                "leave the unit out of units, or shard plain parameters",
            )
        elif param.offload_to_cpu:
            yield Violation(
                "fsdp2-cpu-offload",
                f"unit {name} has CPUOffloadPolicy",
                "graphs of units with parameters on the host have not been tried",
                "fully_shard without offload_policy, or leave the unit out of units",
            )
            return


def _tensor_parallel(name: str, params: Sequence[Any]) -> Iterator[Violation]:
    """Units that another call, such as ``parallelize_module``, has made DTensors of before.

    Note [DTensor parameters]
        ``parallelize_module`` puts hooks on the modules in a unit, which turn tensors into DTensors
        and exchange them between ranks. They are part of what the unit computes, and a capture
        takes all hooks of a unit off. FSDP2 gathers the local tensor of such a parameter, so its
        buffers have another size than the parameter. And the ``data_ptr`` of a DTensor is 0 (torch
        2.11), so no guard would see that its memory has moved.
    """
    names = [one._module_info.param_name for one in params if one.is_dtensor]
    if names:
        yield Violation(
            "fsdp2-tensor-parallel",
            f"{len(names)} of {len(params)} parameters of unit {name} are DTensors under "
            f"fully_shard (the first is a {names[0]}), as parallelize_module makes them",
            "hooks on the modules inside of it exchange its tensors, and a capture takes hooks "
            "off; and a DTensor has no address that can be compared before a replay",
            "leave the unit out of units, or use tensor-parallel modules of plain tensors, such as "
            "megatron-core's",
        )
