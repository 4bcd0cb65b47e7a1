"""Observes the steps before capture: the order of units, their arguments and their autocast.

Autocast is observed twice: a training loop may run the backward pass outside of the autocast around
its forward pass, or inside.

Sample inputs are made from this, so users need not know the shapes of inner modules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_cg.capture.operations import key_of
from megatron_cg.capture.static_inputs import StaticInputs, version_of
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.integrations.standalone.autocast import AutocastState
from megatron_cg.integrations.standalone.call import CallForm, expanded_dims
from megatron_cg.integrations.standalone.recompute import recompute_around
from megatron_cg.integrations.standalone.results import tensors_of
from megatron_cg.integrations.standalone.sums import Sums
from megatron_cg.upstream.copies import look_after, look_before

_REMEMBERED = 8
"""How many steps are remembered."""


@dataclass(frozen=True)
class Seen:
    """One training call of a unit, with fakes of its tensors."""

    form: CallForm
    args: tuple[torch.Tensor, ...]
    kwargs: Mapping[str, torch.Tensor]
    autocast: AutocastState
    """Around its forward pass."""
    recompute: str | None
    """Where a call of the step was made, if activation checkpointing may have made it."""
    autocast_in_backward: AutocastState | None = None
    """Around its backward pass; None if no backward pass reached it."""

    @property
    def keeps_casts(self) -> bool:
        """Whether autocast keeps casts of weights from the forward pass over the backward pass."""
        backward = self.autocast_in_backward
        is_on = self.autocast.dtype is not None and backward is not None
        return is_on and self.autocast.has_cache and backward == self.autocast

    @property
    def signature(self) -> Any:
        """Equal for calls that one graph can replay."""
        return self.form.signature, [_layout(t) for t in (*self.args, *self.kwargs.values())]


class Observer:
    """Observes the units' calls in whole training steps.

    Args:
        units: the name and module of each unit.
        sharding: how their model is sharded; it observes the steps too.
    """

    def __init__(self, units: Mapping[str, nn.Module], sharding: Sharding) -> None:
        self._units, self._sharding = dict(units), sharding
        self._steps: deque[dict[str, Seen]] = deque(maxlen=_REMEMBERED)
        self._now: dict[str, Seen] = {}
        self._sums = Sums()
        self._views: list[tuple[str, torch.Tensor, int]] = []
        """Outputs of this step on the memory of an input, with their version when returned."""
        self._written: set[str] = set()
        self._given: list[torch.Tensor] = []
        """The tensors of the call that runs now."""
        self.static_inputs = StaticInputs(self._units.values())
        self.steps = 0

    @contextmanager
    def observe_step(self) -> Iterator[None]:
        """Observe every call inside the block; a step that raises is forgotten."""
        self._now = {}
        self._views.clear()
        with ExitStack() as stack:
            stack.callback(self._sharding.observe_step(self._units.values()))
            stack.callback(self._sums.observe_step())
            for name, module in self._units.items():

                def look(owner: Any, args: Any, kwargs: Any, name: str = name) -> None:
                    self._look(name, owner, args, kwargs)

                stack.callback(look_before(module, look))
                stack.callback(look_after(module, partial(self._look_back, name)))
            if self.steps:
                stack.callback(self.static_inputs.observe_step())
            yield
        for name, output, version in self._views:
            if version_of(output) != version:
                self._written.add(name)
        self._views.clear()
        self.steps += 1
        self._steps.append(self._now)

    def in_order(self) -> dict[str, Seen]:
        """The units that were called in a step, in the order of their first calls.

        It is the last whole step whose calls came more than once, if there is one: a last batch may
        be shorter than all others.
        """
        signatures = [[(n, one.signature) for n, one in step.items()] for step in self._steps]
        often = [n for n, one in enumerate(signatures) if signatures.count(one) > 1]
        chosen = (often or [len(signatures) - 1])[-1]
        found = self._steps[chosen] if signatures else {}
        return {name: _with_memory(one) for name, one in found.items()}

    def written(self) -> Collection[str]:
        """The units whose callers write into a returned view of an argument."""
        return self._written

    def summed(self) -> Mapping[str, str]:
        """By unit: a gradient that is summed over its border; see ``sums.py``."""
        return self._sums.found

    def forget(self) -> None:
        """Forget what was seen, when no capture follows."""
        self._steps.clear()
        self._now = {}

    def _look(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        form = CallForm.of(module.forward, args, kwargs)
        tensors, by_name, _ = form.split(args, kwargs)
        self._given = [*tensors, *by_name.values()]
        before = self._now.get(name)
        self._now[name] = Seen(
            form,
            tuple(_noted(tensor) for tensor in tensors),
            {key: _noted(tensor) for key, tensor in by_name.items()},
            AutocastState.now(tensors[0].device.type if tensors else "cpu"),
            (before.recompute if before else None) or recompute_around(),
        )
        self._sums.begun(name, form.by_name(tensors, by_name))

    def _look_back(self, name: str, module: nn.Module, _args: Any, outputs: Any) -> None:
        """Observe the backward pass that may follow, with the nodes that it begins with."""
        if not module.training or not torch.is_grad_enabled():
            return

        def look(_gradients: Sequence[torch.Tensor | None]) -> None:
            seen = self._now.get(name)
            if seen is not None:
                now = AutocastState.now(seen.autocast.device_type)
                self._now[name] = replace(seen, autocast_in_backward=now)

        attributes = [tuple(vars(one).values()) for one in module.modules()]
        held = (one for one in tensors_of(attributes) if not isinstance(one, nn.Parameter))
        set_or_returned = [*tensors_of(outputs), *held]
        for value in set_or_returned:
            if value.grad_fn is not None:
                value.grad_fn.register_prehook(look)
        self._sums.ended(name, list(filter(_has_node, set_or_returned)))
        given = {key_of(one) for one in self._given}
        self._given = []
        self._views += [
            (name, one, version_of(one)) for one in tensors_of(outputs) if key_of(one) in given
        ]


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as in an expanded tensor; ``copy_`` into it is invalid."""
    return bool(expanded_dims(tensor))


def _noted(tensor: torch.Tensor) -> torch.Tensor:
    """The layout of ``tensor``, on no memory; indices and masks keep their values.

    Made-up values of those may be out of range.
    """
    if overlaps(tensor) or not tensor.is_floating_point():
        return tensor.detach() if overlaps(tensor) else _like(tensor, tensor.device).copy_(tensor)
    noted = _like(tensor, torch.device("meta")).requires_grad_(tensor.requires_grad)
    noted.device_of_sample = tensor.device  # type: ignore[attr-defined]
    return noted


def _with_memory(seen: Seen) -> Seen:
    args = tuple(_sample(one) for one in seen.args)
    return replace(seen, args=args, kwargs={n: _sample(t) for n, t in seen.kwargs.items()})


def _sample(noted: torch.Tensor) -> torch.Tensor:
    """Memory for a graph's input, with the layout of ``noted``."""
    if not noted.is_meta:
        return noted
    sample = _like(noted, noted.device_of_sample).zero_()  # type: ignore[attr-defined]
    return sample.requires_grad_(noted.requires_grad)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _has_node(value: torch.Tensor) -> bool:
    """Whether autograd has a node for ``value``: a sharded parameter may have no memory here."""
    if not isinstance(value, nn.Parameter):
        return True
    return not isinstance(value, DTensor) and value.untyped_storage().nbytes() >= value.nbytes
