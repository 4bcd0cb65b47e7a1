"""torch's FSDP2 (``fully_shard``) as a way of sharding, and memory for it that stays in place.

FSDP2 gathers a unit into memory that the allocator gives it, and frees that memory when it reshards
the unit. A graph needs the same addresses in each step.

Note [One buffer for many units]
    While graphs exist, units with equal parameters share one buffer that is never freed. This is
    safe because FSDP2 fills it late: a prefetch gathers into a collective's own memory, and
    ``wait_for_unshard`` copies from there on the stream that computes (torch 2.11
    to 2.15, ``foreach_all_gather_copy_out``). By then the unit that had the buffer before has been
    resharded, and its kernels are earlier on the same stream. So the buffers take the memory of one
    unit of each kind. A unit has a buffer of its own if it stayed unsharded beside another one in
    the steps before capture.

Note [A buffer in use]
    A unit may be gathered while another one is still unsharded in the same buffer, since resharding
    was turned off after capture, or the user unsharded it ahead. If the other unit is idle, it is
    resharded: FSDP2 gathers it again before it is used. All ranks do so alike. If it is inside of a
    forward or backward pass, both would compute with the same memory, so this is an error. A unit
    never moves to other memory: autograd may have saved views of its weights. A forward pass that
    is not over when that of another unit begins has ended by an exception, since no unit is in
    another.

Note [Sharded modules in a unit]
    ``fully_shard`` may have been called on modules in a unit too, such as the experts of an MoE
    block, which have another mesh. Their hooks would not run in a replay. So while graphs exist,
    they run around the unit, in eager passes too: all of the unit's weights are gathered before its
    forward and its backward pass, and reduced after it. The casts of a mixed precision policy would
    then happen in another place, so they are refused.

Note [Gradients of another dtype]
    Torch 2.15 sums the gradients of a weight's uses in ``reduce_dtype`` only in passes that begin
    an accumulation without a reduction. Graphs do as the others; ``sums.py`` refuses more uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from megatron_cg.errors import BufferInUseError, Violation
from megatron_cg.fsdp.sharding import PerModule, lies_in
from megatron_cg.replay.dtensors import local
from megatron_cg.upstream.patch import Undo, all_of, put_over
from megatron_cg.upstream.symbols import Symbol, changed

_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"
_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState"
_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
RELIES_ON = (
    Symbol(f"{_GROUP}.wait_for_unshard", "what copies gathered parameters out"),
    Symbol(f"{_GROUP}._to_sharded", "what frees them"),
    Symbol(f"{_GROUP}.is_unsharded", "whether they are there"),
    Symbol(f"{_STATE}.init", "what hooks a module"),
    Symbol(f"{_STATE}._pre_forward", "what gathers before a forward pass"),
    Symbol(f"{_STATE}._post_forward", "what reshards after it"),
    Symbol(f"{_PARAM}._setattr_on_modules", "what sets it", parameters=("param",)),
    Symbol(f"{_PARAM}.free_unsharded_param", "what frees one of them"),
    Symbol(f"{_PARAM}.init_all_gather_outputs", "what allocates one of them"),
)


class FullyShard(PerModule):
    """See :class:`megatron_cg.fsdp.sharding.PerModule`.

    No hook of FSDP2 matters in a capture: it removes all hooks of units, and no other hooks are
    left in them; see Note [Sharded modules in a unit].
    """

    name = "FSDP2"
    varies_sums = hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes")
    moved = (
        "The memory of a unit under fully_shard moved after capture. Keep its parameters in place, "
        "or delete the graphs first and capture again."
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._at_once: set[Any] = set()

    def refusals_of(self, name: str, module: nn.Module) -> Iterator[Violation]:
        """Units without parameters of their own, or whose parameters are of an unknown kind."""
        if _own_parameters(module):
            for each in sharded_in(module):
                yield from _unknown_parameters(name, each)
                if each is not module:
                    yield from _unknown_policy(name, module, each)
                    yield from self.elsewhere(name, module, each)
            return
        yield Violation(
            "fsdp2-no-parameters",
            f"unit {name} is a {type(module).__name__} without parameters of its own",
            "fully_shard gathers nothing for it",
            "leave the unit out of units, or name the modules in it that have parameters",
        )

    def is_distributed(self, module: nn.Module) -> bool:
        """As after ``parallelize_module``: what FSDP2 gathers is a DTensor then."""
        return any(param.is_dtensor for group in groups_of(module) for param in group.fsdp_params)

    def is_unit(self, module: nn.Module) -> bool:
        return isinstance(module, FSDPModule)

    def made(self, hook: Callable[..., Any]) -> bool:
        """Whether it is one of the two hooks of a ``fully_shard`` call."""
        return isinstance(getattr(hook, "__self__", None), FSDPState)

    moves = made

    def observe_step(self, units: Collection[nn.Module]) -> Callable[[], None]:
        """Learn which units are unsharded at the same time; they get buffers of their own.

        Examples are ``set_reshard_after_backward(False)``, which users call for all microbatches
        but the last one, and units whose inputs need no gradient, which FSDP2 reshards at the end
        of the backward pass.
        """
        groups = {unit: groups_of(unit) for unit in units}

        def gathered(group: Any, unit: nn.Module, wait: Callable[[], None]) -> None:
            if group._all_gather_result is not None:
                others = (one for other in groups if other is not unit for one in groups[other])
                self._at_once.update(one for one in others if one.is_unsharded)
            wait()

        return all_of(
            put_over(group, "wait_for_unshard", partial(gathered, group, u, group.wait_for_unshard))
            for u, own in groups.items()
            for group in own
        )

    def in_buffers(self, layer: nn.Module, buffers: dict[Any, Any]) -> Iterator[Undo]:
        """See Note [One buffer for many units]."""
        yield from _hooks_around(layer)
        for number, group in enumerate(groups_of(layer)):
            group._to_sharded()
            layout = tuple(
                (output.numel(), output.dtype, output.device)
                for param in group.fsdp_params
                for output in param.all_gather_outputs
            )
            owner = (number, layout, id(group) if group in self._at_once else None)
            if owner not in buffers:
                buffers[owner] = _Buffer(group)
            yield from _in_buffer(group, buffers[owner])

    def fill(self, layer: Any) -> None:
        for module in sharded_in(layer):
            module.unshard()
        for group in groups_of(layer):
            group._to_sharded()
        self.hold(layer, sharded=False)

    def hold(self, layer: nn.Module, *, sharded: bool) -> None:
        for param in (param for group in groups_of(layer) for param in group.fsdp_params):
            param._setattr_on_modules(param.sharded_param if sharded else param._unsharded_param)
            if self.varies_sums:  # See Note [Gradients of another dtype].
                param._unsharded_param.grad_dtype = param.unsharded_grad_dtype if sharded else None


def _own_parameters(module: nn.Module) -> bool:
    """Whether a parameter of ``module`` is in no other module in it that was sharded."""
    others = {parameter for each in sharded_in(module)[1:] for parameter in each.parameters()}
    return any(parameter not in others for parameter in module.parameters())


def _unknown_policy(name: str, unit: nn.Module, module: Any) -> Iterator[Violation]:
    """See Note [Sharded modules in a unit]."""
    policy = module._get_fsdp_state()._mp_policy
    path = next(path for path, each in unit.named_modules() if each is module)
    casts = policy.cast_forward_inputs and policy.param_dtype is not None
    if casts or policy.output_dtype is not None:
        yield Violation(
            "fsdp2-casts-inside",
            f"fully_shard was called on {path} in unit {name} with a policy that casts its "
            f"{'inputs' if casts else 'outputs'}",
            "hooks of fully_shard inside a unit run around the unit while there are graphs",
            f"MixedPrecisionPolicy(..., cast_forward_inputs=False) without output_dtype for "
            f"{path}, and cast in its forward",
        )


def _unknown_parameters(name: str, module: nn.Module) -> Iterator[Violation]:
    groups = own_groups(module)
    if groups and len(groups[0].modules) > 1:
        yield Violation(
            "fsdp2-group-of-modules",
            f"unit {name} is one of {len(groups[0].modules)} modules of one fully_shard call",
            "they are gathered with the first and freed with the last of them",
            "call fully_shard on each of them",
        )
    params = [param for group in groups for param in group.fsdp_params]
    for param in params:
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


def sharded_in(module: nn.Module) -> list[Any]:
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def own_groups(module: Any) -> list[Any]:
    """The groups of one ``fully_shard`` call; torch 2.12 and later may have one for each mesh.

    Raises UpstreamChangedError if FSDP2 keeps them elsewhere.
    """
    kept = vars(module._get_fsdp_state())
    if not kept.keys() & {"_fsdp_param_group", "_fsdp_param_groups"}:
        raise changed("torch", "FSDPState._fsdp_param_groups", "what one fully_shard call shards")
    groups = kept.get("_fsdp_param_groups", [kept.get("_fsdp_param_group")])
    return [group for group in groups if group is not None]


def groups_of(layer: nn.Module) -> list[Any]:
    return [group for module in sharded_in(layer) for group in own_groups(module)]


def _hooks_around(layer: nn.Module) -> Iterator[Undo]:
    """Move hooks of FSDP2 to the unit; see Note [Sharded modules in a unit]."""
    for module in sharded_in(layer)[1:]:
        state = module._get_fsdp_state()
        yield partial(_hook, state, module)
        _hook(state, layer)


def _hook(state: Any, module: nn.Module) -> None:
    """Run the hooks of one ``fully_shard`` call around ``module``, as ``FSDPState.init`` does."""
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = module.register_forward_pre_hook(
        state._pre_forward, prepend=True, with_kwargs=True
    )
    state._post_forward_hook_handle = module.register_forward_hook(state._post_forward)


class _Buffer:
    """Memory for the unsharded parameters of one unit at a time."""

    def __init__(self, group: Any) -> None:
        self.holder = group
        self.storages = [
            [torch.empty_like(output).untyped_storage() for output in param.all_gather_outputs]
            for param in group.fsdp_params
        ]


def _in_buffer(group: Any, buffer: _Buffer) -> Iterator[Undo]:
    for param, storages in zip(group.fsdp_params, buffer.storages, strict=True):
        _point(param, storages)
    yield partial(_release, group)
    for param in group.fsdp_params:
        yield put_over(param, "free_unsharded_param", _keep)
    wait = partial(_wait, group, buffer, group.wait_for_unshard)
    yield put_over(group, "wait_for_unshard", wait)


def _wait(group: Any, buffer: _Buffer, wait: Callable[[], None]) -> None:
    """Copy gathered parameters out; see Note [A buffer in use].

    Raises BufferInUseError.
    """
    if group._all_gather_result is not None:
        holder = buffer.holder
        if holder is not group and holder.is_unsharded:
            _require_idle(holder, group)
            holder._to_sharded()
        buffer.holder = group
    wait()


def _require_idle(holder: Any, group: Any) -> None:
    state = holder._training_state
    ended = state is TrainingState.FORWARD is group._training_state
    if ended or state in (TrainingState.IDLE, TrainingState.POST_BACKWARD):
        return
    raise BufferInUseError(
        f"FSDP2 gathers {group._module_fqn} while {holder._module_fqn} is inside of its "
        f"{'forward' if state is TrainingState.FORWARD else 'backward'} pass, and both share one "
        "buffer while there are graphs. In the steps before capture they were never unsharded at "
        "the same time. Run the model then as it runs later (more warmup_steps, or graph_units "
        "after the change). If a pass ended by an exception, call the model's reset_iter_state()."
    )


def _keep() -> None:
    """Free nothing."""


def _point(param: Any, storages: Sequence[torch.UntypedStorage]) -> None:
    """Make one parameter lie in other memory, as the same ``nn.Parameter``."""
    pairs = zip(param.all_gather_outputs, storages, strict=True)
    param.all_gather_outputs = [lies_in(old, storage) for old, storage in pairs]
    unsharded: torch.Tensor = local(param._unsharded_param)
    unsharded.data = torch.as_strided(
        param.all_gather_outputs[0], unsharded.size(), unsharded.stride(), storage_offset=0
    )


def _release(group: Any) -> None:
    """Reshard and give each parameter memory of its own again, which is freed until the gather."""
    group._to_sharded()
    for param in group.fsdp_params:
        _point(param, [torch.empty_like(o).untyped_storage() for o in param.all_gather_outputs])
        param.free_unsharded_param()
