"""What the host does from the last backward pass of a step to the next forward pass.

The GPU is idle meanwhile, unless it still has work. Megatron walks over all parameters several
times: at the Qwen3-MoE shape on one H200, 60 of 180 ms of a step.

Note [As it was found]
    Before a forward pass Megatron-FSDP sets the raw parameters on the modules, and before the
    optimizer's step the sharded DTensors. It finds each module by its name, and assigns. Here what
    modules had before and after is kept for each of the two. If they are again as they were before,
    what they had after is written to their own dictionaries. An exchange is Megatron-FSDP's own,
    and is kept, if anything else is found: a module, a parameter, or what Megatron-FSDP has to set.
    What the other exchange found says nothing: it drops a parameter that somebody has replaced.

Note [What an assignment does]
    It calls ``register_parameter``. torch's checks the name and the kind, and runs hooks for all
    modules; while there is such a hook, each exchange is Megatron-FSDP's own. Transformer Engine's
    then remembers how to initialize a name that is new, and none is. To a module whose class has
    another one, parameters are assigned. An assignment also deletes an attribute or a buffer with
    the name, so an exchange is Megatron-FSDP's own if there is one.

Note [A vote of the hosts]
    After the backward passes, ranks vote whether one of them wants to run them again. The votes are
    added up and read on a stream of their own: on that of the passes, reading waits for them all.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module

from megatron_cg.fastpath.optimizer_step import APPLIES, APPLYING
from megatron_cg.fastpath.part import NotApplicableError, known
from megatron_cg.fsdp.roles import fsdp_class, fsdp_function
from megatron_cg.upstream.patch import Undo, combine_undos, replace_function, run_instead
from megatron_cg.upstream.symbols import Symbol

_METHODS = {
    False: "_replace_param_with_raw_if_needed",
    True: "_replace_param_with_distributed_if_needed",
}
"""By whether the modules then have the optimizer's DTensors."""
_REGISTER = "register_parameter"
_TE = "transformer_engine.pytorch.module.base"
_REGISTERS = known(
    f"{_TE}:TransformerEngineBaseModule.{_REGISTER}", "what sets parameters", "ee888dbdfc683cd3"
)
_SHARE, _EXCHANGES = "_reestablish_shared_weights", "what exchanges parameters"
REPLACES_EXCHANGE = (
    *fsdp_function(f"MegatronFSDP.{_METHODS[False]}", _EXCHANGES, "2dd6f630faf574bb"),
    *fsdp_function(f"MegatronFSDP.{_METHODS[True]}", _EXCHANGES, "d5c8b3ca8a0bcd12"),
    *fsdp_function(f"MegatronFSDP.{_SHARE}", _EXCHANGES, "5ddc7bf62b666d72"),
    *fsdp_function("_replace_module_parameter", _EXCHANGES, "0d03e4f918129cb7"),
    _REGISTERS,
)
_CLIP, _RERUN = "megatron.core.optimizer", "megatron.core.rerun_state_machine"
_SCALES = known(
    f"{_CLIP}.optimizer:clip_grad_by_total_norm_fp32", "what scales gradients", "5649d79e2c3dcbe6"
)
_KERNEL = Symbol(f"{_CLIP}.clip_grads:multi_tensor_scale_tensor_impl", "its kernel, or None")
_APPLIER = Symbol(f"{_CLIP}.clip_grads:multi_tensor_applier", "what runs its kernel")
_TO_LOCAL = known(
    f"{_CLIP}.clip_grads:to_local_if_dtensor", "a gradient's shard", "ec17e9c4d6187647"
)
REPLACES_SCALING = (_SCALES, _TO_LOCAL, APPLYING)
_VOTES = known(f"{_RERUN}:RerunStateMachine._reduce_any", "what adds up votes", "02afca39f048a959")
REPLACES_VOTE = (_VOTES,)
RELIES_ON = (
    *(*REPLACES_EXCHANGE, *REPLACES_SCALING, _KERNEL, _APPLIER, _VOTES),
    *fsdp_class("MegatronFSDP", "is_param_fsdp_distributed", "raw_param"),
    *fsdp_class("ParamAndGradBuffer", "optimizer_named_parameters"),
)


def exchange_parameters(fsdp: Any) -> Undo:
    """Exchange the parameters of ``fsdp``'s modules from what was there before; gives the undo."""
    exchange = _Exchange(fsdp)
    return combine_undos(
        replace_function(fsdp, name, partial(exchange, distributed))
        for distributed, name in _METHODS.items()
    )


class _Done(NamedTuple):
    """An exchange by Megatron-FSDP; see Note [As it was found]."""

    sets: list[Any]
    modules: list[nn.Module]
    found: list[Any]
    kinds: dict[type[nn.Module], bool]
    """The classes of modules, and whether parameters are assigned to them."""
    names: list[frozenset[str]]
    """Of each module's attributes and buffers that would be found instead, or that assign."""
    left: list[dict[str, nn.Parameter | None]]

    def again(self) -> None:
        for module, parameters in zip(self.modules, self.left, strict=True):
            if not self.kinds[type(module)]:
                module._parameters.update(parameters)
                continue
            for name, parameter in parameters.items():
                if module._parameters[name] is not parameter:
                    setattr(module, name, parameter)


class _Exchange:
    """Replaces the two methods of a ``MegatronFSDP``."""

    def __init__(self, fsdp: Any) -> None:
        self._fsdp = fsdp
        self._own = {distributed: getattr(fsdp, name) for distributed, name in _METHODS.items()}
        self._done: dict[bool, _Done] = {}

    def __call__(self, distributed: bool) -> None:
        fsdp = self._fsdp
        if fsdp.is_param_fsdp_distributed == distributed:
            return
        done = self._done.get(distributed)
        if done is not None and self._finds(done):
            fsdp.is_param_fsdp_distributed = distributed
            done.again()
            return
        self._done.pop(distributed, None)
        modules = [*fsdp.module.modules()]
        names = [frozenset((*m._modules, *m._parameters, _REGISTER)) for m in modules]
        found, usual = _in(modules), all(map(_usual, modules)) and _no_others(modules, names)
        self._own[distributed]()
        if usual and not torch_module._global_parameter_registration_hooks:
            kinds = {kind: _assigns(kind) for kind in map(type, modules)}
            left = [{**module._parameters} for module in modules]
            self._done[distributed] = _Done(self._sets(), modules, found, kinds, names, left)

    def _finds(self, done: _Done) -> bool:
        return (
            not torch_module._global_parameter_registration_hooks
            and done.modules[0] is self._fsdp.module
            and _are_same(self._sets(), done.sets)
            and _are_same(_in(done.modules), done.found)
            and all(assigns == _assigns(kind) for kind, assigns in done.kinds.items())
            and _no_others(done.modules, done.names)
        )

    def _sets(self) -> list[Any]:
        """Names, and the parameters that Megatron-FSDP sets there."""
        raw, store = self._fsdp.raw_param, self._fsdp.param_and_grad_buffer
        return [*raw, *raw.values(), *chain.from_iterable(store.optimizer_named_parameters)]


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _in(modules: Iterable[nn.Module]) -> list[Any]:
    """The class of each module, and its modules and parameters by name."""
    found: list[Any] = []
    for module in modules:
        children, parameters = module._modules, module._parameters
        found += (type(module), *children, *children.values(), *parameters, *parameters.values())
    return found


def _no_others(modules: list[nn.Module], names: list[frozenset[str]]) -> bool:
    """Whether none of these modules has an attribute or a buffer with one of its names."""
    for module, own in zip(modules, names, strict=True):
        if not module.__dict__.keys().isdisjoint(own):
            return False
        if module._buffers and not module._buffers.keys().isdisjoint(own):
            return False
    return True


def _usual(module: nn.Module) -> bool:
    """Whether what it has by its modules' names are these modules."""
    names = module._modules.keys()
    return names.isdisjoint(module._parameters) and not any(hasattr(type(module), n) for n in names)


def _assigns(kind: type[nn.Module]) -> bool:
    """See Note [What an assignment does]."""
    sets, registers = kind.__setattr__, kind.register_parameter
    of_te = _TE in sys.modules and registers is _REGISTERS.cached
    return not (_is_torchs(sets) and (of_te or _is_torchs(registers)))


def _is_torchs(function: Any) -> bool:
    return getattr(function, "__globals__", None) is vars(torch_module)


def scale_local_gradients() -> Undo:
    """Clip gradients as lists of local tensors, with the same kernel; returns the undo.

    Raises NotApplicableError if no optimizer is Megatron's.
    """
    if f"{_CLIP}.optimizer" not in sys.modules:
        raise NotApplicableError("no optimizer is Megatron's")
    own: Any = _TO_LOCAL.find()

    def to_local(tensor: Any) -> Any:
        # As DTensor.to_local() without gradients, and without a context of autograd for each.
        if type(tensor) is DTensor:
            return tensor._local_tensor
        return own(tensor) if isinstance(tensor, DTensor) else tensor

    to_local_undo = replace_function(*_TO_LOCAL.place(), to_local)
    return combine_undos((to_local_undo, run_instead(_SCALES, _scale)))


def _scale(
    own: Callable[..., None],
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    total_norm: Any,
    use_decoupled_grad: bool = False,
) -> None:
    applier, kernel, parameters = _APPLIER.find(), _KERNEL.find(), [*parameters]
    gradients: list[Any] = [g for p in parameters if (g := p.grad) is not None]
    usual = kernel is not None and type(applier) is APPLIES.cached and not use_decoupled_grad
    usual = usual and isinstance(total_norm, torch.Tensor) and {*map(type, gradients)} == {DTensor}
    local: list[Any] = [gradient._local_tensor for gradient in gradients] if usual else []
    wanted = {(torch.Tensor, torch.float32, getattr(total_norm, "device", None))}
    if {(type(tensor), tensor.dtype, tensor.device) for tensor in local} != wanted:
        own(parameters, max_norm, total_norm, use_decoupled_grad=use_decoupled_grad)
        return
    factor = (max_norm / (total_norm + 1.0e-6)).clamp_max_(1.0)
    if some := [tensor for tensor in local if tensor.numel()]:
        flag = torch.zeros(1, dtype=torch.int, device=factor.device)
        kernel(applier.chunk_size, flag, [some, some], factor)


def vote_beside() -> Undo:
    """Let a rank's vote not wait for its backward passes; returns the undo.

    Raises NotApplicableError if there is no vote, or no GPU.
    """
    if _RERUN not in sys.modules or not torch.cuda.is_available():
        raise NotApplicableError("the loop is not Megatron's, or there is no GPU")
    stream = torch.cuda.Stream()

    def vote(own: Callable[..., Any], *args: Any, **named: Any) -> Any:
        with torch.cuda.stream(stream):
            return own(*args, **named)

    return run_instead(_VOTES, vote)
