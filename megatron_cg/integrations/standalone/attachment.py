"""Attaches a graph to a plain module: it replaces the whole forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from megatron_cg.integrations.standalone.autocast import AutocastState
from megatron_cg.integrations.standalone.observe import Seen
from megatron_cg.integrations.standalone.recompute import not_recomputed
from megatron_cg.replay.attach import ManualHook, Prepared, replay_instead
from megatron_cg.replay.mismatch_policy import MismatchPolicy
from megatron_cg.replay.own_gradients import own_gradient
from megatron_cg.replay.unit import Unit
from megatron_cg.upstream.patch import put_over, undone_after


class Attachment:
    """One module's forward, eager or replayed.

    Args:
        name: the unit's name.
        module: the unit.
        seen: its calls.
        backward: the autocast around its backward passes.
    """

    def __init__(self, name: str, module: nn.Module, seen: Seen, backward: AutocastState) -> None:
        self._name, self._module, self._form = name, module, seen.form
        self._forward, self._backward = seen.autocast, backward
        self._eager: Callable[..., Any] = module.forward

    def unit(self) -> Unit:
        """The unit of a capture; its graph covers the whole module."""
        return Unit(
            self._name,
            self._module,
            tuple(self._module.modules()),
            inputs=self._form.names,
            run=self._run,
            in_forward=self._forward.entered,
            in_backward=partial(self._backward.entered, has_cache=False),
            attach=self._attach,
        )

    @contextmanager
    def taking_tensors(self) -> Iterator[None]:
        """Inside the block the module takes only its tensors, as capture calls it.

        Capture calls it under the autocast of backward passes.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._forward.entered():
                return self._run(self._module, args, kwargs)

        with undone_after(put_over(self._module, "forward", forward)):
            yield

    def _run(self, _layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        positional, by_name = self._form.join(args, kwargs)
        return self._eager(*positional, **by_name)

    def _attach(
        self, unit: Unit, before_replay: Sequence[ManualHook], mismatches: MismatchPolicy
    ) -> Callable[[], None]:
        """See ``attach`` of :class:`megatron_cg.replay.unit.Unit`."""
        target: Any = unit.layer

        def prepare(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
            graph = target.cuda_graphs[0]
            inputs, by_name, mismatch = self._form.split(args, kwargs)

            def replay() -> Any:
                for hook, arguments in before_replay:
                    hook(*arguments)
                args = [own_gradient(value, graph.is_replay) for value in inputs]
                named = {n: own_gradient(v, graph.is_replay) for n, v in by_name.items()}
                return graph(*args, **named)

            return mismatch or not_recomputed() or graph.out_of_order() or replay

        return replay_instead(target, prepare, mismatches)
