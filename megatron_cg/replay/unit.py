"""A layer to be captured, and how its graph takes its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron_cg.replay.region import region_in_backward, run_region


def _leave_out_unit(_module: nn.Module | None) -> str:
    return "Leave the unit out of graph_units."


@dataclass(frozen=True)
class Unit:
    """A layer to be captured."""

    name: str
    layer: nn.Module
    graphed: tuple[nn.Module, ...]
    """The modules below it that are inside its graph."""
    direct: bool = True
    """Whether the graph takes the layer's own arguments; else code of the layer runs before it."""
    collectives: bool = False
    """Whether the graph is known to hold collectives; others are found when it is captured."""
    inputs: tuple[str, ...] = ("hidden_states",)
    """Names of the positional inputs, for messages."""
    run: Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Any] = run_region
    """``run(layer, args, kwargs)`` is what the graph would return, as plain Python."""
    in_backward: Callable[[], AbstractContextManager[None]] = region_in_backward
    """Makes a context for its backward pass."""
    attach: Callable[..., Callable[[], None]] | None = None
    """Replaces that by the replay, with arguments and undo of
    :func:`megatron_cg.replay.attach.attach_replay`, which None is."""
    leave_out: Callable[[nn.Module | None], str] = _leave_out_unit
    """Returns a sentence: what to type so that a module below the layer is in no graph. The module
    is None if it is unknown."""
