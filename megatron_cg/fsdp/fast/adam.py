"""The step of Transformer Engine's FusedAdam without a DTensor made for every look at one.

FusedAdam launches a few kernels for all parameters, and sorts the parameters into lists for them in
each step. Under Megatron-FSDP they are DTensors, of which every look at ``.data`` makes another;
with every expert's weight a parameter the host is at it for longer than the kernels run. Here the
same lists are made of the local tensors themselves.

Note [Once by TE, then shorter]
    The first step is TE's own, and what it hands to its kernel is compared with what would have
    been handed over here: kernel, addresses, sizes and numbers. Only if they are the same is the
    shorter way taken from then on; whatever another release of TE does differently leaves its own
    step in place. Nothing is kept from step to step, so a checkpoint that is loaded, or a moment
    that is replaced, is seen by the next step.

Relied on: transformer-engine 2.20.2, ``FusedAdam`` (``capturable``, ``master_weights``,
``use_decoupled_grad``, ``multi_tensor_adam``, ``adam_w_mode``, ``_dummy_overflow_buf``) and, in its
module, ``multi_tensor_applier`` and ``_MAX_TENSORS_PER_MULTI_TENSOR_ADAM_CALL``; megatron-core
0.19.2, ``ChainedOptimizer.chained_optimizers`` and ``MegatronOptimizer.optimizer``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

from megatron_cg.fsdp.fast.steps_aside import StepsAsideError
from megatron_cg.undo import set_attribute
from megatron_cg.versions import Symbol

logger = logging.getLogger(__name__)

_MODULE = "transformer_engine.pytorch.optimizers.fused_adam"
_ADAM = Symbol(
    "transformer-engine",
    f"{_MODULE}:FusedAdam",
    "the optimizer",
    attributes=(
        "capturable",
        "master_weights",
        "use_decoupled_grad",
        "multi_tensor_adam",
        "adam_w_mode",
        "_dummy_overflow_buf",
    ),
)
_APPLIER = Symbol("transformer-engine", f"{_MODULE}:multi_tensor_applier", "what runs its kernel")
_AT_MOST = Symbol(
    "transformer-engine",
    f"{_MODULE}:_MAX_TENSORS_PER_MULTI_TENSOR_ADAM_CALL",
    "how many tensors one call takes",
)
RELIES_ON = (_ADAM, _APPLIER, _AT_MOST)
_MOMENTS = ("exp_avg", "exp_avg_sq")


def install_adam(optimizers: Iterable[Any]) -> Callable[[], None]:
    """Shorten the step of every FusedAdam among ``optimizers``; returns the undo.

    Args:
        optimizers: Megatron's, chained or not, or torch's.

    Raises:
        StepsAsideError: none of them is a FusedAdam whose lists are simple ones.
        UpstreamChangedError: a symbol that this relies on is gone; nothing is changed then.
    """
    if _MODULE not in sys.modules:
        raise StepsAsideError("no optimizer is Transformer Engine's FusedAdam")
    adams = [inner for inner in _inner(optimizers) if type(inner) is _ADAM.find()]
    simple = {id(adam): adam for adam in adams if not _is_special(adam)}
    if not simple:
        why = "is not FusedAdam"
        if adams:
            why = "keeps main weights itself, runs in a graph, or has a step of its own"
        raise StepsAsideError(f"the optimizer {why}")
    with ExitStack() as undo:
        for adam in simple.values():
            undo.callback(set_attribute(adam, "step", LocalStep(adam)))
        return undo.pop_all().close


def _inner(optimizers: Iterable[Any]) -> Iterator[Any]:
    for optimizer in optimizers:
        yield from _inner(getattr(optimizer, "chained_optimizers", ()))
        inner = vars(optimizer).get("optimizer")
        if inner is not None:
            yield from _inner([inner])
        yield optimizer


def _is_special(adam: Any) -> bool:
    # A step that somebody wrapped does more: that of ``fully_shard_optimizer`` installs weights.
    wrapped = "step" in vars(adam)
    return bool(adam.capturable or adam.master_weights or adam.use_decoupled_grad or wrapped)


@dataclass(frozen=True)
class _Call:
    """One launch: gradients, weights and both moments, and the numbers after them."""

    kernel: Any
    tensors: list[list[torch.Tensor]]
    numbers: tuple[Any, ...]

    def facts(self) -> tuple[Any, ...]:
        """All of it in a form that can be compared, with places instead of tensors."""
        places = [
            [(t.data_ptr(), t.numel(), t.dtype) for t in map(_local, row)] for row in self.tensors
        ]
        return self.kernel, places, self.numbers


class LocalStep:
    """Stands in the place of ``FusedAdam.step``."""

    def __init__(self, adam: Any) -> None:
        self._adam, self._original = adam, adam.step
        self._trusted: bool | None = None
        self.steps = 0
        """Steps that were not TE's own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step; with arguments, or with hooks of torch's, it is TE's own."""
        if self._trusted is False or args or kwargs or _has_hooks(self._adam):
            return self._original(*args, **kwargs)
        calls = self._calls()
        if calls is None:
            return self._original()
        if self._trusted is None:
            return self._compared(calls)
        for group in self._adam.param_groups:
            group["step"] += 1
        applier = _APPLIER.find()
        for call in calls:
            applier(call.kernel, self._adam._dummy_overflow_buf, call.tensors, *call.numbers)
        self.steps += 1
        return None

    def _calls(self) -> list[_Call] | None:
        """What the next step launches; None where that is TE's to say."""
        adam, most = self._adam, _AT_MOST.find()
        calls = []
        for group in adam.param_groups:
            lists = _lists(group["params"], adam.state)
            if lists is None or type(group.get("step")) is not int:
                return None
            numbers = (
                group["lr"],
                *group["betas"],
                group["eps"],
                group["step"] + 1,
                adam.adam_w_mode,
                1 if group["bias_correction"] else 0,
                group["weight_decay"],
            )
            for start in range(0, len(lists[0]), most):
                some = [tensors[start : start + most] for tensors in lists]
                calls.append(_Call(adam.multi_tensor_adam, some, numbers))
        return calls

    def _compared(self, calls: Sequence[_Call]) -> Any:
        """TE's own step; afterwards the shorter way is trusted, or never taken."""
        expected, found = [call.facts() for call in calls], []
        applier = _APPLIER.find()

        def noted(kernel: Any, flag: Any, tensors: list[list[Any]], *numbers: Any) -> Any:
            found.append(_Call(kernel, tensors, numbers).facts())
            return applier(kernel, flag, tensors, *numbers)

        undo = set_attribute(sys.modules[_MODULE], "multi_tensor_applier", noted)
        try:
            result = self._original()
        finally:
            undo()
        self._trusted = expected == found
        if not self._trusted:
            logger.warning(
                "FSDP fast path: FusedAdam's step is left to Transformer Engine, because what it "
                "hands to its kernel is not what was expected."
            )
        return result


def _has_hooks(adam: Any) -> bool:
    return bool(
        adam._optimizer_step_pre_hooks
        or adam._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return found


def _lists(
    parameters: Sequence[Any], states: Mapping[Any, Mapping[str, Any]]
) -> list[list[torch.Tensor]] | None:
    """Gradients, weights and moments of the parameters that have a gradient.

    None where TE does more with one of them than to hand it to the kernel.
    """
    lists: list[list[torch.Tensor]] = [[], [], [], []]
    for parameter in parameters:
        state = states[parameter]
        if state.keys() != set(_MOMENTS):
            return None
        gradient = parameter.grad
        if gradient is None:
            continue
        weight = _local(parameter).detach()
        found = (_local(gradient), weight, *(_local(state[name]) for name in _MOMENTS))
        for tensors, tensor in zip(lists, found, strict=True):
            if type(tensor) is not torch.Tensor or tensor.dtype != torch.float32:
                return None
            tensors.append(tensor)
    return lists
