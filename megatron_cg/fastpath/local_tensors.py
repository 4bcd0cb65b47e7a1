"""FusedAdam's step from lists of local tensors, and what clipping shares with it.

Megatron's clipping (``clipping.py``) and Transformer Engine's FusedAdam are a few kernels for all
parameters. The host takes longer than the GPU: it walks over the parameters several times, reads
attributes that do not change, and makes a new DTensor for each access to data. Here the attributes
are read once, and the same kernels get the same lists of local tensors.

Note [Once by upstream, then shorter]
    The first call is upstream's own. The kernels and the arguments that reach them through the
    applier (addresses, sizes, numbers) are compared with those from this module. Only if they are
    the same do later calls take the shorter way. If other code installs another applier or kernel,
    or the parameters that are clipped change, they are compared again. Tensors are looked up in
    each call, so the next one sees a loaded checkpoint, a new gradient or a replaced moment.

Note [What TE's applier does]
    ``multi_tensor_applier`` (transformer-engine 2.20.2) takes the local tensor of each DTensor,
    drops the entries where the first list's tensor has no elements, adds the chunk size, and calls
    the kernel if any entry is left. It does this tensor by tensor, in Python.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, compress
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

from megatron_cg.fastpath.part import NotApplicableError, part_symbol
from megatron_cg.upstream.patch import put_over, undone_after

logger = logging.getLogger(__name__)

APPLIER, _PLAIN = "multi_tensor_applier", {torch.Tensor, nn.Parameter}
_MODULE = "transformer_engine.pytorch.optimizers.fused_adam"


_ADAM = part_symbol(
    f"{_MODULE}:FusedAdam",
    "the optimizer",
    *("capturable", "master_weights", "use_decoupled_grad", "multi_tensor_adam", "adam_w_mode"),
    "_dummy_overflow_buf",
)
_APPLIER = part_symbol(f"{_MODULE}:{APPLIER}", "what runs its kernel")
_AT_MOST = part_symbol(
    f"{_MODULE}:_MAX_TENSORS_PER_MULTI_TENSOR_ADAM_CALL", "the tensors of one call"
)
REPLACES = (
    part_symbol(f"{_ADAM.path}.step", "its step", body="80a579d335ac25c3"),
    part_symbol(
        "transformer_engine.pytorch.optimizers.multi_tensor_apply:MultiTensorApply.__call__",
        "what runs its kernel",
        body="ac91ff4a196ee3fc",
    ),
)
RELIES_ON = (
    *(*REPLACES, _ADAM, _APPLIER, _AT_MOST),
    part_symbol(f"{_APPLIER.path}.chunk_size", "how much of a tensor a block takes"),
)


@dataclass(frozen=True)
class Launch:
    """One call of a multi-tensor kernel, with all its arguments except the flag."""

    kernel: Any
    chunk_size: int | None
    tensors: Sequence[list[torch.Tensor]]
    numbers: tuple[Any, ...]

    def __call__(self, flag: torch.Tensor) -> Any:
        """Launch it; the kernel sets ``flag`` if a number is not finite."""
        return self.kernel(self.chunk_size, flag, self.tensors, *self.numbers)

    def facts(self) -> tuple[Any, ...]:
        """The call in a comparable form: addresses of tensors, None for a number in a tensor."""
        places = [[(t.data_ptr(), t.numel(), t.dtype) for t in row] for row in self.tensors]
        numbers = [None if isinstance(n, torch.Tensor) else n for n in self.numbers]
        return self.kernel, self.chunk_size, places, numbers


def _noting(applier: Any, launches: list[Launch]) -> Callable[..., Any]:
    """TE's ``applier``, which also adds each launch to ``launches``."""

    def applied(kernel: Any, flag: Any, tensors: Any, *numbers: Any) -> Any:
        def noted(chunk_size: int, flag: Any, tensors: Any, *numbers: Any) -> Any:
            launch = Launch(kernel, chunk_size, tensors, numbers)
            launches.append(launch)
            return launch(flag)

        return applier(noted, flag, tensors, *numbers)

    return applied


def are_plain(tensors: Sequence[Any]) -> bool:
    """Whether all are float32 and of torch's own tensor classes."""
    return set(map(type, tensors)) <= _PLAIN and {t.dtype for t in tensors} <= {torch.float32}


class Shorter:
    """Replaces a function of an optimizer; see Note [Once by upstream, then shorter].

    Args:
        original: upstream's function.
        module: where it finds its applier.
        what: a sentence for the log, where it is left as it is.
    """

    def __init__(self, original: Callable[..., Any], module: str, what: str) -> None:
        self.original, self._module, self._what = original, module, what
        self.differs = False
        self._compared_with: tuple[Any, ...] = ()
        self.calls = 0
        """Number of calls that were not upstream's own."""

    def is_known(self, objects: tuple[Any, ...]) -> bool:
        """Whether launches with these objects were as expected; if not, forget older ones."""
        known = self._compared_with
        if len(objects) == len(known) and all(map(is_, objects, known)):
            return True
        self._compared_with = ()
        return False

    def compared(
        self,
        expected: Sequence[Launch],
        objects: tuple[Any, ...],
        *args: Any,
        agrees: Callable[[Any, Launch], bool] = lambda _result, _last: True,
    ) -> Any:
        """Make upstream's own call: later ones take the shorter way, or never do.

        ``agrees`` looks at the result and the last launch, if all launches are as expected.
        """
        facts, upstreams = [launch.facts() for launch in expected], list[Launch]()
        owner = sys.modules[self._module]
        with undone_after(put_over(owner, APPLIER, _noting(getattr(owner, APPLIER), upstreams))):
            result = self.original(*args)
        are_same = facts == [launch.facts() for launch in upstreams]
        if not are_same or (upstreams and not agrees(result, upstreams[-1])):
            self.differs = True
            logger.warning(
                "FSDP fast path: %s, because what it hands to its kernels is not what was "
                "expected.",
                self._what,
            )
        self._compared_with = objects if upstreams else ()
        return result


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
    adams = {id(inner): inner for inner in _inner(optimizers) if type(inner) is _ADAM.find()}
    simple = [adam for adam in adams.values() if not _is_special(adam)]
    if not simple:
        why = "is not FusedAdam"
        if adams:
            why = "keeps main weights itself, runs in a graph, or has a step of its own"
        raise NotApplicableError(f"the optimizer {why}")
    for symbol in RELIES_ON:
        symbol.find()
    with ExitStack() as undo:
        for adam in simple:
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


class LocalStep(Shorter):
    """Replaces ``FusedAdam.step``."""

    def __init__(self, adam: Any) -> None:
        what = "FusedAdam's step is left to Transformer Engine"
        super().__init__(adam.step, _MODULE, what)
        self._adam = adam

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step. With arguments or with torch's hooks it is TE's own step."""
        if self.differs or args or kwargs or _has_hooks(self._adam):
            return self.original(*args, **kwargs)
        applier = _APPLIER.find()
        launches = self._launches(getattr(applier, "chunk_size", None))
        if launches is None:
            return self.original()
        if not self.is_known((applier,)):
            return self.compared(launches, (applier,))
        for group in self._adam.param_groups:
            group["step"] += 1
        with torch.no_grad():
            for launch in launches:
                launch(self._adam._dummy_overflow_buf)
        self.calls += 1
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
                *(group["lr"], *group["betas"], group["eps"], group["step"] + 1),
                *(adam.adam_w_mode, 1 if group["bias_correction"] else 0, group["weight_decay"]),
            )
            for start in range(0, len(lists[0]), most):
                some = [tensors[start : start + most] for tensors in lists]
                sizes = list(map(torch.Tensor.numel, some[0]))
                if not all(sizes):
                    some = [list(compress(tensors, sizes)) for tensors in some]
                if some[0]:
                    launches.append(Launch(adam.multi_tensor_adam, chunk_size, some, numbers))
        return launches


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
    rows = []
    for parameter in parameters:
        state, gradient = states[parameter], parameter.grad
        if state.keys() != {"exp_avg", "exp_avg_sq"}:
            return None
        if gradient is not None:
            rows.append((gradient, parameter, state["exp_avg"], state["exp_avg_sq"]))
    lists = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    if set(map(type, chain.from_iterable(lists))) == {DTensor}:
        lists = [[tensor._local_tensor for tensor in tensors] for tensors in lists]
    return lists if all(map(are_plain, lists)) else None
