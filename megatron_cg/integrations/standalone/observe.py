"""Observes the steps before capture: the order of units, their arguments and their autocast.

Autocast is observed twice: a training loop may run the backward pass outside of the autocast around
its forward pass, or inside.

Sample inputs are made from this, so users need not know the shapes of inner modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_cg.capture.static_inputs import StaticInputs
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.integrations.standalone.autocast import AutocastState, casts_between
from megatron_cg.integrations.standalone.call import CallForm, expanded_dims
from megatron_cg.integrations.standalone.recompute import recompute_around
from megatron_cg.upstream.copies import look_after, look_before


@dataclass(frozen=True)
class Seen:
    """The last training call of one unit, with fakes of its tensors."""

    form: CallForm
    args: tuple[torch.Tensor, ...]
    kwargs: Mapping[str, torch.Tensor]
    autocast: AutocastState
    """Around its forward pass."""
    recompute: str | None
    """Where a call of the step was made, if activation checkpointing may have made it."""
    autocast_in_backward: AutocastState | None = None
    """Around its backward pass; None if no backward pass reached it."""
    shared_cast: str | None = None
    """A weight whose cast by autocast another call of a unit in the step uses too."""


class Observer:
    """Observes the units' calls in whole training steps.

    Args:
        units: the name and module of each unit.
        sharding: how their model is sharded; it observes the steps too.
    """

    def __init__(self, units: Mapping[str, nn.Module], sharding: Sharding) -> None:
        self._units, self._sharding = dict(units), sharding
        self._seen: dict[str, Seen] = {}
        self._now: dict[str, Seen] = {}
        self._inputs: list[torch.Tensor] = []
        """Of the call that runs now."""
        self._casts: set[Any] = set()
        """Nodes of autograd: the casts of weights that calls of this step use."""
        self.static_inputs = StaticInputs(self._units.values())
        self.steps = 0

    @contextmanager
    def observe_step(self) -> Iterator[None]:
        """Observe every call inside the block; a step that raises is forgotten."""
        self._now = {}
        with ExitStack() as stack:
            stack.callback(self._casts.clear)  # They keep the accumulators of weights.
            stack.callback(self._inputs.clear)
            stack.callback(self._sharding.observe_step(self._units.values()))
            for name, module in self._units.items():

                def look(owner: Any, args: Any, kwargs: Any, name: str = name) -> None:
                    self._look(name, owner, args, kwargs)

                stack.callback(look_before(module, look))
                stack.callback(look_after(module, partial(self._look_back, name)))
            if self.steps:
                stack.callback(self.static_inputs.observe_step())
            yield
        self.steps += 1
        self._seen = self._now

    def in_order(self) -> dict[str, Seen]:
        """The units that were called in the last whole step, in the order of their first calls."""
        return dict(self._seen)

    def forget(self) -> None:
        """Let the samples go, when no capture follows."""
        self._seen, self._now = {}, {}

    def _look(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        self._inputs[:] = _tensors((args, kwargs))
        form = CallForm.of(module.forward, args, kwargs)
        tensors, by_name, _ = form.split(args, kwargs)
        before = self._now.get(name)
        self._now[name] = Seen(
            form,
            tuple(_sample(tensor) for tensor in tensors),
            {key: _sample(tensor) for key, tensor in by_name.items()},
            AutocastState.now(tensors[0].device.type if tensors else "cpu"),
            (before.recompute if before else None) or recompute_around(),
            shared_cast=before.shared_cast if before else None,
        )

    def _look_back(self, name: str, module: nn.Module, _args: Any, outputs: Any) -> None:
        """Observe the backward pass that may follow, with the nodes that it begins with."""
        if not module.training or not torch.is_grad_enabled():
            return

        def look(_gradients: Sequence[torch.Tensor | None]) -> None:
            seen = self._now.get(name)
            if seen is not None:
                now = AutocastState.now(seen.autocast.device_type)
                self._now[name] = replace(seen, autocast_in_backward=now)

        for value in _tensors(outputs):
            if value.grad_fn is not None:
                value.grad_fn.register_prehook(look)
        casts = dict(casts_between(self._inputs, _tensors(outputs)))
        self._inputs.clear()
        for weight in (casts[node] for node in casts.keys() & self._casts):
            names = (key for key, one in module.named_parameters() if one is weight)
            self._now[name] = replace(self._now[name], shared_cast=next(names, "a weight"))
        self._casts.update(casts)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as in an expanded tensor; ``copy_`` into it is invalid."""
    return bool(expanded_dims(tensor))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a graph's input, with the layout of ``tensor``.

    Indices and masks keep their values, because made-up values may be out of range.
    """
    if overlaps(tensor):
        return tensor.detach()
    sample = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    with torch.no_grad():
        if tensor.is_floating_point():
            sample.zero_()
        else:
            sample.copy_(tensor)
    return sample.requires_grad_(tensor.requires_grad)
