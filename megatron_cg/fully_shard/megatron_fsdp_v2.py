"""Megatron-FSDP v2 (``megatron_fsdp.experimental``) as a way of sharding, in memory that stays.

Megatron-FSDP v2 gathers the parameters of a module into a buffer whose storage it grows before each
gather, and shrinks to nothing when the module is resharded.

Note [Two buffers for many units]
    A module prefetches the next one: the gather of the next writes while this one computes, and it
    writes into the very buffer that the next will read. So neighbours in the order of prefetching
    need different buffers, and two are enough for any number of units with equal parameters. While
    graphs exist, such units alternate between two that are never freed. Graphs therefore add the
    parameters of two units of each shape. v2 itself holds two units at a time while it prefetches.
    A unit waits for the one that had the buffer before: resharding makes the stream of gathers wait
    for the stream that computes (megatron-fsdp 0.6.1, ``FsdpModule._reshard_parameter_groups``).
    Modules below different roots gather on different streams, so they share no buffer. Megatron's
    model has modules of its own in that order: a unit's place is that among the units.

Note [The later unit lies elsewhere]
    If a unit is gathered while another one still holds its buffer, it gets other memory. With v2's
    own hooks this happens only if units run in another order than at capture. In a backward pass it
    is an error: autograd may have saved views of the unit's weights, and they do not move with it.

Note [Modules of a unit are reduced in one order]
    v2 reduces a module when its last gradient is there. A replay gives all of a unit at once, an
    eager pass one after another. So a rank that runs eagerly alone would reduce the modules of a
    unit in another order. While graphs exist, they wait for each other; if one does not get all its
    gradients, until the end of the backward pass.

Note [Replicated parameters]
    With ZeRO-1 and ZeRO-2, of megatron-core 0.20 alone, a group is gathered once a step, into a
    buffer that is new in each. While graphs exist it is gathered into the same one.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_cg.errors import BufferInUseError, ConfigurationError, Violation
from megatron_cg.fsdp.roles import UnitHooks, fsdp_package_of, fsdp_v2, unsharded_parameters
from megatron_cg.fsdp.sharding import is_sharded_by_v2 as is_sharded
from megatron_cg.fully_shard.per_module import Buffer, PerModule, Place, Storages, lies_in
from megatron_cg.replay.borders import in_backward_pass
from megatron_cg.replay.unit import Unit
from megatron_cg.upstream.patch import Undo, replace_function, wrap_method

RELIES_ON = (
    *fsdp_v2(
        "module:FsdpModule",
        "a sharded module",
        *("_parameter_groups", "_context", "_unshard_event", "name", "_reshard_parameter_groups"),
        *("_num_trainable_parameters", "pre_forward", "post_backward"),
    ),
    *fsdp_v2(
        "module:FsdpContext",
        "what the modules below one root share",
        *("forward_order", "allgather_stream", "reduce_scatter_stream", "current_stream"),
    ),
    *fsdp_v2(
        "parameter_group:FsdpParameterGroup",
        "parameters that are gathered together",
        *("_symm_mem_pool", "unsharded_parameters|fsdp_parameters", "_unsharded_model_weight"),
        *("unshard_parameters", "release_unsharded_storage"),
        *("_switch_to_unsharded_parameters", "_switch_to_sharded_parameters"),
    ),
    *fsdp_v2(
        "dbuffer:DBuffer",
        "memory of a group",
        *("local_buffer", "get_local_tensor", "reallocate_storage", "release_storage"),
    ),
)


class MegatronFsdpV2(PerModule):
    name = "Megatron-FSDP v2"
    counts_gradients = True
    moved = (
        "The memory of a unit under Megatron-FSDP v2 moved after capture. Either its parameters "
        "were replaced, or it was gathered while another unit still had its buffer. Call units in "
        "the order in which they ran at capture, which must be that of their registration."
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.groups = [g for each in filter(is_sharded, model.modules()) for g in _groups(each)]
        self._together: dict[nn.Module, list[nn.Module]] = {}

    def refusals_of(self, name: str, module: nn.Module) -> Iterator[Violation]:
        """A unit in symmetric memory, or with modules that run elsewhere too."""
        for each in filter(is_sharded, module.modules()):
            if each is not module:
                yield from self.elsewhere(name, module, each)
        if any(group._symm_mem_pool is not None for group in _groups(module)):
            yield Violation(
                "fsdp-v2-symmetric-memory",
                f"unit {name} was sharded with use_symm_mem=True",
                "it is gathered into symmetric memory, which has not been tried with graphs",
                "fully_shard(..., use_symm_mem=False), or leave the unit out of units",
            )

    def is_unit(self, module: nn.Module) -> bool:
        return is_sharded(module)

    def owns_hook(self, hook: Callable[..., Any]) -> bool:
        return fsdp_package_of(hook) is not None

    def unit_hooks(self, unit: Unit) -> UnitHooks:
        """See :class:`PerModule`. From now on the unit has the sharded modules in its graph."""
        sharded = (unit.layer, *filter(is_sharded, unit.graphed))
        self._together[unit.layer] = [*dict.fromkeys(sharded)]  # The layer may be in both.
        return super().unit_hooks(unit)

    def stable_memory(self, layers: Sequence[nn.Module]) -> Callable[[], None]:
        """See Note [Two buffers for many units].

        Raises ConfigurationError if units run in another order than that of their registration.
        """
        _require_order(layers)
        return super().stable_memory(layers)

    def in_buffers(self, layer: Any, place: int, buffers: dict[Any, Buffer]) -> Iterator[Undo]:
        for module in self._together[layer]:
            _reshard(module)
            yield partial(_reshard, module)
            if module is not layer:
                yield from self.hooks_around(layer, module)
        trained = [m for m in self._together[layer] if m._num_trainable_parameters]
        if len(trained) > 1:
            yield from _in_order(trained)
        for number, group in enumerate(self._groups_of(layer)):
            placements = getattr(group, "_model_weight_placements", None)
            if placements == group._unsharded_model_weight.placements:
                yield from _in_place(group, layer._context)
                continue
            yield from _Place(group, buffers, (id(layer._context), place % 2, number)).taken()

    def fill(self, layer: nn.Module) -> None:
        for group in self._groups_of(layer):
            group.unshard_parameters()
            group.release_unsharded_storage()

    def hold(self, layer: nn.Module, *, sharded: bool) -> None:
        for group in self._groups_of(layer):
            if sharded:
                group._switch_to_sharded_parameters()
            else:
                group._switch_to_unsharded_parameters()

    def _groups_of(self, layer: nn.Module) -> list[Any]:
        return [group for module in self._together[layer] for group in _groups(module)]


def _in_order(modules: Sequence[Any]) -> Iterator[Undo]:
    """See Note [Modules of a unit are reduced in one order]."""
    own = {module: module.post_backward for module in modules}
    ready: set[Any] = set()

    def reduce() -> None:
        whole = [function for module, function in own.items() if module in ready]
        ready.clear()
        for function in whole:
            function()

    def end_pass() -> None:
        reduce()
        context = modules[0]._context
        context.current_stream().wait_stream(context.reduce_scatter_stream)

    def end(module: Any) -> None:
        if not ready:
            torch.autograd.Variable._execution_engine.queue_callback(end_pass)
        ready.add(module)
        if len(ready) == len(own):
            reduce()

    for module in modules:
        yield replace_function(module, "post_backward", partial(end, module))
        # Where v2 begins to count the module's gradients.
        yield wrap_method(module, "pre_forward", before=partial(ready.discard, module))


def _require_order(layers: Sequence[Any]) -> None:
    # Seen with megatron-fsdp 0.6.1 on two CPU ranks. A capture would gather the units again.
    contexts = {id(layer._context): layer._context for layer in layers}
    for context in contexts.values():
        run = [layer for layer in layers if layer._context is context]
        registered = [layer for layer in context.forward_order if layer in run]
        if run != registered:
            ran, order = (", ".join(layer.name for layer in each) for each in (run, registered))
            wrong = Violation(
                "fsdp-v2-order",
                f"units run in the order {ran}, and were registered in the order {order}",
                "Megatron-FSDP v2 prefetches modules in the order of registration; a unit that is "
                "prefetched after it ran keeps old weights over the optimizer's step, without "
                "graphs too",
                "register the modules in the order in which they run",
            )
            raise ConfigurationError([wrong])


def _groups(layer: Any) -> tuple[Any, ...]:
    return tuple(layer._parameter_groups)


def _in_place(group: Any, context: Any) -> Iterator[Undo]:
    """See Note [Replicated parameters]."""
    like, placements = group.model_weight, group._model_weight_placements
    with torch.cuda.stream(context.allgather_stream):
        kept = type(like)(like.mesh, placements, like.layout.tensor_shapes, like.dtype, like.device)
    gather = group.unshard_parameters

    def unshard_parameters() -> None:
        if group.model_weight is not kept:
            group.model_weight = group.model_weight.redistribute(placements, out=kept)
        gather()

    for index, parameter in enumerate(unsharded_parameters(group)):
        parameter.data = kept.get_local_tensor(index)
    yield replace_function(group, "unshard_parameters", unshard_parameters)


def _reshard(layer: Any) -> None:
    """Reshard a module that is gathered: one that was prefetched, or whose pass was cut short.

    Its gather may still write when the buffer's memory is given back to the current stream.
    """
    if layer._unshard_event is not None:
        layer._reshard_parameter_groups()
        context = layer._context
        context.current_stream().wait_stream(context.allgather_stream)


class _Place(Place):
    def memory(self) -> list[torch.Tensor]:
        return [self.group._unsharded_model_weight.local_buffer]

    def move(self, storages: Storages) -> None:
        """See :class:`Place`. A group that moves is not gathered, so it has no values."""
        weights = self.group._unsharded_model_weight
        weights.local_buffer = lies_in(weights.local_buffer, storages[0])
        for index, parameter in enumerate(unsharded_parameters(self.group)):
            parameter.data = weights.get_local_tensor(index)

    def released(self) -> None:
        self.step_aside()
        self.group._unsharded_model_weight.release_storage()

    def functions_replaced(self) -> Iterator[Undo]:
        weights = self.group._unsharded_model_weight
        yield replace_function(weights, "release_storage", self.leave)
        yield replace_function(weights, "reallocate_storage", self.enter)

    def to_move(self, holder: Place) -> Place:
        """This one, which is not gathered yet; see Note [The later unit lies elsewhere]."""
        if not self.aside and in_backward_pass():
            raise BufferInUseError(
                "Megatron-FSDP v2 gathers a unit for its backward pass while another unit holds "
                "the buffer that both share while there are graphs. Run units in the order in "
                "which they ran at capture, and let v2 reshard each after its pass."
            )
        return self
