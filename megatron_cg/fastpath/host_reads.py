"""Numbers of a step, read by Megatron's loop without waiting for the whole step.

Megatron's ``train`` reduces some numbers in each step and reads them from the GPU. Each read waits
for all that is queued. So the GPU is idle from the end of a backward pass until the optimizer's
kernels are queued, and from the end of a step until the next one is prepared.

Note [What is read]
    Whether a rank asks for the step to be repeated (``_reduce_any``): the other ranks have to learn
    it, so it is reduced, on a stream of its own. Whether the optimizer stepped, and the learning
    rate: with one model-parallel rank the host knows both. The norm of the gradients: it is read as
    soon as it is computed, on that stream, while the optimizer's kernels run. The loss scale: a
    constant without a scaler. And ``training_log`` copies a zero from the host for each loss, as
    the default of a dictionary that has the loss already.

Note [How far the host gets]
    It waits for the norm of the gradients in every step, and so it is less than a step ahead. In a
    step without a norm, whether it was made is read in Megatron's way.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_cg.fastpath.part import NotApplicableError
from megatron_cg.upstream.patch import Undo, replace_function, set_attribute
from megatron_cg.upstream.symbols import Symbol

_TRAINING, _CLIP = "megatron.training.training", "clip_grad_norm"
_BODIES = {  # of 0.19.2, and of 0.20 where it differs
    f"{_TRAINING}:logical_and_across_model_parallel_group": "180ce7b0fe89795b",
    f"{_TRAINING}:reduce_max_stat_across_model_parallel_group": "f9c0c3fa0d37ca37",
    f"{_TRAINING}:training_log": "52a5ee59fd1095b8 9b2c54bb4d0f6d16",
    "megatron.core.rerun_state_machine:RerunStateMachine._reduce_any": "02afca39f048a959",
    "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.get_loss_scale": "2092c9b1de194328",
}
REPLACES = tuple(
    Symbol(
        path, "what reduces, reads or logs numbers of a step", fingerprints=tuple(bodies.split())
    )
    for path, bodies in _BODIES.items()
)
_AND, _MAX, _LOG, _ANY, _ = REPLACES
_TENSORBOARD = Symbol("megatron.training.global_vars:get_tensorboard_writer", "a writer or None")
RELIES_ON = (*REPLACES, _TENSORBOARD)


class HostReads:
    """Replaces what Megatron's loop reads numbers by, for the optimizers of one model."""

    def __init__(self) -> None:
        self.beside = torch.cuda.Stream()
        self._norm: Any = None
        """What the last clipping returned, until the step has read it."""
        self._computed: Any = None

    def clipped(self, clip: Callable[..., Any], *args: Any, **named: Any) -> Any:
        self._norm = clip(*args, **named)
        self._computed = torch.cuda.Event()
        self._computed.record()
        return self._norm

    def stepped(self, reduce: Callable[..., bool], made: bool, group: Any = None) -> bool:
        if self._norm is None or group is None or dist.get_world_size(group) > 1:
            return reduce(made, group=group)
        return made is True

    def largest(self, reduce: Callable[..., Any], number: Any, group: Any = None) -> float | None:
        """The largest ``number`` of the ranks of ``group``, None if none has any."""
        if group is None or dist.get_world_size(group) > 1:
            return reduce(number, group=group)  # type: ignore[no-any-return]
        if number is self._norm is not None:
            self._norm = None
            self.beside.wait_event(self._computed)
            with torch.cuda.stream(self.beside):
                number = number.item() if isinstance(number, torch.Tensor) else number
        elif isinstance(number, torch.Tensor):
            return reduce(number, group=group)  # type: ignore[no-any-return]
        # Rounded as on the GPU; and so is the value that stands for none.
        value = -1.0 if number is None else number
        rounded = torch.tensor(value, dtype=torch.float32, device="cpu").item()
        return None if rounded == -1.0 else rounded

    def requested(self, reduce: Callable[..., Any], machine: Any, value: Any) -> Any:
        with torch.cuda.stream(self.beside):
            return reduce(machine, value)

    def logged(self, log: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Log a step; its losses are added up here, unless other code may read them too."""
        bound = inspect.signature(log).bind(*args, **named)
        given, sums = bound.arguments, bound.arguments["total_loss_dict"]
        losses = given["loss_dict"]
        if (
            not given["skipped_iter"]
            and _TENSORBOARD.cached() is None
            and losses.keys() <= sums.keys()
            and not hasattr(inspect.unwrap(log, stop=_is_theirs), "__wrapped__")
        ):
            for name, loss in losses.items():
                sums[name] = sums[name] + loss
            given["loss_dict"] = {}
        return log(*bound.args, **bound.kwargs)


def _is_theirs(function: Any) -> bool:
    names: dict[str, Any] = getattr(function, "__globals__", {})
    return not names.get("__name__", type(function).__module__).startswith("megatron_cg.")


def install_host_reads(optimizers: Sequence[Any]) -> Undo:
    """Let Megatron's loop read its numbers early; returns the undo.

    Raises NotApplicableError if the loop is not Megatron's, or there is no gradient norm.
    """
    if _TRAINING not in sys.modules or not torch.cuda.is_available():
        raise NotApplicableError("the loop is not Megatron's, or there is no GPU")
    optimizer: Any = optimizers[0] if len(optimizers) == 1 else None
    if not hasattr(optimizer, _CLIP) or hasattr(optimizer, "chained_optimizers"):
        raise NotApplicableError("there is not one optimizer, with one norm")
    reads = HostReads()
    with ExitStack() as undo:
        for owner, name, ours in (
            (optimizer, _CLIP, reads.clipped),
            (*_AND.place(), reads.stepped),
            (*_MAX.place(), reads.largest),
            (*_LOG.place(), reads.logged),
            (*_ANY.place(), reads.requested),
        ):
            undo.callback(replace_function(owner, name, partial(ours, getattr(owner, name))))
        if getattr(optimizer, "grad_scaler", None) is None and hasattr(optimizer, "_scale_one"):
            scale = optimizer._scale_one
            undo.callback(set_attribute(scale, "item", partial(float, scale.item())))
        return undo.pop_all().close
