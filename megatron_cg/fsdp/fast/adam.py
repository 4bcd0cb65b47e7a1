"""The lists that Transformer Engine's FusedAdam makes anew in each step, kept.

FusedAdam launches a few kernels for all parameters, and sorts the parameters into the lists for
them in each step. Under Megatron-FSDP they are DTensors, of which every look at ``.data`` makes
another; with every expert's weight a parameter the host is at it for longer than the kernels run.
Parameters and moments stay where they are from step to step, so only the gradients are read anew.

Note [Once by TE, then from a table]
    The first step is TE's own, and what it hands to its kernel is compared with what the table
    would have handed over: kernel, addresses, sizes and numbers. Only if they are the same does
    the table take over; whatever another release of TE does differently leaves its own step in
    place. Parameters and moments are looked at in each step, and the table is made anew where one
    was replaced, as loading a checkpoint does.

Relied on: transformer-engine 2.20.2, ``FusedAdam`` (``capturable``, ``master_weights``,
``use_decoupled_grad``, ``multi_tensor_adam``, ``adam_w_mode``, ``_dummy_overflow_buf``) and, in its
module, ``multi_tensor_applier`` and ``_MAX_TENSORS_PER_MULTI_TENSOR_ADAM_CALL``; megatron-core
0.19.2, ``ChainedOptimizer.chained_optimizers`` and ``MegatronOptimizer.optimizer``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Keep the lists of every FusedAdam among ``optimizers``; returns the undo.

    Args:
        optimizers: Megatron's, chained or not, or torch's.

    Raises:
        StepsAsideError: none of them is a FusedAdam whose lists are the simple ones.
        UpstreamChangedError: a symbol that this relies on is gone; nothing is changed then.
    """
    if _MODULE not in sys.modules:
        raise StepsAsideError("no optimizer is Transformer Engine's FusedAdam")
    adams = [inner for inner in _inner(optimizers) if type(inner) is _ADAM.find()]
    simple = {id(adam): adam for adam in adams if not _is_special(adam)}
    if not simple:
        why = "keeps main weights itself, or runs in a graph" if adams else "is not FusedAdam"
        raise StepsAsideError(f"the optimizer {why}")
    with ExitStack() as undo:
        for adam in simple.values():
            undo.callback(set_attribute(adam, "step", KeptLists(adam)))
        return undo.pop_all().close


def _inner(optimizers: Iterable[Any]) -> Iterator[Any]:
    for optimizer in optimizers:
        yield from _inner(getattr(optimizer, "chained_optimizers", ()))
        inner = vars(optimizer).get("optimizer")
        if inner is not None:
            yield from _inner([inner])
        yield optimizer


def _is_special(adam: Any) -> bool:
    return bool(adam.capturable or adam.master_weights or adam.use_decoupled_grad)


@dataclass(frozen=True)
class _Row:
    """A parameter and what of it stays in place."""

    parameter: Any
    weight: torch.Tensor
    """This rank's shard, float32."""
    state: dict[str, Any]
    moments: tuple[Any, Any]
    local_moments: tuple[torch.Tensor, torch.Tensor]

    def stays(self) -> bool:
        """Whether nobody has put another tensor in the place of one."""
        state = self.state
        return (
            _local(self.parameter).data_ptr() == self.weight.data_ptr()
            and state.get(_MOMENTS[0]) is self.moments[0]
            and state.get(_MOMENTS[1]) is self.moments[1]
        )


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


class KeptLists:
    """Stands in the place of ``FusedAdam.step``."""

    def __init__(self, adam: Any) -> None:
        self._adam, self._original = adam, adam.step
        self._rows: list[list[_Row]] = []
        self._made_of: tuple[Any, ...] = ()
        self._trusted: bool | None = None
        self.steps = 0
        """Steps made from the table."""

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
        groups = self._adam.param_groups
        if any(type(group.get("step")) is not int for group in groups):
            return None
        if not self._is_current() and not self._read():
            return None
        most = _AT_MOST.find()
        calls = []
        for group, rows in zip(groups, self._rows, strict=True):
            lists = _lists(rows)
            numbers = (
                group["lr"],
                *group["betas"],
                group["eps"],
                group["step"] + 1,
                self._adam.adam_w_mode,
                1 if group["bias_correction"] else 0,
                group["weight_decay"],
            )
            for start in range(0, len(lists[0]), most):
                some = [tensors[start : start + most] for tensors in lists]
                calls.append(_Call(self._adam.multi_tensor_adam, some, numbers))
        return calls

    def _is_current(self) -> bool:
        adam = self._adam
        now = (adam.state, adam.param_groups, *(group["params"] for group in adam.param_groups))
        if len(now) != len(self._made_of) or any(
            one is not other for one, other in zip(now, self._made_of, strict=True)
        ):
            self._made_of = now
            return False
        return all(row.stays() for rows in self._rows for row in rows)

    def _read(self) -> bool:
        """Make the table; whether all parameters are of the simple kind."""
        self._rows = []
        for group in self._adam.param_groups:
            rows = [_row(parameter, self._adam.state[parameter]) for parameter in group["params"]]
            self._rows.append([row for row in rows if row is not None])
            if len(self._rows[-1]) < len(rows):
                self._made_of = ()
                return False
        return True

    def _compared(self, calls: Sequence[_Call]) -> Any:
        """TE's own step; afterwards the table is trusted, or never asked again."""
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


def _row(parameter: Any, state: dict[str, Any]) -> _Row | None:
    """None where TE does more with it than to hand it to the kernel."""
    if set(state) != set(_MOMENTS):
        return None
    weight, moments = _local(parameter).detach(), (state[_MOMENTS[0]], state[_MOMENTS[1]])
    first, second = map(_local, moments)
    plain = all(
        type(tensor) is torch.Tensor and tensor.dtype == torch.float32
        for tensor in (weight, first, second)
    )
    return _Row(parameter, weight, state, moments, (first, second)) if plain else None


def _lists(rows: Sequence[_Row]) -> list[list[torch.Tensor]]:
    """Gradients, weights and moments of the parameters that have a gradient."""
    lists: list[list[torch.Tensor]] = [[], [], [], []]
    for row in rows:
        gradient = row.parameter.grad
        if gradient is not None:
            found = (_local(gradient), row.weight, *row.local_moments)
            for tensors, tensor in zip(lists, found, strict=True):
                tensors.append(tensor)
    return lists
