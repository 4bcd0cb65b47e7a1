"""What the host does from the last backward pass of a step to the next forward pass.

The GPU is idle meanwhile, unless it still has work. Megatron walks over all parameters several
times: at the Qwen3-MoE shape on one H200, 60 of 180 ms of a step.

Note [As it was left]
    Before a forward pass Megatron-FSDP sets the raw parameters on the modules, and before the
    optimizer's step the sharded DTensors. It finds each module by its name, and assigns. Here what
    the modules have after each of the two is kept, and written to their own dictionaries. An
    exchange is Megatron-FSDP's own, and is kept again, if anything is not as the last one left it:
    a module, a parameter, or a parameter that Megatron-FSDP has to set.

Note [What an assignment does]
    It calls ``register_parameter``. torch's checks the name and the kind, and runs hooks for all
    modules; while there is such a hook, each exchange is Megatron-FSDP's own. Transformer Engine's
    then remembers how to initialize a name that is new, and none is. To a module whose class has
    another one, parameters are assigned.

Note [A vote of the hosts]
    After the backward passes, ranks vote whether one of them wants to run them again. The votes are
    numbers of the hosts. Their sum is computed and read on a stream of its own: on the stream of
    the passes, reading it waits for all of them.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module

from megatron_cg.fastpath.optimizer_step import APPLIES
from megatron_cg.fastpath.part import NotApplicableError
from megatron_cg.fsdp.roles import fsdp_class, fsdp_function
from megatron_cg.upstream.patch import Undo, combine_undos, replace_function, run_instead
from megatron_cg.upstream.symbols import Symbol

_METHODS = {
    False: "_replace_param_with_raw_if_needed",
    True: "_replace_param_with_distributed_if_needed",
}
"""By whether the modules then have the optimizer's DTensors."""
_BODIES = {
    f"MegatronFSDP.{_METHODS[False]}": "2dd6f630faf574bb",
    f"MegatronFSDP.{_METHODS[True]}": "d5c8b3ca8a0bcd12",
    "MegatronFSDP._reestablish_shared_weights": "5ddc7bf62b666d72",
    "_replace_module_parameter": "0d03e4f918129cb7",
}
_TE = "transformer_engine.pytorch.module.base"
_REGISTERS = Symbol(
    f"{_TE}:TransformerEngineBaseModule.register_parameter",
    "what remembers how parameters are initialized",
    fingerprints=("ee888dbdfc683cd3",),
)
REPLACES_EXCHANGE = (
    *(
        symbol
        for path, body in _BODIES.items()
        for symbol in fsdp_function(path, "what exchanges parameters", fingerprints=(body,))
    ),
    _REGISTERS,
)
_CLIP, _RERUN = "megatron.core.optimizer", "megatron.core.rerun_state_machine"
_SCALES = Symbol(
    f"{_CLIP}.optimizer:clip_grad_by_total_norm_fp32",
    "what scales gradients",
    fingerprints=("5649d79e2c3dcbe6",),
)
_KERNEL = Symbol(f"{_CLIP}.clip_grads:multi_tensor_scale_tensor_impl", "its kernel, or None")
_APPLIER = Symbol(f"{_CLIP}.clip_grads:multi_tensor_applier", "what runs its kernel")
_TO_LOCAL = Symbol(
    f"{_CLIP}.clip_grads:to_local_if_dtensor",
    "a gradient's shard",
    fingerprints=("ec17e9c4d6187647",),
)
REPLACES_SCALING = (_SCALES, _TO_LOCAL)
_VOTES = Symbol(
    f"{_RERUN}:RerunStateMachine._reduce_any",
    "what adds up votes",
    fingerprints=("02afca39f048a959",),
)
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


class _Module(NamedTuple):
    module: nn.Module
    children: dict[str, nn.Module | None]
    parameters: dict[str, nn.Parameter | None]
    assigns: bool
    """See Note [What an assignment does]."""

    def is_as_left(self) -> bool:
        own, left = self.module._parameters, self.parameters
        same = self.module._modules == self.children and own.keys() == left.keys()
        return same and all(map(is_, own.values(), left.values()))

    def put(self) -> None:
        if not self.assigns:
            self.module._parameters.update(self.parameters)
            return
        for name, parameter in self.parameters.items():
            if self.module._parameters[name] is not parameter:
                setattr(self.module, name, parameter)


class _Exchange:
    """Replaces the two methods of a ``MegatronFSDP``."""

    def __init__(self, fsdp: Any) -> None:
        self._fsdp = fsdp
        self._own = {distributed: getattr(fsdp, name) for distributed, name in _METHODS.items()}
        self._left: dict[bool, list[_Module]] = {}
        self._given: list[nn.Parameter] = []

    def __call__(self, distributed: bool) -> None:
        fsdp = self._fsdp
        if fsdp.is_param_fsdp_distributed == distributed:
            return
        if self._is_as_left():
            fsdp.is_param_fsdp_distributed = distributed
            for module in self._left[distributed]:
                module.put()
            return
        before = self._look()
        self._own[distributed]()
        self._left = {not distributed: before, distributed: self._look()}
        self._given = [*self._gives()]

    def _is_as_left(self) -> bool:
        left, gives = self._left.get(self._fsdp.is_param_fsdp_distributed), [*self._gives()]
        return (
            left is not None
            and not torch_module._global_parameter_registration_hooks
            and left[0].module is self._fsdp.module
            and len(gives) == len(self._given)
            and all(map(is_, gives, self._given))
            and all(map(_Module.is_as_left, left))
        )

    def _gives(self) -> Iterator[nn.Parameter]:
        """What Megatron-FSDP sets on modules."""
        yield from self._fsdp.raw_param.values()
        for _, parameter in self._fsdp.param_and_grad_buffer.optimizer_named_parameters:
            yield parameter

    def _look(self) -> list[_Module]:
        return [
            _Module(module, {**module._modules}, {**module._parameters}, _assigns(module))
            for module in self._fsdp.module.modules()
        ]


def _assigns(module: nn.Module) -> bool:
    kind: Any = type(module)
    plain = [nn.Module.register_parameter]
    if _TE in sys.modules:
        plain.append(_REGISTERS.find())
    registers = kind.register_parameter in plain and "register_parameter" not in vars(module)
    return not registers or kind.__setattr__ is not nn.Module.__setattr__


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

    return combine_undos(
        (replace_function(*_TO_LOCAL.place(), to_local), run_instead(_SCALES, _scale))
    )


def _scale(
    own: Callable[..., None],
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    total_norm: Any,
    use_decoupled_grad: bool = False,
) -> None:
    applier, kernel = _APPLIER.find(), _KERNEL.find()
    gradients: list[Any] = [g for p in parameters if (g := p.grad) is not None]
    usual = kernel is not None and type(applier) is APPLIES.cached and not use_decoupled_grad
    usual = usual and isinstance(total_norm, torch.Tensor) and {*map(type, gradients)} == {DTensor}
    local: list[Any] = [gradient._local_tensor for gradient in gradients] if usual else []
    if {(type(tensor), tensor.dtype) for tensor in local} != {(torch.Tensor, torch.float32)}:
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

    def vote(own: Callable[..., Any], *args: Any) -> Any:
        with torch.cuda.stream(stream):
            return own(*args)

    return run_instead(_VOTES, vote)
