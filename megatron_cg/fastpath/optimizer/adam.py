"""A shorter step for Transformer Engine's FusedAdam, without a new DTensor for each access.

FusedAdam launches a few kernels for all parameters, and in each step it sorts the parameters into
lists for them. Under Megatron-FSDP the parameters are DTensors, and each access to ``.data``
creates another one. Where every expert's weight is a parameter, this takes the host longer than
the kernels take the GPU. Here the same lists are built from the local tensors and passed to the
kernel directly.

Note [Once by TE, then shorter]
    The first step is TE's own. The arguments that reach its kernel (addresses, sizes and numbers)
    are compared with those from this module. Only if they are the same do later steps take the
    shorter way. If another release of TE does anything differently, TE's own step stays in place.
    Nothing is cached between steps, so the next step sees a loaded checkpoint or a replaced moment.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

from megatron_cg.fastpath.not_applicable import NotApplicableError
from megatron_cg.fastpath.optimizer.launches import Launch, are_plain, launched_by, without_empty
from megatron_cg.upstream.patch import put_over
from megatron_cg.upstream.symbols import Symbol

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
_CHUNK = Symbol(
    "transformer-engine", f"{_APPLIER.path}.chunk_size", "how much of a tensor a block takes"
)
_AT_MOST = Symbol(
    "transformer-engine",
    f"{_MODULE}:_MAX_TENSORS_PER_MULTI_TENSOR_ADAM_CALL",
    "how many tensors one call takes",
)
REPLACES = (
    Symbol(
        "transformer-engine",
        f"{_ADAM.path}.step",
        "its step",
        fingerprints=("80a579d335ac25c3",),
    ),
    Symbol(
        "transformer-engine",
        "transformer_engine.pytorch.optimizers.multi_tensor_apply:MultiTensorApply.__call__",
        "what runs its kernel",
        fingerprints=("ac91ff4a196ee3fc",),
    ),
)
RELIES_ON = (*REPLACES, _ADAM, _APPLIER, _CHUNK, _AT_MOST)
_MOMENTS = {"exp_avg", "exp_avg_sq"}


def install_adam(optimizers: Iterable[Any]) -> Callable[[], None]:
    """Shorten the step of every FusedAdam among ``optimizers``; returns the undo.

    Args:
        optimizers: Megatron's, chained or not, or torch's.

    Raises:
        NotApplicableError: none of them is a FusedAdam with simple lists.
        UpstreamChangedError: a symbol that this relies on is gone; nothing is changed then.
    """
    if _MODULE not in sys.modules:
        raise NotApplicableError("no optimizer is Transformer Engine's FusedAdam")
    adams = [inner for inner in _inner(optimizers) if type(inner) is _ADAM.find()]
    simple = {id(adam): adam for adam in adams if not _is_special(adam)}
    if not simple:
        why = "is not FusedAdam"
        if adams:
            why = "keeps main weights itself, runs in a graph, or has a step of its own"
        raise NotApplicableError(f"the optimizer {why}")
    for symbol in RELIES_ON:
        symbol.find()
    with ExitStack() as undo:
        for adam in simple.values():
            undo.callback(put_over(adam, "step", LocalStep(adam)))
        return undo.pop_all().close


def _inner(optimizers: Iterable[Any]) -> Iterator[Any]:
    for optimizer in optimizers:
        yield from _inner(getattr(optimizer, "chained_optimizers", ()))
        inner = vars(optimizer).get("optimizer")
        if inner is not None:
            yield from _inner([inner])
        yield optimizer


def _is_special(adam: Any) -> bool:
    # A wrapped step does more: that of ``fully_shard_optimizer`` installs weights.
    wrapped = "step" in vars(adam)
    return bool(adam.capturable or adam.master_weights or adam.use_decoupled_grad or wrapped)


class LocalStep:
    """Replaces ``FusedAdam.step``."""

    def __init__(self, adam: Any) -> None:
        self._adam, self._original = adam, adam.step
        self._differs = False
        self._compared_with: Any = None
        self.steps = 0
        """Number of steps that were not TE's own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step. With arguments or with torch's hooks it is TE's own step."""
        if self._differs or args or kwargs or _has_hooks(self._adam):
            return self._original(*args, **kwargs)
        applier = _APPLIER.find()
        launches = self._launches(getattr(applier, "chunk_size", None))
        if launches is None:
            return self._original()
        if self._compared_with is not applier:
            return self._compared(launches, applier)
        for group in self._adam.param_groups:
            group["step"] += 1
        with torch.no_grad():
            for launch in launches:
                launch(self._adam._dummy_overflow_buf)
        self.steps += 1
        return None

    def _launches(self, chunk_size: int | None) -> list[Launch] | None:
        """The launches of the next step; None if TE's own step must run."""
        adam, most = self._adam, _AT_MOST.find()
        launches = []
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
                some = without_empty([tensors[start : start + most] for tensors in lists])
                if some[0]:
                    launches.append(Launch(adam.multi_tensor_adam, chunk_size, some, numbers))
        return launches

    def _compared(self, expected: Sequence[Launch], applier: Any) -> Any:
        """Run TE's own step and compare: later steps take the shorter way, or never do."""
        places = [launch.facts() for launch in expected]
        result, found = launched_by(self._original, _MODULE)
        self._differs = places != [launch.facts() for launch in found]
        if places:
            self._compared_with = applier
        if self._differs:
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


def _lists(
    parameters: Sequence[Any], states: Mapping[Any, Mapping[str, Any]]
) -> list[list[torch.Tensor]] | None:
    """Gradients, weights and moments of the parameters that have a gradient.

    None if TE does more with one of them than pass it to the kernel, or if only some of them are
    DTensors.
    """
    lists: list[list[Any]] = [[], [], [], []]
    gradients, weights, first, second = lists
    for parameter in parameters:
        state = states[parameter]
        if state.keys() != _MOMENTS:
            return None
        gradient = parameter.grad
        if gradient is not None:
            gradients.append(gradient)
            weights.append(parameter)
            first.append(state["exp_avg"])
            second.append(state["exp_avg_sq"])
    if set(map(type, chain.from_iterable(lists))) == {DTensor}:
        lists = [[tensor._local_tensor for tensor in tensors] for tensors in lists]
    return lists if all(map(are_plain, lists)) else None
