"""Refuses a unit that draws random numbers in what its backward pass recomputes.

Note [Two graphs, two draws]
    Activation checkpointing restores the random state of the forward pass before it recomputes, so
    that dropout drops the same elements. A unit's forward and backward passes are two graphs, and
    each gets, at its replay, the generator's state of that moment. The backward graph holds an
    offset from there, whatever state was restored in the capture (torch 2.11). So it would drop
    other elements than the forward graph, and gradients would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_cg.backends.cuda_cleanup import device_generator
from megatron_cg.backends.rng_tracker import generators_of
from megatron_cg.errors import CaptureError
from megatron_cg.replay.unit import Unit
from megatron_cg.upstream.patch import put_over


class RecomputedDraws:
    """Looks at the first backward pass of each unit, which is one of the warmup.

    Args:
        units: the units, in the order of their forward passes.
        device_type: where they run.
    """

    def __init__(self, units: Sequence[Unit], device_type: str) -> None:
        self._units, self._device_type = tuple(units), device_type
        self._seen: set[int] = set()
        self._looks = self._drew = False
        self._generators: list[torch.Generator] = []
        self._restored: list[torch.Tensor] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notice in the block what restores random states."""
        with ExitStack() as undo:
            for owner in (torch, torch.cuda):
                undo.callback(put_over(owner, "set_rng_state", self._around(owner.set_rng_state)))
            yield

    def begun(self, index: int) -> None:
        """A backward pass of the unit ``index`` begins."""
        self._looks, self._drew, self._restored = index not in self._seen, False, []
        self._seen.add(index)
        if self._looks:
            of_modules = generators_of([self._units[index].layer], self._device_type)
            self._generators = [torch.default_generator, *device_generator(), *of_modules]

    def ended(self, index: int) -> None:
        """It has ended. Raises CaptureError; see the note above."""
        self._looks, self._restored = False, []
        if self._drew:
            unit = self._units[index]
            raise CaptureError(
                f"{unit.name} recomputes activations and draws random numbers in that "
                "(torch.utils.checkpoint around a dropout). Its forward and its backward graph "
                "would draw different ones, and gradients would be wrong. Set dropout to 0, take "
                f"it out of what is recomputed, or drop the checkpoint. Or: {unit.leave_out(None)}"
            )

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_rng_state(*args: Any, **kwargs: Any) -> Any:
            if not self._looks:
                return original(*args, **kwargs)
            now = self._states()
            pairs = zip(self._restored, now, strict=False)
            self._drew = self._drew or not all(torch.equal(one, other) for one, other in pairs)
            result = original(*args, **kwargs)
            self._restored = self._states()
            return result

        return set_rng_state

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]
