"""Megatron-FSDP v2 (``megatron_fsdp.experimental``) as a way of sharding.

Note [v2's hooks stay where they are]
    v2 hooks the call of a module, the gradient of its output and the gradients of its parameters,
    and a replay replaces ``forward`` alone. So in training its hooks gather, prefetch, reduce and
    reshard around a replay as around an eager pass: the graph returns each parameter's gradient to
    autograd, which fires the parameter's hook. Only the capture calls units without hooks.

Note [Unsharded parameters for the whole capture]
    As under FSDP2: between two steps a module holds sharded parameters, and a backend needs the
    others before the first hook runs.

Note [The order of registration]
    v2 prefetches modules in the order in which they were registered. If they run in another order,
    some are prefetched at the end of the backward pass and stay gathered over the optimizer's step:
    they compute with the weights of the step before, eagerly too (seen with megatron-fsdp 0.6.1 on
    two CPU ranks). A capture would gather them again, so such a model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from megatron_cg.errors import ConfigurationError, Violation
from megatron_cg.fsdp.fsdp_symbols import fsdp_v2
from megatron_cg.fsdp.megatron_fsdp_v2_memory import stable_memory
from megatron_cg.fsdp.roles import fsdp_package_of
from megatron_cg.fsdp.sharding import Sharding, without_fully_shard
from megatron_cg.fsdp.transform import UnitHooks
from megatron_cg.replay.unit import Unit

_MODULE, _GROUP = "module:FsdpModule", "parameter_group:FsdpParameterGroup"
RELIES_ON = (
    *fsdp_v2(_MODULE, "a sharded module", "_parameter_groups", "_context"),
    *fsdp_v2(f"{_MODULE}.name", "its name below the root"),
    *fsdp_v2("module:FsdpContext", "what the modules below one root share", "forward_order"),
    *fsdp_v2(_GROUP, "parameters that are gathered together", "_symm_mem_pool"),
    *fsdp_v2(f"{_GROUP}.unshard_parameters", "gathers them"),
    *fsdp_v2(f"{_GROUP}.release_unsharded_storage", "releases them"),
    *fsdp_v2(f"{_GROUP}._switch_to_unsharded_parameters", "sets them on their modules"),
    *fsdp_v2(f"{_GROUP}._switch_to_sharded_parameters", "sets the sharded ones"),
)


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` on which v2's ``fully_shard`` was called, the outermost first."""
    return [module for module in model.modules() if _is_sharded(module)]


def _is_sharded(module: nn.Module) -> bool:
    kinds: tuple[Any, ...] = type(module).__mro__
    return any(
        kind.__name__ == "FsdpModule" and fsdp_package_of(kind.__init__) is not None
        for kind in kinds
    )


class MegatronFsdpV2(Sharding):
    """See :class:`megatron_cg.fsdp.sharding.Sharding`.

    Args:
        model: a model with sharded modules.
    """

    name = "Megatron-FSDP v2"
    counts_gradients = True
    moved = (
        "The memory of a unit under Megatron-FSDP v2 moved after capture. Either its parameters "
        "were replaced, or it was gathered while another unit still had its buffer. Call units in "
        "the order in which they ran at capture, which must be that of their registration."
    )

    def __init__(self, model: nn.Module) -> None:
        sharded = sharded_modules(model)
        below = set(sharded[0].modules())
        root = sharded[0] if all(module in below for module in sharded) else model
        self.wrapped = self.network = root

    def refusals(self, units: Mapping[str, nn.Module]) -> Iterator[Violation]:
        """Units that ``fully_shard`` was not called on, or whose memory is a special one."""
        for name, module in units.items():
            if not self.is_unit(module):
                yield without_fully_shard(name, module)
            elif any(group._symm_mem_pool is not None for group in _groups(module)):
                yield Violation(
                    "fsdp-v2-symmetric-memory",
                    f"unit {name} was sharded with use_symm_mem=True",
                    "it is gathered into symmetric memory, which has not been tried with graphs",
                    "fully_shard(..., use_symm_mem=False), or leave the unit out of units",
                )

    def is_unit(self, module: nn.Module) -> bool:
        """Whether ``fully_shard`` was called on it."""
        return _is_sharded(module)

    def unit_hooks(self, unit: Unit) -> UnitHooks:
        """Before each forward pass of the capture, gather the unit's weights."""
        hooks = super().unit_hooks(unit)
        hooks.capture_time["forward_pre_hooks"][0] = _fill
        return hooks

    def made(self, hook: Callable[..., Any]) -> bool:
        """Whether Megatron-FSDP made this hook."""
        return fsdp_package_of(hook) is not None

    def stable_memory(self, layers: Sequence[nn.Module]) -> Callable[[], None]:
        """See Note [Two buffers for many units] in ``megatron_fsdp_v2_memory.py``.

        Raises ConfigurationError; see Note [The order of registration].
        """
        _require_order(layers)
        return stable_memory(layers)

    @contextmanager
    def capturing(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """See Note [Unsharded parameters for the whole capture]."""
        with ExitStack() as stack:
            for layer in layers:
                for group in _groups(layer):
                    stack.callback(group._switch_to_sharded_parameters)
                    group._switch_to_unsharded_parameters()
            yield


def _require_order(layers: Sequence[Any]) -> None:
    contexts = {id(layer._context): layer._context for layer in layers}
    for context in contexts.values():
        run = [layer for layer in layers if layer._context is context]
        registered = [layer for layer in context.forward_order if layer in run]
        if run != registered:
            raise ConfigurationError(
                [
                    Violation(
                        "fsdp-v2-order",
                        f"units run in the order {', '.join(layer.name for layer in run)}, and "
                        f"were registered in the order "
                        f"{', '.join(layer.name for layer in registered)}",
                        "Megatron-FSDP v2 prefetches modules in the order of registration; a unit "
                        "that is prefetched after it ran keeps old weights over the optimizer's "
                        "step, without graphs too",
                        "register the modules in the order in which they run",
                    )
                ]
            )


def _fill(layer: nn.Module) -> None:
    """Gather a unit into its buffer, where its weights stay until others need the buffer."""
    for group in _groups(layer):
        group.unshard_parameters()
        group.release_unsharded_storage()


def _groups(layer: Any) -> tuple[Any, ...]:
    found: tuple[Any, ...] = layer._parameter_groups
    return found
