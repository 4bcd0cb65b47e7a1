"""Gradient clipping and FusedAdam's step from lists of local tensors.

Megatron's clipping and Transformer Engine's FusedAdam are a few kernels for all parameters. The
host takes longer than the GPU: it walks over the parameters several times, reads attributes that do
not change, and makes a new DTensor for each access to data. Here the same kernels get the same
lists of local tensors. Tensors, kernels and numbers are looked up in each call, so the next one
sees a loaded checkpoint, a new gradient or a replaced moment.

Note [What TE's applier does]
    ``multi_tensor_applier`` (transformer-engine 2.20.2) takes the local tensor of each DTensor,
    drops the entries where the first list's tensor has no elements, adds the chunk size, and calls
    the kernel if any entry is left. It does this tensor by tensor, in Python.

Note [Which gradients count]
    The norm excludes a shared weight, and a weight that other ranks have as well. Megatron's own
    function decides this from the parameter's attributes, whether or not it has a gradient in this
    step. It is called once for the parameters that the optimizer has.

Note [Ranks may differ]
    Megatron's clipping and this one issue the same collectives, so some ranks may take the shorter
    way and others not. Parameters may be clipped separately, by a norm of their own. Their rank
    leaves clipping to Megatron. The others take part in that norm, by Megatron's own function.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from operator import is_
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

from megatron_cg.fastpath.part import NotApplicableError
from megatron_cg.ranges import in_range
from megatron_cg.upstream.patch import Undo, all_of, put_over
from megatron_cg.upstream.symbols import Symbol

_PLAIN = {torch.Tensor, nn.Parameter}
_CLIP, _MODULE = "clip_grad_norm", "megatron.core.optimizer.optimizer"
_KERNELS = "megatron.core.optimizer.clip_grads"
_PRECISION = ("use_precision_aware_optimizer", "use_precision_aware_optimizer_no_fp8_or_ds_fp8")
_METHODS = {
    _CLIP: "5b555005885178d7",
    "get_grads_for_grad_norm": "85f50b4bbe342e75",
    "_filter_grads_for_norm": "cea6e5b8e038f583",
    "_compute_grad_norms_by_group": "9313eb31f4623e55",
    "has_grad_norm_group": "ec8c4b5ded202ff1",
}
"""The methods of an optimizer that clip, with the fingerprint of each."""


def _symbol(path: str, expected: str, *has: str, body: str = "") -> Symbol:
    return Symbol(path, expected, attributes=has, fingerprints=(body,) if body else ())


_OPTIMIZER = _symbol(
    f"{_MODULE}:MegatronOptimizer",
    "the optimizer",
    *("config", "grad_norms_by_group", "get_parameters", "get_grad_stats_parallel_group"),
)
_GROUP = _symbol(f"{_MODULE}:GRAD_NORM_GROUP_ATTR", "how a parameter is marked for a norm apart")
_CLIP_APPLIER, _NORM, _SCALE = (
    _symbol(f"{_KERNELS}:{name}", "the norm's and the scaling's kernels, and what runs them")
    for name in ("multi_tensor_applier", "l2_norm_impl", "multi_tensor_scale_tensor_impl")
)
REPLACES_CLIPPING = (
    *(
        _symbol(f"{_OPTIMIZER.path}.{name}", "what clips gradients", body=body)
        for name, body in _METHODS.items()
    ),
    _symbol(f"{_KERNELS}:get_grad_norm_fp32", "the norm", body="b0a60a12290590e0"),
    _symbol(f"{_KERNELS}:clip_grad_by_total_norm_fp32", "the scaling", body="5649d79e2c3dcbe6"),
)

_OPTIMIZERS = "transformer_engine.pytorch.optimizers"
_FUSED = f"{_OPTIMIZERS}.fused_adam"
_ADAM = _symbol(
    f"{_FUSED}:FusedAdam",
    "the optimizer",
    *("capturable", "master_weights", "use_decoupled_grad", "multi_tensor_adam", "adam_w_mode"),
    "_dummy_overflow_buf",
)
_APPLIER = _symbol(f"{_FUSED}:multi_tensor_applier", "what runs its kernel")
_AT_MOST = _symbol(f"{_FUSED}:_MAX_TENSORS_PER_MULTI_TENSOR_ADAM_CALL", "the tensors of one call")
_APPLIES = _symbol(f"{_OPTIMIZERS}.multi_tensor_apply:MultiTensorApply", "what runs kernels")
REPLACES_STEP = (
    _symbol(f"{_ADAM.path}.step", "its step", body="80a579d335ac25c3"),
    _symbol(f"{_ADAM.path}.get_unscaled_state", "its moments", body="e675df68fc21fd25"),
    _symbol(f"{_APPLIES.path}.__call__", "what runs its kernel", body="ac91ff4a196ee3fc"),
)
RELIES_ON = (
    *(*REPLACES_CLIPPING, _OPTIMIZER, _GROUP, _CLIP_APPLIER, _NORM, _SCALE),
    _symbol(
        "megatron.core.optimizer.optimizer_config:OptimizerConfig",
        "the optimizer's options",
        *("clip_grad", *_PRECISION),
    ),
    *(*REPLACES_STEP, _ADAM, _APPLIER, _APPLIES, _AT_MOST),
)


def _are_plain(tensors: Sequence[Any]) -> bool:
    return set(map(type, tensors)) <= _PLAIN and {t.dtype for t in tensors} <= {torch.float32}


def install_clip(optimizers: Iterable[Any]) -> Undo:
    """Shorten ``clip_grad_norm`` of the optimizers that are Megatron's; returns the undo.

    Raises NotApplicableError if none of them clips in the way that this replaces.
    """
    if _MODULE not in sys.modules:
        raise NotApplicableError("no optimizer is Megatron's")
    whys = {optimizer: _why_not(optimizer) for optimizer in optimizers}
    mine = [optimizer for optimizer, why in whys.items() if why is None]
    if not mine:
        raise NotApplicableError(next(filter(None, whys.values()), "there is no optimizer"))
    return all_of(put_over(optimizer, _CLIP, LocalClip(optimizer)) for optimizer in mine)


def _why_not(optimizer: Any) -> str | None:
    megatrons = _OPTIMIZER.find()
    if not isinstance(optimizer, megatrons):
        return "the optimizer is not Megatron's"
    if hasattr(optimizer, "chained_optimizers"):
        # Megatron chains optimizers if a rank has several model chunks.
        return "optimizers are chained, and the chain clips gradients itself"
    for name in _METHODS:
        inherited = getattr(type(optimizer), name) is getattr(megatrons, name)
        if name in vars(optimizer) or not inherited:
            return f"the optimizer has a {name} of its own"
    if any(getattr(optimizer.config, name) for name in _PRECISION):
        return "the precision-aware optimizer has gradients of another kind"
    if _SCALE.find() is None or not hasattr(_CLIP_APPLIER.find(), "chunk_size"):
        return "Transformer Engine is not installed, and gradients are scaled one by one"
    return None


def _counting(optimizer: Any, parameters: Sequence[Any]) -> list[bool]:
    """See Note [Which gradients count]; empty if gradients must be clipped by Megatron's function.

    Megatron's filter gets places instead of gradients.
    """
    group = _GROUP.find()
    for parameter in parameters:
        is_apart = getattr(parameter, group, None) is not None
        if is_apart or not getattr(parameter, "__fsdp_param__", False):
            return []
    stand_ins = [
        SimpleNamespace(**{**vars(parameter), "grad": SimpleNamespace(_local_tensor=place)})
        for place, parameter in enumerate(parameters)
    ]
    counting = frozenset(optimizer._filter_grads_for_norm(stand_ins))
    return [place in counting for place in range(len(parameters))]


class LocalClip:
    """Replaces ``MegatronOptimizer.clip_grad_norm``."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._original = optimizer, optimizer.clip_grad_norm
        self._parameters: list[Any] = []
        self._counts: list[bool] = []
        self.calls = 0
        """Number of calls that were not Megatron's own."""

    @in_range("clip gradients")
    def __call__(self, clip_grad: float) -> Any:
        """Scale the gradients down if their norm is above ``clip_grad``; returns the norm."""
        parameters, known = self._optimizer.get_parameters(), self._parameters
        if len(parameters) != len(known) or not all(map(is_, parameters, known)):
            self._parameters = parameters
            self._counts = _counting(self._optimizer, parameters)
        counted, scaled = self._gradients()
        chunk_size = getattr(_CLIP_APPLIER.find(), "chunk_size", None)
        if not counted or chunk_size is None or not clip_grad > 0.0:
            return self._original(clip_grad)
        self.calls += 1
        with torch.no_grad():
            return self._clip(clip_grad, chunk_size, counted, scaled)

    def _gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those of the norm, and those to scale; none if Megatron's own function must run."""
        gradients = [parameter.grad for parameter in self._parameters]
        given = [gradient is not None for gradient in gradients]
        if not self._counts:
            return [], []
        local = [gradient._local_tensor for gradient in compress(gradients, given)]
        if not _are_plain(local):
            return [], []
        sizes = list(map(torch.Tensor.numel, local))
        scaled = list(compress(local, sizes))
        return list(compress(scaled, compress(compress(self._counts, given), sizes))), scaled

    def _clip(
        self,
        clip_grad: float,
        chunk_size: int,
        counted: list[torch.Tensor],
        scaled: list[torch.Tensor],
    ) -> torch.Tensor:
        flag_of_norm, flag_of_scale = torch.zeros(2, dtype=torch.int, device="cuda").split(1)
        root, _ = _NORM.find()(chunk_size, flag_of_norm, [counted], False)
        total: torch.Tensor = root**2.0
        group = self._optimizer.get_grad_stats_parallel_group()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        norm = total.pow(1.0 / 2.0)
        self._optimizer._compute_grad_norms_by_group()
        factor = (clip_grad / (norm + 1.0e-6)).clamp_max_(1.0)
        _SCALE.find()(chunk_size, flag_of_scale, [scaled, scaled], factor)
        return norm


def install_adam(optimizers: Iterable[Any]) -> Undo:
    """Shorten the step of every FusedAdam among ``optimizers``; returns the undo.

    ``optimizers`` are Megatron's, chained or not, or torch's.

    Raises NotApplicableError if none of them is a FusedAdam with simple lists.
    """
    if _FUSED not in sys.modules:
        raise NotApplicableError("no optimizer is Transformer Engine's FusedAdam")
    kind = _ADAM.find()
    adams = dict.fromkeys(inner for inner in _inner(optimizers) if type(inner) is kind)
    simple = [adam for adam in adams if not _is_special(adam)]
    if not simple:
        why = "is not FusedAdam"
        if adams:
            why = "keeps main weights itself, runs in a graph, or has a step of its own"
        raise NotApplicableError(f"the optimizer {why}")
    return all_of(put_over(adam, "step", LocalStep(adam)) for adam in simple)


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
        self.calls = 0
        """Number of calls that were not TE's own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step. With arguments or with torch's hooks it is TE's own step."""
        adam, applier = self._adam, _APPLIER.find()
        is_usual = type(applier) is _APPLIES.cached and not (args or kwargs or _has_hooks(adam))
        launches = self._launches() if is_usual else None
        if launches is None:
            return self._original(*args, **kwargs)
        for group in adam.param_groups:
            group["step"] += 1
        with torch.no_grad():
            for tensors, numbers in launches:
                flag = adam._dummy_overflow_buf
                adam.multi_tensor_adam(applier.chunk_size, flag, tensors, *numbers)
        self.calls += 1
        return None

    def _launches(self) -> list[tuple[list[list[torch.Tensor]], tuple[Any, ...]]] | None:
        """Tensors and numbers of each launch of the next step; None if TE's own step must run."""
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
                    launches.append((some, numbers))
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
    return lists if all(map(_are_plain, lists)) else None
