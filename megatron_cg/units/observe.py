"""Observes the steps before capture: the order of units, their arguments and their autocast.

Sample inputs are made from this, so users need not know the shapes of inner modules.

Note [Gradients from outside]
    A unit may use a tensor that it returns. A graph then gets the gradients from outside alone, in
    their own strides. Autograd adds up the same terms in the same order: uses outside come later in
    the forward pass, so their gradients come first. Hooks on the nodes of uses outside tell their
    strides (``sums.py``): nothing stands between a result and its caller in the steps before.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from megatron_cg.capture.observer import version_of
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.replay.borders import local
from megatron_cg.units.call import CallSpec, is_trained, recompute_around
from megatron_cg.units.code_observer import key_of
from megatron_cg.units.layouts import GradStrides, ReadOnly
from megatron_cg.units.sums import Autocast, Sums, autocast_now
from megatron_cg.units.unsharded import Unsharded
from megatron_cg.upstream.patch import add_observer


@dataclass
class ObservedCall:
    form: CallSpec
    makers: Sequence[Callable[[], torch.Tensor]]
    """Makes a sample of each of its tensors."""
    autocast: Autocast
    """Around its forward pass."""
    recompute: tuple[str, str, str] | None
    """Of a call of the step that is recomputed; see :func:`recompute_around`."""
    gradients: dict[Any, GradStrides] = field(default_factory=dict)
    """How the gradients came of all that it returned, by number."""
    unwritten: dict[Any, bool] = field(default_factory=dict)
    """The numbers of results, and the names of arguments that nobody may write into behind a
    replay, and whether they share memory; see Note [Results that are views] in ``sums.py``."""


class Observer:
    """Observes the units' calls in whole training steps; their ``sharding`` observes too."""

    def __init__(self, units: Mapping[str, nn.Module], sharding: Sharding) -> None:
        self._units, self._sharding = dict(units), sharding
        self.calls: dict[str, ObservedCall] = {}
        """The last call of each unit in whole steps, in the order of their calls."""
        self._now: dict[str, ObservedCall] = {}
        self.sums = Sums(sharding.varies_sums)
        self._views: list[tuple[str, ReadOnly]] = []
        """By unit, results of this step on the memory of an input or of another result."""
        self.written: set[str] = set()
        """The units whose callers write into such a result."""
        self._given: dict[int, tuple[str, int | None, int, torch.Tensor]] = {}
        """By id, the names, memory, earlier writes and tensors of the call that runs now. They are
        kept: its caller may drop one, or it is a compact copy, and a result could get its id."""
        self.overwritten: set[tuple[str, str]] = set()
        """The units that write such an argument, and its name."""
        self._follows: dict[str, set[str]] = {}
        """The units right before a unit, in any step."""
        self._memory: dict[str, dict[str, Any]] = {}
        """Where weights were when the step began."""
        self.moved: dict[str, str] = {}
        """By unit: a weight that is elsewhere in the forward pass of each step."""
        self.steps = 0
        self._trained: set[str] = set()
        self._weights: dict[str, ref[nn.Parameter]] = {}
        """The weights when the last observed step began; none if a sharding replaces its own."""

    def is_recent(self, *, first: bool) -> bool:
        """Whether the weights that need a gradient are those of the last observed step.

        What is shared between units depends on it, such as the cast of a weight. ``first`` asks
        whether they were replaced, too: who does so in each step learns it from the guard.
        """
        before, now = self._weights, self._parameters().items()
        is_same = not before or all(n in before and before[n]() is one for n, one in now)
        return (is_same or not first) and self._trained == self._trainable()

    def _parameters(self) -> dict[str, nn.Parameter]:
        pairs = self._units.items()
        return {f"{unit}.{n}": one for unit, mod in pairs for n, one in mod.named_parameters()}

    def _trainable(self) -> set[str]:
        return {name for name, one in self._parameters().items() if one.requires_grad}

    @contextmanager
    def observe_step(self) -> Iterator[None]:
        """Observe every call inside the block; a step that raises is forgotten."""
        self._now = {}
        self._views.clear()
        moved, self.moved = self.moved, {}
        if isinstance(self._sharding, Unsharded):
            self._memory = {name: _memory_of(module) for name, module in self._units.items()}
            self._weights = {name: ref(one) for name, one in self._parameters().items()}
        with ExitStack() as stack:
            stack.callback(self._sharding.observe_step(self._units.values()))
            stack.callback(self.sums.observe_step())
            for name, module in self._units.items():
                stack.callback(add_observer(module, partial(self._look, name)))
                stack.callback(add_observer(module, partial(self._look_back, name), after=True))
            yield
        self.written |= {name for name, one in self._views if one.is_found()}
        self._views.clear()
        if self.steps:
            self.moved = {unit: name for unit, name in moved.items() if unit in self.moved}
        self.steps += 1
        self.calls, self._trained = self._in_order(), self._trainable()

    def _in_order(self) -> dict[str, ObservedCall]:
        """All calls so far; a step may leave units out, as LayerDrop does."""
        for one, following in pairwise(self._now):
            self._follows.setdefault(following, set()).add(one)
        known = self.calls | self._now
        try:
            found = {unit: self._follows.get(unit, ()) for unit in self._units if unit in known}
            return {unit: known[unit] for unit in TopologicalSorter(found).static_order()}
        except CycleError:  # The order has changed.
            self._follows.clear()
            return self._now | {unit: seen for unit, seen in known.items() if unit not in self._now}

    def autocast_in_backward(self, device_type: str) -> Autocast:
        """Around the last backward pass; if there was none, what is around this call."""
        return self.sums.autocast.get(device_type) or autocast_now(device_type)

    def keeps_casts(self, call: ObservedCall) -> bool:
        """Whether autocast keeps casts of weights that are gathered again for the backward pass."""
        now = call.autocast
        if isinstance(self._sharding, Unsharded) or not (now["enabled"] and now["cache_enabled"]):
            return False
        return self.autocast_in_backward(now["device_type"]) == now

    def forget(self) -> None:
        self.calls, self._now, self._weights = {}, {}, {}

    def _look(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if not is_trained(module):
            return
        form = CallSpec.of(module.forward, args, kwargs)
        tensors, _ = form.split(args, kwargs)
        self._given = {
            id(one): (argument, key_of(one), version_of(one), one)
            for argument, one in zip(form.names, tensors, strict=True)
        }
        if before_step := self._memory.get(name):
            now = _memory_of(module)
            elsewhere = [one for one in now if now[one] != before_step.get(one, now[one])]
            self.moved.update((name, one) for one in elsewhere[:1])
        autocast = autocast_now(tensors[0].device.type if tensors else "cpu")
        call = ObservedCall(form, [*map(_maker, tensors)], autocast, recompute_around())
        if (before := self._now.get(name)) is not None:
            call.recompute = before.recompute or call.recompute
            call.gradients, call.unwritten = before.gradients, before.unwritten
        self._now[name] = call
        self.sums.begun(name, form.by_name(tensors))

    def _look_back(self, name: str, module: nn.Module, _args: Any, outputs: Any) -> Any:
        if not is_trained(module):
            return outputs
        given, self._given = self._given, {}
        own = {*map(key_of, module.buffers())}
        for argument, key, version, one in given.values():
            if key in own and version_of(one) != version:
                self.overwritten.add((name, argument))
        results = {n: t for n, t in enumerate(tensors_of(outputs)) if id(t) not in given}
        made, call = {id(t): t for t in results.values()}, self._now[name]
        with_nodes = {n: t for n, t in results.items() if _has_node(t)}
        unwritten = self.sums.ended(name, with_nodes, call.gradients)
        memory = {id_: key_of(tensor) for id_, tensor in made.items()}
        counts = Counter([*(one for _, one, *_ in given.values()), *memory.values()])
        shared = {id_: one for id_, one in memory.items() if one and counts[one] > 1}
        self._views += [(name, ReadOnly(made[id_], shares=True)) for id_ in shared]
        for key, tensor in results.items():
            if (id_ := id(tensor)) in unwritten or id_ in shared:
                call.unwritten[key] = id_ in shared or call.unwritten.get(key, False)
        call.unwritten.update((n, True) for n, key, *_ in given.values() if key in shared.values())
        return outputs


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a pass's result, at any depth."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _memory_of(module: nn.Module) -> dict[str, Any]:
    found = ((n, local(p)) for n, p in module.named_parameters() if not is_lazy(p))
    return {name: (own.shape, own.device, own.data_ptr()) for name, own in found}


def _maker(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes a tensor with the layout of ``tensor``; of indices and masks with their values too.

    Made-up values of those may be out of range.
    """
    shape, stride, device = tensor.shape, tensor.stride(), tensor.device
    empty = partial(torch.empty_strided, shape, stride, dtype=tensor.dtype, device=device)
    kept = None if tensor.is_floating_point() else empty().copy_(tensor)
    needs_gradient = tensor.requires_grad
    return lambda: empty().zero_().requires_grad_(needs_gradient) if kept is None else kept


def _has_node(value: torch.Tensor) -> bool:
    """Whether autograd has a node for ``value``: a sharded parameter may have no memory here."""
    if not isinstance(value, nn.Parameter):
        return True
    return not isinstance(value, DTensor) and value.untyped_storage().nbytes() >= value.nbytes
