"""A layer to be captured, and the autograd function that replays its graph."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from megatron_cg.errors import CaptureError
from megatron_cg.replay.borders import Gradients
from megatron_cg.replay.guard import Entry

ManualHook = tuple[Callable[..., None], tuple[nn.Module, ...]]
"""A function that is called before each replay, and its arguments."""


def _call(layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return layer(*args, **kwargs)


@dataclass(frozen=True)
class Unit:
    name: str
    layer: nn.Module
    graphed: tuple[nn.Module, ...]
    """The modules below it that are inside its graph."""
    collectives: bool = False
    """Whether the graph is known to contain collectives; capture detects others."""
    inputs: tuple[str, ...] = ("hidden_states",)
    """Names of the positional inputs, for messages."""
    sets_attributes: bool = False
    """Whether ``run`` returns the tensors too that modules get as attributes in a pass, so that a
    replay can set them."""
    entries: Callable[[], list[Entry]] = list
    """More rows for the table of what its graph depends on."""
    kept: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context that restores what a pass changes outside of the layer's modules."""
    run: Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Any] = _call
    """``run(layer, args, kwargs)`` is what the graph would return, as plain Python."""
    in_forward: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context for what surrounds the layer's forward passes in training."""
    in_backward: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context for the backward pass of ``run``."""
    attach: Callable[..., Callable[[], None]] | None = None
    """``attach(unit, before_replay)`` installs the replay and returns the undo. It takes hooks that
    run before each replay."""
    gradients: Gradients = field(default_factory=Gradients)
    """How gradients lie in memory at the border of its graph."""
    written: set[nn.Parameter] = field(default_factory=set)
    """The frozen parameters that its passes write."""
    leave_out: Callable[[nn.Module | None], str] = lambda _: "Leave the unit out of graph_units."
    """Returns a sentence that says what to type to keep a module below the layer out of graphs. The
    module is None if it is unknown."""

    def refused(self, fact: str, instead: str) -> CaptureError:
        return CaptureError(f"{self.name} {fact}. {instead} Or: {self.leave_out(None)}")


@dataclass(frozen=True)
class ReplayFunction:
    """The autograd function that replays one graph.

    Note [Borrowed gradients]
        A graph's backward replay leaves the weight gradients in memory that other graphs of the
        pool also use, so a backend returns copies of them. While gradients are borrowed, the
        function returns them without a copy. They are valid until the next replay of any graph. The
        receiver must finish using them before that, on the stream of the backward pass.
    """

    function: Any
    """A class that derives from ``torch.autograd.Function``."""
    first_weight: int
    """How many arguments come before the weights, which are the last ones."""
    replace: Callable[[Any], Callable[[], None]]
    """Replaces the function by another object with a method ``apply``; returns the undo."""
    borrow: Callable[[], Callable[[], None]]
    """Borrow gradients until the returned function is called."""
    needs: tuple[bool, ...]
    """Which outputs need a gradient."""
