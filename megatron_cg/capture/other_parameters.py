"""Refuses a unit that uses parameters of modules outside of it.

A graph returns gradients of its unit's own parameters. It reads any others in place, and their
gradients would be lost without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from megatron_cg.errors import CaptureError
from megatron_cg.replay.unit import Unit


@contextmanager
def other_parameters_refused(
    model: nn.Module, units: Sequence[Unit], under_way: Callable[[], tuple[int, bool] | None]
) -> Iterator[None]:
    """Look at every gradient that a pass in the block computes.

    Args:
        model: holds the units.
        units: what is captured.
        under_way: the index of the unit whose pass runs, and whether it is a backward pass; None
            between passes.

    Raises CaptureError, from the backward pass, if it reaches a parameter of another module.
    """
    own = [set(unit.layer.parameters()) for unit in units]

    def look(parameter: nn.Parameter, name: str, _gradient: torch.Tensor) -> None:
        now = under_way()
        if now is not None and parameter not in own[now[0]]:
            raise CaptureError(
                f"{units[now[0]].name} uses {name}, a parameter of a module outside of it. A graph "
                "returns no gradient for it. Pass the values as an input, make the parameter an "
                "attribute of the unit too, or leave the unit out of the graphs."
            )

    with ExitStack() as undo:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                undo.callback(parameter.register_hook(partial(look, parameter, name)).remove)
        yield
