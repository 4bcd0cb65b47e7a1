"""A layer to be captured."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from megatron_cg.errors import CaptureError
from megatron_cg.replay.guard import Entry, Mismatch
from megatron_cg.replay.plain import KNOWN, package_of
from megatron_cg.upstream.symbols import Symbol

SCALE = "main_loss_backward_scale"
"""Of every autograd function of megatron-core that scales a loss of its own; graphs read it."""
_SCALER = Symbol(
    "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler",
    "what scales the auxiliary loss of routers",
    attributes=(SCALE, "set_loss_scale"),
)
_METRICS = "megatron.core.transformer.moe.moe_logging"
_TRACKER = "_MOE_METRICS_TRACKER"
RELIES_ON = (
    _SCALER,
    Symbol(f"{_METRICS}:{_TRACKER}", "Megatron's MoE metrics tracker"),
    Symbol(f"{_METRICS}:MoEMetricsTracker", "what it is", attributes=("metrics",)),
    Symbol(f"{_METRICS}:MetricEntry", "an entry of its metrics", attributes=("values",)),
)
ManualHook = tuple[Callable[..., None], tuple[nn.Module, ...]]
"""A function that is called before each replay, and its arguments."""


def moe_metrics() -> Mapping[str, Any]:
    """What Megatron's routers have recorded, by name; their passes add to its ``values``."""
    return getattr(getattr(sys.modules.get(_METRICS), _TRACKER, None), "metrics", {})


class Unit:
    """A layer to be captured; ``graphed`` are the modules below it that are inside its graph.

    ``collectives`` says whether the graph is known to contain some; capture detects others.
    ``inputs`` are names of the positional inputs, for messages.
    """

    is_plain_module = False
    """Whether it is any module: torch's code in it is observed too, and it sets no attribute."""
    any_stride_of_one = False
    """Whether no kernel is chosen by the stride of an input's dimension of size 1, as convolutions
    choose a layout."""
    draws_as_eager = True
    """Whether replays leave random states on the device as eager passes do."""

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        graphed: tuple[nn.Module, ...],
        *,
        collectives: bool = False,
        inputs: tuple[str, ...] = ("hidden_states",),
    ) -> None:
        self.name, self.layer, self.graphed = name, layer, graphed
        self.collectives, self.inputs = collectives, inputs
        self.written: set[nn.Parameter] = set()
        """The frozen parameters that its passes write."""
        self.nested = False
        """Whether a backward pass inside its own adds to gradients of weights."""

    @property
    def known_packages(self) -> frozenset[str]:
        """Packages of whose modules settings are compared; the code of others is observed."""
        return KNOWN if self.is_plain_module else KNOWN | {"torch"}

    def entries(self) -> Iterator[Entry]:
        """More rows for the table of what its graph depends on: what routers write and read."""
        kinds = {kind for one in (self.layer, *self.graphed) for kind in type(one).__mro__}
        metrics = moe_metrics()
        if not metrics or all(package_of(kind.__module__) != "megatron" for kind in kinds):
            return
        what = "Megatron's MoE metrics tracker"
        yield Entry(vars(sys.modules[_METRICS]), _TRACKER, "metrics", what)
        scaler = _SCALER.find()  # Of others, such as MTP's, each step sets the scale anew.
        yield Entry(vars(scaler), SCALE, "loss scale", f"{SCALE} of {scaler.__name__}")
        for name, entry in metrics.items():  # A graph with a router writes to its tensor.
            yield Entry(vars(entry), "values", "metrics", f"the tensor of the MoE metric {name}")
            yield Entry(metrics, name, "metrics", f"the MoE metric {name}")

    def kept(self) -> AbstractContextManager[None]:
        """Restore what a pass changes outside of the layer's modules."""
        return nullcontext()

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the graph would return, as plain Python."""
        return self.layer(*args, **kwargs)

    def in_forward(self) -> AbstractContextManager[None]:
        """What surrounds the layer's forward passes in training."""
        return nullcontext()

    def in_backward(self) -> AbstractContextManager[None]:
        """The same for the backward pass of :meth:`run`."""
        return nullcontext()

    def to_graph(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments of a replay, on the same memory."""
        return args, kwargs

    def broken(self, gradients: Sequence[torch.Tensor | None]) -> Mismatch | None:
        """What forbids the backward replay of these gradients of the graph's results."""
        return None

    def attach(self, before_replay: Sequence[ManualHook]) -> Callable[[], None]:
        """Install the replay, with hooks that run before each; returns the undo."""
        raise NotImplementedError

    def leave_out(self, module: nn.Module | None) -> str:
        """What to type to keep a module below the layer out of graphs; None if it is unknown."""
        return "Leave the unit out of graph_units."

    def refused(self, fact: str, instead: str) -> CaptureError:
        return CaptureError(f"{self.name} {fact}. {instead} Or: {self.leave_out(None)}")
