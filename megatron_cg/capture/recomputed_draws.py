"""Refuses a unit that draws random numbers in what its backward pass recomputes.

Note [Two graphs, two draws]
    Activation checkpointing restores the random state of the forward pass before it recomputes, so
    that dropout drops the same elements. A unit's forward and backward passes are two graphs, and
    each gets, at its replay, the generator's state of that moment. The backward graph holds an
    offset from there, whatever state was restored in the capture (torch 2.11). So it would drop
    other elements than the forward graph, and gradients would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_cg.backends.cuda_cleanup import device_generator
from megatron_cg.backends.rng_tracker import generators_of
from megatron_cg.errors import CaptureError
from megatron_cg.replay.unit import Unit
from megatron_cg.upstream.patch import put_over


@contextmanager
def recomputed_draws_refused(unit: Unit, device_type: str) -> Iterator[None]:
    """Observe one backward pass of ``unit``.

    Raises CaptureError after it: a random state was restored, and was another one when the next one
    was restored.
    """
    of_modules = generators_of([unit.layer], device_type)
    generators = [torch.default_generator, *device_generator(), *of_modules]
    restored: list[torch.Tensor] = []
    drew: list[bool] = []

    def states() -> list[torch.Tensor]:
        return [generator.get_state() for generator in generators]

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_rng_state(*args: Any, **kwargs: Any) -> Any:
            drew.extend(not torch.equal(*pair) for pair in zip(restored, states(), strict=False))
            result = original(*args, **kwargs)
            restored[:] = states()
            return result

        return set_rng_state

    with ExitStack() as undo:
        for owner in (torch, torch.cuda):
            undo.callback(put_over(owner, "set_rng_state", around(owner.set_rng_state)))
        yield
    if any(drew):
        raise CaptureError(
            f"{unit.name} recomputes activations and draws random numbers in that "
            "(torch.utils.checkpoint around a dropout). Its forward and its backward graph "
            "would draw different ones, and gradients would be wrong. Set dropout to 0, take "
            f"it out of what is recomputed, or drop the checkpoint. Or: {unit.leave_out(None)}"
        )
