"""Gradient clipping without reading all attributes of every parameter in each step.

Before its step Megatron's optimizer computes the norm of all gradients and scales them by it: a few
kernels and a collective. The host takes longer than the GPU, because it walks over the parameters
several times. For each one it reads attributes that do not change, unwraps its DTensor twice, and
formats the name of its gradient's type. Here these attributes are read once, and the same kernels
get the same lists.

Note [Once by Megatron, then shorter]
    The first call is Megatron's own. The kernels and the arguments that reach them (addresses,
    sizes and numbers, and the scale factor of the gradients) are compared with those from this
    module. Only if they are the same do later calls take the shorter way. Gradients are looked up
    in each call. If parameters or kernels change, they are compared again.

Note [Which gradients count]
    The norm excludes a shared weight, and a weight that other ranks have as well. Megatron's own
    functions decide this from the parameter's attributes, whether or not it has a gradient in this
    step. They are called once, for exactly the parameters that the optimizer has.

Note [Ranks may differ]
    Megatron's function and this one issue the same single all-reduce, so some ranks may take the
    shorter way and others not. If a rank clips some parameters separately, by a norm of their own,
    there is a further all-reduce. Megatron's first call asks all ranks about this, and its recorded
    answer is read here.

Note [Chained optimizers]
    ``ChainedOptimizer.step`` clips without ``clip_grad_norm``, whatever the number of optimizers,
    and is left unchanged. Megatron chains optimizers under Megatron-FSDP if a rank has several
    model chunks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from operator import is_
from typing import Any

import torch
import torch.distributed as dist

from megatron_cg.fastpath.not_applicable import NotApplicableError
from megatron_cg.fastpath.optimizer.launches import Launch, are_plain, launched_by
from megatron_cg.upstream.patch import put_over
from megatron_cg.upstream.symbols import Symbol

logger = logging.getLogger(__name__)

_MODULE = "megatron.core.optimizer.optimizer"
_KERNELS = "megatron.core.optimizer.clip_grads"
_CLIP, _APART = "clip_grad_norm", "_has_grad_norm_group_cache"
_OF_FSDP = "__fsdp_param__"
_PRECISION = ("use_precision_aware_optimizer", "use_precision_aware_optimizer_no_fp8_or_ds_fp8")


def _megatron(
    path: str,
    expected: str,
    *parameters: str,
    attributes: tuple[str, ...] = (),
    fingerprint: str = "",
) -> Symbol:
    fingerprints = (fingerprint,) if fingerprint else ()
    return Symbol("megatron-core", path, expected, parameters, attributes, fingerprints)


_CALLED = {
    "get_grads_for_grad_norm": "85f50b4bbe342e75",
    "_filter_grads_for_norm": "cea6e5b8e038f583",
    "_compute_grad_norms_by_group": "9313eb31f4623e55",
    "has_grad_norm_group": "ec8c4b5ded202ff1",
}
"""What clipping calls, with the fingerprint of each."""
_OPTIMIZER = _megatron(
    f"{_MODULE}:MegatronOptimizer",
    "the optimizer",
    attributes=(
        *(_APART, "config", "grad_norms_by_group"),
        *("get_parameters", "get_grad_stats_parallel_group"),
    ),
)
_FUNCTION = _megatron(
    f"{_OPTIMIZER.path}.{_CLIP}",
    "what clips gradients",
    *("self", "clip_grad"),
    fingerprint="5b555005885178d7",
)
_IN_IT = tuple(
    _megatron(f"{_OPTIMIZER.path}.{name}", "a part of it", fingerprint=fingerprint)
    for name, fingerprint in _CALLED.items()
)
_CONFIG = _megatron(
    "megatron.core.optimizer.optimizer_config:OptimizerConfig",
    "the optimizer's options",
    attributes=("clip_grad", *_PRECISION),
)
_GROUPS = _megatron(f"{_MODULE}:SEPARATE_GRAD_NORM_GROUPS", "what is clipped apart")
_GROUP = _megatron(f"{_MODULE}:GRAD_NORM_GROUP_ATTR", "how a parameter is marked to be")
_NOT_SHARED = _megatron(f"{_MODULE}:param_is_not_shared", "which weights are shared", "param")
_NOT_OF_TP = _megatron(
    f"{_MODULE}:tensor_parallel.param_is_not_tensor_parallel_duplicate",
    "which weights other ranks have, too",
    *("param", "tp_group", "expert_tp_group"),
)
_NOT_OF_GTP = _megatron(
    f"{_MODULE}:tensor_parallel.param_is_not_gtp_duplicate",
    "which weights other ranks have, too",
    "param",
)
_NORM = _megatron(
    f"{_KERNELS}:get_grad_norm_fp32",
    "the norm",
    *("grads_for_norm", "grad_stats_parallel_group"),
    fingerprint="b0a60a12290590e0",
)
_SCALE = _megatron(
    f"{_KERNELS}:clip_grad_by_total_norm_fp32",
    "the scaling",
    *("parameters", "max_norm"),
    fingerprint="5649d79e2c3dcbe6",
)
_APPLIER = _megatron(f"{_KERNELS}:multi_tensor_applier", "what runs its kernels")
_NORM_KERNEL = _megatron(f"{_KERNELS}:l2_norm_impl", "the norm's kernel")
_SCALE_KERNEL = _megatron(f"{_KERNELS}:multi_tensor_scale_tensor_impl", "the scaling's kernel")
REPLACES = (_FUNCTION, *_IN_IT, _NORM, _SCALE)
RELIES_ON = (
    *(*REPLACES, _OPTIMIZER, _CONFIG, _GROUPS, _GROUP, _NOT_SHARED, _NOT_OF_TP, _NOT_OF_GTP),
    *(_APPLIER, _NORM_KERNEL, _SCALE_KERNEL),
)


def install_clip(optimizers: Iterable[Any]) -> Callable[[], None]:
    """Shorten ``clip_grad_norm`` of Megatron's optimizers; returns the undo.

    Args:
        optimizers: the optimizers of Megatron-FSDP's parameters, Megatron's or torch's.

    Raises:
        NotApplicableError: none of them clips in the way that this replaces.
        UpstreamChangedError: a symbol that this relies on is gone; nothing is changed then.
    """
    if _MODULE not in sys.modules:
        raise NotApplicableError("no optimizer is Megatron's")
    for symbol in RELIES_ON:
        symbol.find()
    given = {id(optimizer): optimizer for optimizer in optimizers}.values()
    whys = [_why_not(optimizer) for optimizer in given]
    mine = [optimizer for optimizer, why in zip(given, whys, strict=True) if why is None]
    if not mine:
        raise NotApplicableError(next(filter(None, whys), "there is no optimizer"))
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
        return "optimizers are chained, and the chain clips gradients itself"
    for name in (_CLIP, *_CALLED):
        inherited = getattr(type(optimizer), name) is getattr(megatrons, name)
        if name in vars(optimizer) or not inherited:
            return f"the optimizer has a {name} of its own"
    if not optimizer.config.clip_grad > 0:
        return "gradients are not clipped"
    return _unusual(optimizer) or _unusual_parameters(optimizer.get_parameters())


def _unusual(optimizer: Any) -> str | None:
    if any(getattr(optimizer.config, name) for name in _PRECISION):
        return "the precision-aware optimizer has gradients of another kind"
    if _SCALE_KERNEL.find() is None or not hasattr(_APPLIER.find(), "chunk_size"):
        return "Transformer Engine is not installed, and gradients are scaled one by one"
    return None


def _unusual_parameters(parameters: Sequence[Any]) -> str | None:
    if not parameters:
        return "the optimizer has no parameters"
    if not all(getattr(parameter, _OF_FSDP, False) for parameter in parameters):
        return "the optimizer has parameters that are not Megatron-FSDP's"
    group = _GROUP.find()
    if any(getattr(parameter, group, None) is not None for parameter in parameters):
        return "some parameters are clipped apart from others"
    return None


@dataclass(frozen=True)
class _Known:
    """What does not change about an optimizer's parameters, in the optimizer's order."""

    parameters: Sequence[Any]
    counts: Sequence[bool]
    """See Note [Which gradients count]."""
    functions: tuple[Any, ...]
    """Applier and kernels."""

    @classmethod
    def of(cls, optimizer: Any, parameters: Sequence[Any]) -> _Known | None:
        """None if this cannot clip their gradients."""
        if _unusual_parameters(parameters):
            return None
        not_shared, not_of_tp = _NOT_SHARED.find(), _NOT_OF_TP.find()
        not_of_gtp = _NOT_OF_GTP.find()
        groups = {name: getattr(optimizer, name, None) for name in ("tp_group", "expert_tp_group")}
        counts = [
            bool(not_shared(p) and not_of_tp(p, **groups) and not_of_gtp(p)) for p in parameters
        ]
        return cls(parameters, counts, _functions())

    def still(self, parameters: Sequence[Any]) -> bool:
        """Whether parameters and kernels are still the same objects."""
        return (
            len(parameters) == len(self.parameters)
            and all(map(is_, parameters, self.parameters))
            and all(map(is_, _functions(), self.functions))
        )

    def launches(self) -> _Launches | None:
        """Launches for the current gradients; None if Megatron's own function must run."""
        gradients, counts = [], []
        for parameter, counting in zip(self.parameters, self.counts, strict=True):
            gradient = parameter.grad
            if gradient is not None:
                gradients.append(gradient)
                counts.append(counting)
        local = [gradient._local_tensor for gradient in gradients]
        # Megatron's own function asserts that they are on the GPU.
        on_gpu = torch.empty(0, device="cuda").is_cuda
        if not are_plain(local) or any(tensor.is_cuda is not on_gpu for tensor in local):
            return None
        sizes = list(map(torch.Tensor.numel, local))
        scaled = list(compress(local, sizes))
        counted = list(compress(scaled, compress(counts, sizes)))
        if any(counts) and not counted:  # no kernel runs, and Megatron's own function raises
            return None
        applier, norm, scale = self.functions
        size = applier.chunk_size
        return _Launches(
            Launch(norm, size, [counted], (False,)) if counted else None,
            Launch(scale, size, [scaled, scaled], (None,)) if scaled else None,
        )


@dataclass(frozen=True)
class _Launches:
    """The two launches; None for a launch without gradients."""

    norm: Launch | None
    scale: Launch | None
    """Without the factor, which is not known yet."""

    def are(self, found: Sequence[Launch]) -> bool:
        """Whether ``found`` are the same launches."""
        facts = [launch.facts() for launch in (self.norm, self.scale) if launch is not None]
        return facts == [launch.facts() for launch in found]


def _functions() -> tuple[Any, ...]:
    return _APPLIER.find(), _NORM_KERNEL.find(), _SCALE_KERNEL.find()


def _flag() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int, device="cuda")


def _factor(clip_grad: float, norm: torch.Tensor) -> torch.Tensor:
    return (clip_grad / (norm + 1.0e-6)).clamp_max_(1.0)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are equal bit for bit, NaN included."""
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(one.view(torch.int32), other.view(torch.int32))


class LocalClip:
    """Replaces ``MegatronOptimizer.clip_grad_norm``."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._original = optimizer, optimizer.clip_grad_norm
        self._differs = False
        self._known: _Known | None = None
        self.calls = 0
        """Number of calls that were not Megatron's own."""

    def __call__(self, clip_grad: float) -> Any:
        """Scale the gradients down if their norm is above ``clip_grad``; returns the norm."""
        if self._differs or _unusual(self._optimizer) or not clip_grad > 0.0:
            return self._original(clip_grad)
        parameters = self._optimizer.get_parameters()
        if self._known is None or not self._known.still(parameters):
            return self._compared(clip_grad, _Known.of(self._optimizer, parameters))
        launches = self._known.launches() if self._clips_together() else None
        if launches is None:
            return self._original(clip_grad)
        self.calls += 1
        with torch.no_grad():
            return self._clip(clip_grad, launches)

    def _clips_together(self) -> bool:
        """Whether no rank clips any parameters separately; see Note [Ranks may differ]."""
        noted = vars(self._optimizer).get(_APART) or {}
        return all(noted.get(group) is False for group in _GROUPS.find())

    def _clip(self, clip_grad: float, launches: _Launches) -> torch.Tensor:
        optimizer = self._optimizer
        optimizer.grad_norms_by_group = {}
        if launches.norm is None:
            total = torch.zeros(1, dtype=torch.float, device="cuda")
        else:
            norm, _ = launches.norm(_flag())
            total = norm**2.0
        group = optimizer.get_grad_stats_parallel_group()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        norm = total.pow(1.0 / 2.0)
        if launches.scale is not None:
            replace(launches.scale, numbers=(_factor(clip_grad, norm),))(_flag())
        return norm

    def _compared(self, clip_grad: float, known: _Known | None) -> Any:
        """Run Megatron's own call and compare: later calls take the shorter way, or never do."""
        self._known = None
        launches = known.launches() if known is not None else None
        # During a capture the host cannot read the factor.
        capturing = torch.cuda.is_current_stream_capturing()
        if launches is None or None in (launches.norm, launches.scale) or capturing:
            return self._original(clip_grad)
        norm, found = launched_by(partial(self._original, clip_grad), _KERNELS)
        if launches.are(found) and _same(found[-1].numbers[0], _factor(clip_grad, norm)):
            self._known = known
        else:
            self._differs = True
            logger.warning(
                "FSDP fast path: gradients are clipped by Megatron's own function, because what "
                "it hands to its kernels is not what was expected."
            )
        return norm
