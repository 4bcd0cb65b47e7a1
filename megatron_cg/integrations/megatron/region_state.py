"""What Megatron's layers keep outside of their modules, and their graphs depend on.

The router adds its losses to ``get_moe_metrics_tracker().metrics[name].values`` in the forward
pass, so a graph that contains a router writes to that tensor.

A router with ``moe_enable_routing_replay`` has a ``RouterReplay``, whose action a training loop
sets between passes. Python code follows the action, and a replay runs none. Megatron's own training
loop sets no action.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron_cg.replay.depends_on import Entry
from megatron_cg.upstream.symbols import Symbol

_MODULE = "megatron.core.transformer.moe.moe_logging"
_ROUTER = "megatron.core.transformer.moe"
_REPLAY, _ACTION = "router_replay", "router_replay_action"
RELIES_ON = (
    Symbol("megatron-core", f"{_MODULE}:_MOE_METRICS_TRACKER", "Megatron's MoE metrics tracker"),
    Symbol("megatron-core", f"{_MODULE}:MoEMetricsTracker", "what it is", attributes=("metrics",)),
    Symbol(
        "megatron-core", f"{_MODULE}:MetricEntry", "an entry of its metrics", attributes=("values",)
    ),
    Symbol(
        "megatron-core",
        f"{_ROUTER}.router_replay:RouterReplay",
        "what records and repeats a router's choices",
        attributes=(_ACTION,),
    ),
    Symbol(
        "megatron-core",
        f"{_ROUTER}.router:TopKRouter",
        "the router that has one",
        attributes=(_REPLAY,),
    ),
)


def region_entries(graphed: Sequence[nn.Module]) -> list[Entry]:
    """The rows of the MoE metrics' tensors, and of routers that follow an action."""
    replays = (getattr(module, _REPLAY, None) for module in graphed)
    return [
        *_metric_entries(),
        *(
            Entry(_Action(vars(replay)), _ACTION, "routing", "the router's action")
            for replay in replays
            if replay is not None
        ),
    ]


def metrics_tracker() -> Any:
    """Megatron's MoE metrics tracker; None before a router has recorded anything."""
    return getattr(sys.modules.get(_MODULE), "_MOE_METRICS_TRACKER", None)


@contextmanager
def metrics_kept() -> Iterator[None]:
    """Restore the sums of MoE metrics on exit, in place."""
    tracker = metrics_tracker()
    entries = list(tracker.metrics.values()) if tracker is not None else []
    saved = [(entry.values, entry.values.clone()) for entry in entries]
    try:
        yield
    finally:
        with torch.no_grad():
            for values, old in saved:
                values.copy_(old)


def _metric_entries() -> list[Entry]:
    tracker = metrics_tracker()
    if tracker is None:
        return []
    what = "Megatron's MoE metrics tracker"
    found = [Entry(vars(sys.modules[_MODULE]), "_MOE_METRICS_TRACKER", "metrics", what)]
    for name, entry in tracker.metrics.items():
        what = f"the tensor of the MoE metric {name}"
        found.append(Entry(vars(entry), "values", "metrics", what))
        found.append(Entry(tracker.metrics, name, "metrics", f"the MoE metric {name}"))
    return found


class _Action:
    """A router's action: None, or another object at each look, since no replay follows it."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def get(self, key: str) -> Any:
        """The action."""
        action = self._state[key]
        return None if action is None else SimpleNamespace(name=getattr(action, "name", action))
