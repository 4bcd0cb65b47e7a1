"""torch's FSDP2 (``fully_shard``) as a way of sharding, and memory for it that stays in place.

Note [One buffer for many units]
    While graphs exist, units with equal parameters share one buffer that is never freed. This is
    safe because FSDP2 fills it late: a prefetch gathers into a collective's own memory, and
    ``wait_for_unshard`` copies from there on the stream that computes (torch 2.11
    to 2.15, ``foreach_all_gather_copy_out``). By then the unit that had the buffer before has been
    resharded, and its kernels are earlier on the same stream. So the buffers take the memory of one
    unit of each kind. A unit has a buffer of its own if it stayed unsharded beside another one in
    the steps before capture.

Note [The earlier unit lies elsewhere]
    A unit that the user unshards outside of its passes is gathered into memory of its own, where it
    stays as long as the user holds it. Its next pass copies it into the buffer, since graphs and
    the views that autograd has saved have that address. If another unit is still unsharded there,
    since resharding was turned off, that one is copied to memory of its own, as it is in eager
    training. If it is inside of a forward or backward pass, both would compute with the same
    memory, so this is an error. A forward pass that is not over when that of another unit begins
    has ended by an exception, since no unit is in another.

Note [Gradients of another dtype]
    Torch 2.15 sums the gradients of a weight's uses in ``reduce_dtype`` only in passes that begin
    an accumulation without a reduction. Graphs do as the others; ``sums.py`` refuses more uses.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from megatron_cg.errors import BufferInUseError, HookError, Violation
from megatron_cg.fully_shard.per_module import Buffer, PerModule, Place, Storages, lies_in
from megatron_cg.replay.borders import local
from megatron_cg.upstream.patch import Undo, combined_undo, replace_function
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
    """See :class:`megatron_cg.fully_shard.per_module.PerModule`.

    No hook of FSDP2 matters in a capture: it removes all hooks of units, and none are in them.
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
        self._places: dict[Any, _Place] = {}
        """By group."""

    def refusals_of(self, name: str, module: nn.Module) -> Iterator[Violation]:
        """Units with sharded modules in them, without parameters, or with some of unknown kinds."""
        groups = own_groups(module)
        if groups and len(groups[0].modules) > 1:
            yield Violation(
                "fsdp2-group-of-modules",
                f"unit {name} is one of {len(groups[0].modules)} modules of one fully_shard call",
                "they are gathered with the first and freed with the last of them",
                "call fully_shard on each of them",
            )
        for param in (param for group in groups for param in group.fsdp_params):
            local = param.sharded_param.to_local()
            if hasattr(local, "fsdp_pre_all_gather"):
                child = param._module_info.param_name
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
                break
        paths = [path for path, each in module.named_modules() if self.is_unit(each)]
        if len(paths) > 1:
            yield Violation(
                "fsdp2-sharded-inside",
                f"fully_shard was called on {paths[1]} in unit {name} too",
                "hooks of fully_shard inside a unit do not run in a replay",
                "call it on the unit alone, or name the modules in it as units",
            )
        elif not groups:
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

    def owns_hook(self, hook: Callable[..., Any]) -> bool:
        """Whether it is one of the two hooks of a ``fully_shard`` call."""
        return isinstance(getattr(hook, "__self__", None), FSDPState)

    @combined_undo
    def observe_step(self, units: Collection[nn.Module]) -> Iterator[Undo]:
        """Learn which units are unsharded at the same time; they get buffers of their own.

        Examples are ``set_reshard_after_backward(False)`` for all microbatches but the last, and
        units whose inputs need no gradient: FSDP2 reshards them as the backward pass ends.
        """
        groups = {unit: own_groups(unit) for unit in units}

        def gathered(group: Any, unit: nn.Module, wait: Callable[[], None]) -> None:
            if group._all_gather_result is not None:
                others = (one for other in groups if other is not unit for one in groups[other])
                self._at_once.update(one for one in others if one.is_unsharded)
            wait()

        for group, unit in [(group, unit) for unit, own in groups.items() for group in own]:
            wait = partial(gathered, group, unit, group.wait_for_unshard)
            yield replace_function(group, "wait_for_unshard", wait)

    def gradient_owners(self) -> Iterator[tuple[Any, str]]:
        """Unsharded parameters: gradients that no hook has reduced stay there for the next step."""
        for param in (p for group in groups_of(self.network) for p in group.fsdp_params):
            # Later torch asks the parameter for it.
            if "unsharded_accumulated_grad" in vars(param):
                yield param, "unsharded_accumulated_grad"
            if hasattr(param, "_unsharded_param"):  # Not before its first all-gather.
                yield param._unsharded_param, "grad"

    def in_buffers(
        self, layer: nn.Module, place: int, buffers: dict[Any, Buffer]
    ) -> Iterator[Undo]:
        """See Note [One buffer for many units]."""
        _require_reduced(layer)
        for number, group in enumerate(own_groups(layer)):
            owner = (number, id(group) if group in self._at_once else None)
            self._places[group] = _Place(group, buffers, owner)
            yield from self._places[group].taken()

    @contextmanager
    def capturing(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """See :class:`PerModule`. Units that the user holds unsharded are so again after it."""
        with ExitStack() as stack:
            for group in (group for layer in layers for group in own_groups(layer)):
                if group.is_unsharded:
                    stack.callback(self._places[group].held_again())
            stack.enter_context(super().capturing(layers))
            yield

    def fill(self, layer: Any) -> None:
        layer.unshard()
        for group in own_groups(layer):
            self._places[group].enter()
            group._to_sharded()
        self.hold(layer, sharded=False)

    def hold(self, layer: nn.Module, *, sharded: bool) -> None:
        for param in (param for group in own_groups(layer) for param in group.fsdp_params):
            param._setattr_on_modules(param.sharded_param if sharded else param._unsharded_param)
            if self.varies_sums:  # See Note [Gradients of another dtype].
                param._unsharded_param.grad_dtype = param.unsharded_grad_dtype if sharded else None


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
    sharded = (module for module in layer.modules() if isinstance(module, FSDPModule))
    return [group for module in sharded for group in own_groups(module)]


def _require_reduced(layer: nn.Module) -> None:
    """Raise HookError if a gradient has come that FSDP2 did not reduce with the others."""
    reduced = (group for group in own_groups(layer) if group.reduce_grads)
    for param in (param for group in reduced for param in group.fsdp_params):
        if param._unsharded_param.grad is not None:
            raise HookError(
                f"The gradient of {param._param_fqn} came when FSDP2 had reduced the others of its "
                "unit, so eager training has it a step late. Autograd on a GPU runs late what "
                "torch.autograd.grad(..., create_graph=True) in a forward pass has made. Call "
                "fully_shard on a module around the unit alone."
            )


class _Place(Place):
    """Each parameter has one output of the all-gather: extensions, with more, are refused."""

    @property
    def has_values(self) -> bool:
        return bool(self.group.is_unsharded)

    def memory(self) -> list[torch.Tensor]:
        return [param.all_gather_outputs[0] for param in self.group.fsdp_params]

    def move(self, storages: Storages) -> None:
        for param, own, before in zip(self.group.fsdp_params, storages, self.memory(), strict=True):
            _point(param, own)
            if self.has_values:
                param.all_gather_outputs[0].copy_(before)

    def released(self) -> None:
        if not (self.has_values and self.aside):
            self.step_aside()
        for param in () if self.has_values else self.group.fsdp_params:
            param.free_unsharded_param()

    def functions_replaced(self) -> Iterator[Undo]:
        for param, own in zip(self.group.fsdp_params, self.buffer.storages, strict=True):
            yield replace_function(param, "free_unsharded_param", partial(self._free, param, own))
        wait = partial(self._wait, self.group.wait_for_unshard)
        yield replace_function(self.group, "wait_for_unshard", wait)

    def to_move(self, holder: Place) -> Place:
        """The other; see Note [The earlier unit lies elsewhere]."""
        state = holder.group._training_state
        ended = state is TrainingState.FORWARD is self.group._training_state
        if ended or state in _OUTSIDE:
            return holder
        raise BufferInUseError(
            f"FSDP2 gathers {self.group._module_fqn} while {holder.group._module_fqn} is inside of "
            f"its {'forward' if state is TrainingState.FORWARD else 'backward'} pass, and both "
            "share one buffer while there are graphs. In the steps before capture they were never "
            "unsharded at the same time. Run the model then as it runs later (more warmup_steps, "
            "or graph_units after the change). If a pass ended by an exception, call the model's "
            "reset_iter_state()."
        )

    def held_again(self) -> Callable[[], None]:
        """Reshard the group; the returned function gives back to its user what was there."""
        kept = [output.untyped_storage() for output in self.memory()]
        self.group._to_sharded()

        def again() -> None:
            self.move(kept)
            self.aside = True
            self.group._to_unsharded()

        return again

    def _wait(self, wait: Callable[[], None]) -> None:
        gathers = self.group._all_gather_result is not None
        if self.group._training_state in _OUTSIDE:
            if gathers and self.buffer.places > 1:
                self.step_aside()
        elif gathers or self.aside:
            self.enter()
        wait()

    def _free(self, param: Any, storage: torch.UntypedStorage) -> None:
        self.leave()
        if self.aside:
            _point(param, storage)


_OUTSIDE = (TrainingState.IDLE, TrainingState.POST_BACKWARD)


def _point(param: Any, storage: torch.UntypedStorage) -> None:
    """Make one parameter lie in other memory, as the same ``nn.Parameter``."""
    with torch.inference_mode(False):
        gathered = lies_in(param.all_gather_outputs[0], storage)
        param.all_gather_outputs = [gathered]
        unsharded: torch.Tensor = local(param._unsharded_param)
        unsharded.data = gathered.as_strided(unsharded.size(), unsharded.stride(), 0)
