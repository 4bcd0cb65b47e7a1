"""Parts for Megatron-FSDP v2: what it computes anew is kept while graphs live.

Note [A layout is a value]
    v2 lays out a buffer for the gradients of each group in each microbatch, and for its weights in
    each step. It checks each layout, for which it defines a class (``GlobalLayout.__post_init__``).
    That is half of the time of its hooks. A layout depends only on the shapes and the number of
    shards, and it is frozen, so buffers can share it.

Note [Kept as long as the memory]
    A group takes a view or a DTensor of each parameter from its buffers of weights and of gradients
    in each microbatch. Here each is made once. Only these two buffers keep them: a buffer that
    takes the place of one makes its own. A buffer whose memory is replaced makes new ones; the
    storage shows that, as in ``bucketing.py``. With replicas over which gradients are reduced at
    the last microbatch, v2 makes a new buffer of gradients in each step. There is nothing to keep
    then, and the old one must be freed.

Note [A buffer without memory]
    v2 packs the gradients of a group into a new buffer, which it drops when the next group has its
    own. Here the buffer and its views stay, and only its memory comes and goes, as v2 does it with
    weights: on the same stream and between the same calls, so that allocations keep their order.
    One call copies all gradients. A verified step compares whole buffers, also the gaps between
    tensors: with deterministic algorithms they are filled as ``torch.empty`` would have done.

Note [Weights that autograd does not visit]
    See ``detached_weights.py``. A gradient from a graph becomes the weight's ``grad`` where the
    graph left it, and is counted, as v2's hook of the weight would do. The last gradient of a
    module lets v2 pack and reduce them, before the next replay. Those that v2 leaves there, or that
    wait for others, are copied out of the graph's memory, as a backend does. For a weight that has
    another use autograd calls the hook, once in a pass, so each weight counts once. If all weights
    of a module count before a graph's backward pass, v2's ``post_backward`` waits for that.

Note [Casts for the optimizer]
    v2 reduces gradients in the dtype of the weights, and Megatron's optimizer casts each for the
    step, as a DTensor. Here each DTensor is made once, and the memory of its first cast is freed at
    once. One call fills memory that lives for the step, and that is borrowed as in Note [Copies in
    borrowed memory] of ``optimizer_step.py``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any
from weakref import finalize

import torch
from packaging.version import Version
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_cg.fastpath.detached_weights import DetachedWeights, detach_in_graphs
from megatron_cg.fastpath.optimizer_step import IdlePool, copied, inner_optimizers
from megatron_cg.fastpath.part import NotApplicableError, known
from megatron_cg.fsdp.roles import fsdp_v2, unsharded_parameters
from megatron_cg.replay.borders import same_placements
from megatron_cg.replay.guarded_graph import ReplayFunction
from megatron_cg.upstream import patch
from megatron_cg.upstream.symbols import Symbol, installed_version

_LAYOUT, _BUFFER = "layout:GlobalLayout", "dbuffer:DBuffer"
_GROUP, _MODULE = "parameter_group:FsdpParameterGroup", "module:FsdpModule"
_ALLOCATE, _COPY = "allocate_partial_grad_buffer", "copy_gradients_to_partial_buffer"
_REDUCE = "reduce_partial_gradients"


def _of_v2(path: str, expected: str, *fingerprints: str) -> tuple[Symbol, ...]:
    return fsdp_v2(path, expected, fingerprints=fingerprints)


REPLACES_LAYOUTS = (
    *_of_v2(f"{_LAYOUT}.build", "lays out a buffer", "65d667e7adb9f2ac"),
    *_of_v2(f"{_LAYOUT}.__post_init__", "checks it", "dcfbd2dbdc608cbe"),
)
_VIEW = _of_v2(f"{_BUFFER}.get_local_tensor", "a view", "15cd9ae6b2603518")
REPLACES_VIEWS = (
    *_VIEW,
    *_of_v2(f"{_BUFFER}.get_dtensor", "as a DTensor", "64b72abcf05a58be", "f26bcecbad026ce9"),
)
REPLACES_PACKING = (
    *_VIEW,
    *_of_v2(f"{_BUFFER}.reallocate_storage", "allocates memory", "9cc8f2a8bde0763a"),
    *_of_v2(f"{_BUFFER}.release_storage", "frees it", "66b6959ac6e30e59"),
    *_of_v2(f"{_GROUP}.{_ALLOCATE}", "for gradients", "07bca1c25b151b7f", "1130e7458da32260"),
    *_of_v2(f"{_GROUP}.{_COPY}", "copies them there", "c3dd03a9739fb3aa", "34054b43f1f9ab8e"),
    *_of_v2(f"{_GROUP}.{_REDUCE}", "reduces them", "0933f63f3a9d06ef", "19f0a26ca375d113"),
    *_of_v2(f"{_MODULE}._reduce_gradient_groups", "calls these", "fc3229fd7ba0e3fd"),
)
_HOOKS = ("395a512527abdb36", "5434a71c351faf49", "4d981763f9c53408")
REPLACES_HOOKS = (
    *REPLACES_PACKING,  # That is when gradients in a graph's memory are read.
    *_of_v2(f"{_MODULE}._register_hooks", "counts gradients", *_HOOKS),
    *_of_v2(f"{_MODULE}._make_grad_hook|_register_hooks", "the hook that does", *_HOOKS),
    *_of_v2(f"{_MODULE}.pre_forward", "begins to count", "bdf5c959da96d346", "64bc2a3863e0e976"),
    *_of_v2(f"{_MODULE}.post_backward", "is called then", "2492ef316cb6d6d9", "f620c1ee1ae51236"),
)
_FILLS: Any = torch.utils.deterministic
_OPTIMIZER = "megatron.core.optimizer.fully_sharded_optimizer"
_OWN = f"{_OPTIMIZER}:FullyShardedOptimizer"
_CAST, _STEP = "_copy_model_grads_to_main_grads", "step_with_ready_grads"
_IN_CORE = Version(installed_version("megatron-core") or "0") >= Version("0.20.dev0")
"""Whether megatron-core has an optimizer for v2."""
_CASTS = (
    known(f"{_OWN}.{_CAST}", "what casts gradients for a step", "08a0433627ba6292"),
    known(f"{_OWN}.{_STEP}", "what drops the casts", "c05e44ef34e51e62"),
)
REPLACES_CASTS = _CASTS if _IN_CORE else ()
RELIES_ON = (
    *dict.fromkeys((*REPLACES_LAYOUTS, *REPLACES_VIEWS, *REPLACES_HOOKS)),
    *REPLACES_CASTS,
    *fsdp_v2(
        _GROUP,
        "parameters that are gathered together",
        *("main_weight", "main_grad", "_main_grad_placements|_accumulation_placements"),
        *("_owning_module|owning_module", "_symm_mem_pool"),
        "unsharded_parameters|fsdp_parameters",
    ),
    *fsdp_v2(
        _MODULE,
        "a sharded module",
        *("_num_ready_grad_parameters|_ready_grad_parameters", "_num_trainable_parameters"),
        "_parameter_groups",
    ),
)


def keep_layouts(group: Any) -> patch.Undo:
    """See Note [A layout is a value]. It is undone when ``group`` is gone, at the latest."""
    kind: Any = type(group._unsharded_model_weight.layout)
    laid_out = cache(kind.build)

    def build(shapes: Iterable[Iterable[int]], dp_size: int) -> Any:
        return laid_out(tuple(map(torch.Size, shapes)), dp_size)

    return finalize(group, patch.replace_function(kind, "build", build))


@patch.combined_undo
def keep_views(groups: Iterable[Any]) -> Iterator[patch.Undo]:
    """See Note [Kept as long as the memory]."""
    for group in groups:
        yield _kept(group._unsharded_model_weight, "get_local_tensor")
        if (gradients := group.main_grad) is None:
            continue
        of_pass = getattr(group, "_main_grad_placements", ()) or group._accumulation_placements
        if tuple(of_pass) == gradients.placements == group.main_weight.placements:
            yield _kept(gradients, "get_dtensor")


def _kept(buffer: Any, method: str) -> patch.Undo:
    original = getattr(buffer, method)
    found: dict[int, Any] = {}
    place: tuple[int, int] | None = None

    def of_index(index: int) -> Any:
        nonlocal place
        memory = buffer.local_buffer
        now = (memory.untyped_storage()._cdata, memory.storage_offset())
        if now != place:
            found.clear()
            place = now
        if index not in found:
            found[index] = original(index)
        return found[index]

    return patch.replace_function(buffer, method, of_index)


def _owner(group: Any) -> Any:
    return group._owning_module() if hasattr(group, "_owning_module") else group.owning_module


def pack_gradients(groups: Iterable[Any]) -> patch.Undo:
    """See Note [A buffer without memory]; returns the undo."""
    packed = [group for group in groups if group.requires_grad and group._symm_mem_pool is None]
    return patch.combine_undos(undo for group in packed for undo in _Packing(group).installed())


class _Packing:
    """Replaces how a group packs its gradients."""

    def __init__(self, group: Any) -> None:
        self._parameters = list(dict.fromkeys(unsharded_parameters(group)))
        self._group = group
        self._originals = [getattr(group, name) for name in (_ALLOCATE, _COPY, _REDUCE)]
        self._buffer: Any = None
        self._views: list[torch.Tensor] = []
        self._like: Any = None
        """The shapes of gradients, and the dtype and device of the first."""

    def installed(self) -> Iterator[patch.Undo]:
        functions: Any = {_ALLOCATE: self.allocate, _COPY: self.copy, _REDUCE: self.reduce}
        yield from (patch.replace_function(self._group, *pair) for pair in functions.items())
        yield partial(vars(self).update, _buffer=None, _views=[], _like=None)

    def allocate(self) -> Any:
        gradients: list[Any] = [parameter.grad for parameter in self._parameters]
        if any(gradient is None for gradient in gradients):
            return self._originals[0]()
        like = [gradients[0].dtype, gradients[0].device, *(each.shape for each in gradients)]
        if like != self._like:
            self._buffer = self._originals[0]()
            self._views = list(map(self._buffer.get_local_tensor, range(len(gradients))))
            self._like = like
        else:
            self._buffer.reallocate_storage()
            if torch.are_deterministic_algorithms_enabled() and _FILLS.fill_uninitialized_memory:
                self._buffer.local_buffer.fill_(torch.nan)
        return self._buffer

    @torch.no_grad()
    def copy(self, partial_grad: Any) -> None:
        if partial_grad is not self._buffer:
            self._originals[1](partial_grad)
            return
        gradients: Any = [parameter.grad for parameter in self._parameters]
        torch._foreach_copy_(self._views, gradients)
        for parameter in self._parameters:
            parameter.grad = None

    def reduce(self, partial_grad: Any, is_last_microbatch: bool = True) -> None:
        self._originals[2](partial_grad, is_last_microbatch)
        if partial_grad is self._buffer:
            partial_grad.release_storage()


def detach_weights(groups: Sequence[Any], replays: Sequence[ReplayFunction]) -> patch.Undo:
    """See Note [Weights that autograd does not visit]; returns the undo.

    Raises NotApplicableError if there are no graphs.
    """
    hooked = _Hooked(groups)
    detached = partial(detach_in_graphs, DetachedWeights(hooked), replays, lambda: None)
    return patch.combine_undos(put_in() for put_in in (hooked.install, detached))


class _Hooked:
    """Passes gradients of graphs to v2's hooks, as ``GradientBucketing`` does to v1's buckets."""

    def __init__(self, groups: Sequence[Any]) -> None:
        trained = [group for group in groups if group.requires_grad]
        self._modules = {id(one): _owner(g) for g in trained for one in unsharded_parameters(g)}
        self._to_come: dict[Any, list[Callable[[], bool]]] = {m: [] for m in self._modules.values()}
        """Of each sharded module: whether gradients of its graphs are still to come in a pass."""

    def install(self) -> patch.Undo:
        """Let the reduction of a module wait for its graphs; returns the undo."""
        return patch.combine_undos(
            patch.replace_function(m, "post_backward", partial(self._reduce, m, m.post_backward))
            for m in self._to_come
        )

    def _reduce(self, module: Any, own: Callable[[], None]) -> None:
        if not any(to_come() for to_come in self._to_come[module]):
            own()

    def knows(self, parameter: object) -> bool:
        return id(parameter) in self._modules

    def detach(self, weights: Sequence[nn.Parameter], to_come: Callable[[], bool]) -> Any:
        places: dict[Any, list[int]] = {}
        for place, weight in enumerate(weights):
            places.setdefault(self._modules[id(weight)], []).append(place)
        for module in places:
            self._to_come[module].append(to_come)
        return weights, places, to_come

    def attach(self, operation: Any) -> None:
        _, places, to_come = operation
        for module in places:
            self._to_come[module].remove(to_come)

    @torch.no_grad()
    def take_detached(
        self, operation: Any, gradients: list[torch.Tensor | None], used: Sequence[bool]
    ) -> None:
        """See Note [Weights that autograd does not visit]."""
        weights, places, _ = operation
        for module, own in places.items():
            given = [(weights[at], g, used[at]) for at in own if (g := gradients[at]) is not None]
            for weight, gradient, _ in given:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
            try:
                if _is_whole(module, [weight for weight, _, counted in given if not counted]):
                    module.post_backward()
            finally:
                for weight, gradient, _ in given:
                    if weight.grad is gradient:
                        weight.grad = gradient.clone()


def _is_whole(module: Any, weights: Sequence[Any]) -> bool:
    """Count these as v2's hooks do, but in one go: a module's attributes are slow to set."""
    if hasattr(module, "_num_ready_grad_parameters"):
        module._num_ready_grad_parameters += len(weights)
        return bool(module._num_ready_grad_parameters == module._num_trainable_parameters)
    module._ready_grad_parameters.update(weights)
    return bool(len(module._ready_grad_parameters) == module._num_trainable_parameters)


def install_casts(optimizers: Iterable[Any], scratch: IdlePool | None = None) -> patch.Undo:
    """See Note [Casts for the optimizer]; returns the undo. ``scratch``: None, ordinary memory.

    Raises NotApplicableError if no optimizer is Megatron's own for v2, or it casts nothing.
    """
    own = [one for one in inner_optimizers(optimizers) if type(one).__module__ == _OPTIMIZER]
    found = dict.fromkeys(one for one in own if not one.config.use_precision_aware_optimizer)
    if not found:
        raise NotApplicableError("no optimizer of Megatron's casts gradients of v2")
    return patch.combine_undos(undo for one in found for undo in _Casts(one, scratch).installed())


class _Casts:
    """Replaces ``_copy_model_grads_to_main_grads`` of one optimizer."""

    def __init__(self, optimizer: Any, scratch: IdlePool | None) -> None:
        self._optimizer, self._original = optimizer, getattr(optimizer, _CAST)
        self._scratch = scratch
        self._made: dict[Any, Any] = {}
        """By parameter, the DTensor that was made of its gradient."""

    def installed(self) -> Iterator[patch.Undo]:
        yield patch.replace_function(self._optimizer, _CAST, self)
        yield patch.wrap_method(self._optimizer, _STEP, after=self._free)

    def _free(self) -> None:
        for made in self._made.values():
            made._local_tensor = None
        if self._scratch is not None:
            self._scratch.report_held()

    @torch.no_grad()
    def __call__(self) -> None:
        casted = self._optimizer._casted_grads
        assert not casted
        given = [(p, p.grad) for p in self._optimizer.get_parameters() if p.grad is not None]
        differ = [(p, gradient) for p, gradient in given if gradient.dtype != p.dtype]
        dtypes = {parameter.dtype for parameter, _ in differ}
        if len(dtypes) != 1 or {type(gradient) for _, gradient in differ} != {DTensor}:
            self._original()
            return
        for parameter, gradient in differ:
            if not self._knows(parameter, gradient):
                self._made[parameter] = made = gradient.to(dtype=parameter.dtype)
                made._local_tensor = None
        local = [gradient._local_tensor for _, gradient in differ]
        # Not all parameters have a gradient in each step.
        caller = (*dtypes, *(each.shape for each in local))
        copies = copied(self._scratch, caller, local, *dtypes)
        for (parameter, gradient), copy in zip(differ, copies, strict=True):
            made = self._made[parameter]
            made._local_tensor = copy
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = made
            casted.append((parameter, gradient))

    def _knows(self, parameter: Any, gradient: Any) -> bool:
        made = self._made.get(parameter)
        if made is None or not same_placements(made._spec, gradient._spec):
            return False
        return bool(made.shape == gradient.shape and made.dtype == parameter.dtype)
