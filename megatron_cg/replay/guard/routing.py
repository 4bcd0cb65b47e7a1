"""Routers that record which experts they chose, or repeat a choice (``moe_enable_routing_replay``).

Such a router has a ``RouterReplay``, whose action a training loop sets between passes. Python code
follows the action, and a replay runs none. Megatron's own training loop sets no action.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from megatron_cg.replay.guard.mismatch import Mismatch
from megatron_cg.upstream.symbols import Symbol

_REPLAY, _ACTION = "router_replay", "router_replay_action"
RELIES_ON = (
    Symbol(
        "megatron-core",
        "megatron.core.transformer.moe.router_replay:RouterReplay",
        "what records and repeats a router's choices",
        attributes=(_ACTION,),
    ),
    Symbol(
        "megatron-core",
        "megatron.core.transformer.moe.router:TopKRouter",
        "the router that has one",
        attributes=(_REPLAY,),
    ),
)


class Routing:
    """No router inside the graph records or repeats a choice; none did so at capture.

    Args:
        graphed: the modules inside the graph, which has just been captured.
    """

    def __init__(self, graphed: Iterable[nn.Module]) -> None:
        replays = (getattr(module, _REPLAY, None) for module in graphed)
        states = [vars(replay) for replay in replays if replay is not None]
        self._states = [(state, state[_ACTION]) for state in states]

    def broken(self) -> Mismatch | None:
        """The action of the first router that has one."""
        for state, captured in self._states:
            if state[_ACTION] is not None or captured is not None:
                return Mismatch(
                    "routing",
                    "the router's action",
                    _name(captured),
                    _name(state[_ACTION]),
                    "Python code of the router records or repeats its choice of experts, and a "
                    "replay does not run it. Graphs are replayed where the action is none at "
                    "capture and in the pass (RouterReplay.clear_global_router_replay_action()).",
                )
        return None


def _name(action: object) -> str:
    return "none" if action is None else str(getattr(action, "name", action))
