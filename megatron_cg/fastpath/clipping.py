"""Gradient clipping from lists of local tensors; see ``local_tensors.py``.

Note [Which gradients count]
    The norm excludes a shared weight, and a weight that other ranks have as well. Megatron's own
    function decides this from the parameter's attributes, whether or not it has a gradient in this
    step. It is called once for the parameters that the optimizer has.

Note [Ranks may differ]
    Megatron's clipping and this one issue the same single all-reduce, so some ranks may take the
    shorter way and others not. If a rank clips some parameters separately, by a norm of their own,
    there is a further all-reduce. Megatron's first call asks all ranks about this, and its recorded
    answer is read here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import compress
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_cg.fastpath.local_tensors import APPLIER, Launch, Shorter, are_plain
from megatron_cg.fastpath.part import NotApplicableError, part_symbol
from megatron_cg.ranges import in_range
from megatron_cg.upstream.patch import put_over

_MODULE = "megatron.core.optimizer.optimizer"
_KERNELS = "megatron.core.optimizer.clip_grads"
_CLIP, _APART, _OF_FSDP = "clip_grad_norm", "_has_grad_norm_group_cache", "__fsdp_param__"
_PRECISION = ("use_precision_aware_optimizer", "use_precision_aware_optimizer_no_fp8_or_ds_fp8")
_METHODS = {
    _CLIP: "5b555005885178d7",
    "get_grads_for_grad_norm": "85f50b4bbe342e75",
    "_filter_grads_for_norm": "cea6e5b8e038f583",
    "_compute_grad_norms_by_group": "9313eb31f4623e55",
    "has_grad_norm_group": "ec8c4b5ded202ff1",
}
"""The methods of an optimizer that clip, with the fingerprint of each."""


_OPTIMIZER = part_symbol(
    f"{_MODULE}:MegatronOptimizer",
    "the optimizer",
    *(_APART, "config", "grad_norms_by_group", "get_parameters", "get_grad_stats_parallel_group"),
)
_GROUPS = part_symbol(f"{_MODULE}:SEPARATE_GRAD_NORM_GROUPS", "what is clipped apart")
_GROUP = part_symbol(f"{_MODULE}:GRAD_NORM_GROUP_ATTR", "how a parameter is marked to be")
_FUNCTIONS = tuple(
    part_symbol(f"{_KERNELS}:{name}", "the norm's and the scaling's kernels, and what runs them")
    for name in (APPLIER, "l2_norm_impl", "multi_tensor_scale_tensor_impl")
)
REPLACES = (
    *(
        part_symbol(f"{_OPTIMIZER.path}.{name}", "what clips gradients", body=body)
        for name, body in _METHODS.items()
    ),
    part_symbol(f"{_KERNELS}:get_grad_norm_fp32", "the norm", body="b0a60a12290590e0"),
    part_symbol(f"{_KERNELS}:clip_grad_by_total_norm_fp32", "the scaling", body="5649d79e2c3dcbe6"),
)
RELIES_ON = (
    *(*REPLACES, _OPTIMIZER, _GROUPS, _GROUP, *_FUNCTIONS),
    part_symbol(
        "megatron.core.optimizer.optimizer_config:OptimizerConfig",
        "the optimizer's options",
        *("clip_grad", *_PRECISION),
    ),
)


def install_clip(optimizers: Iterable[Any]) -> Callable[[], None]:
    """Shorten ``clip_grad_norm`` of the optimizers that are Megatron's; returns the undo.

    Raises:
        NotApplicableError: none of them clips in the way that this replaces.
        UpstreamChangedError: a symbol that this relies on is gone; nothing is changed then.
    """
    if _MODULE not in sys.modules:
        raise NotApplicableError("no optimizer is Megatron's")
    for symbol in RELIES_ON:
        symbol.find()
    whys = {id(optimizer): (optimizer, _why_not(optimizer)) for optimizer in optimizers}
    mine = [optimizer for optimizer, why in whys.values() if why is None]
    if not mine:
        raise NotApplicableError(next((why for _, why in whys.values()), "there is no optimizer"))
    with ExitStack() as undo:
        for optimizer in mine:
            undo.callback(put_over(optimizer, _CLIP, LocalClip(optimizer)))
        return undo.pop_all().close


def _why_not(optimizer: Any) -> str | None:
    """Why gradients of ``optimizer`` are never clipped here; None if they may be."""
    megatrons = _OPTIMIZER.find()
    if not isinstance(optimizer, megatrons):
        return "the optimizer is not Megatron's"
    if hasattr(optimizer, "chained_optimizers"):
        # ``ChainedOptimizer.step`` clips without ``clip_grad_norm``. Megatron chains optimizers if
        # a rank has several model chunks.
        return "optimizers are chained, and the chain clips gradients itself"
    for name in _METHODS:
        inherited = getattr(type(optimizer), name) is getattr(megatrons, name)
        if name in vars(optimizer) or not inherited:
            return f"the optimizer has a {name} of its own"
    return _unusual(optimizer) or _unusual_parameters(optimizer.get_parameters())


def _unusual(optimizer: Any) -> str | None:
    if any(getattr(optimizer.config, name) for name in _PRECISION):
        return "the precision-aware optimizer has gradients of another kind"
    applier, _, scale = (symbol.find() for symbol in _FUNCTIONS)
    if scale is None or not hasattr(applier, "chunk_size"):
        return "Transformer Engine is not installed, and gradients are scaled one by one"
    return None


def _unusual_parameters(parameters: Sequence[Any]) -> str | None:
    if not all(getattr(parameter, _OF_FSDP, False) for parameter in parameters):
        return "the optimizer has parameters that are not Megatron-FSDP's"
    group = _GROUP.find()
    if any(getattr(parameter, group, None) is not None for parameter in parameters):
        return "some parameters are clipped apart from others"
    return None


def _counting(optimizer: Any, parameters: Sequence[Any]) -> list[bool]:
    """See Note [Which gradients count]. Megatron's function gets places instead of gradients."""
    stand_ins = [
        SimpleNamespace(**{**vars(parameter), "grad": SimpleNamespace(_local_tensor=place)})
        for place, parameter in enumerate(parameters)
    ]
    counting = frozenset(optimizer._filter_grads_for_norm(stand_ins))
    return [place in counting for place in range(len(parameters))]


def _factor(clip_grad: float, norm: torch.Tensor) -> torch.Tensor:
    return (clip_grad / (norm + 1.0e-6)).clamp_max_(1.0)


def _scales_by_norm(clip_grad: float, norm: torch.Tensor, scale: Launch) -> bool:
    """Whether the factor of a launch is the one of this module bit for bit, NaN included."""
    theirs, ours = scale.numbers[0], _factor(clip_grad, norm)
    alike = theirs.dtype == ours.dtype and theirs.shape == ours.shape
    return alike and torch.equal(theirs.view(torch.int32), ours.view(torch.int32))


class LocalClip(Shorter):
    """Replaces ``MegatronOptimizer.clip_grad_norm``."""

    def __init__(self, optimizer: Any) -> None:
        what = "gradients are clipped by Megatron's own function"
        super().__init__(optimizer.clip_grad_norm, _KERNELS, what)
        self._optimizer = optimizer
        self._counts: list[bool] = []

    @in_range("clip gradients")
    def __call__(self, clip_grad: float) -> Any:
        """Scale the gradients down if their norm is above ``clip_grad``; returns the norm."""
        if self.differs or _unusual(self._optimizer) or not clip_grad > 0.0:
            return self.original(clip_grad)
        parameters = self._optimizer.get_parameters()
        functions = [symbol.find() for symbol in _FUNCTIONS]
        objects = (*functions, *parameters)
        is_known = self.is_known(objects)
        if not is_known:
            if _unusual_parameters(parameters):
                return self.original(clip_grad)
            self._counts = _counting(self._optimizer, parameters)
        launches = self._launches(functions, parameters)
        if launches is None or (is_known and not self._clips_together()):
            return self.original(clip_grad)
        if not is_known:
            agrees = partial(_scales_by_norm, clip_grad)
            return self.compared(launches, objects, clip_grad, agrees=agrees)
        self.calls += 1
        with torch.no_grad():
            return self._clip(clip_grad, *launches)

    def _clips_together(self) -> bool:
        """Whether no rank clips any parameters separately; see Note [Ranks may differ]."""
        noted = vars(self._optimizer).get(_APART) or {}
        return all(noted.get(group) is False for group in _GROUPS.find())

    def _launches(
        self, functions: Sequence[Any], parameters: Sequence[Any]
    ) -> tuple[Launch, Launch] | None:
        """The launches for the current gradients; None if Megatron's own function must run.

        That of the scaling is without its factor, which is not known yet.
        """
        gradients = [parameter.grad for parameter in parameters]
        given = [gradient is not None for gradient in gradients]
        local = [gradient._local_tensor for gradient in compress(gradients, given)]
        if not are_plain(local):
            return None
        sizes = list(map(torch.Tensor.numel, local))
        scaled = list(compress(local, sizes))
        counted = list(compress(scaled, compress(compress(self._counts, given), sizes)))
        if not counted:
            return None
        applier, norm, scale = functions
        size = applier.chunk_size
        return Launch(norm, size, [counted], (False,)), Launch(scale, size, [scaled] * 2, (None,))

    def _clip(self, clip_grad: float, of_norm: Launch, of_scale: Launch) -> torch.Tensor:
        self._optimizer.grad_norms_by_group = {}
        flag_of_norm, flag_of_scale = torch.zeros(2, dtype=torch.int, device="cuda").split(1)
        root, _ = of_norm(flag_of_norm)
        total: torch.Tensor = root**2.0
        group = self._optimizer.get_grad_stats_parallel_group()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        norm = total.pow(1.0 / 2.0)
        replace(of_scale, numbers=(_factor(clip_grad, norm),))(flag_of_scale)
        return norm
