"""What the parts of a training step took, where Megatron measures them.

Relied on: megatron-core 0.19.2, ``megatron.core.timers``: ``Timers`` keeps its timers in
``_timers`` by name, ``Timer.active_time`` gives the seconds that one has run and is never set back.
Asking ``Timers`` for a timer would make it at a level of our own, and a later use at Megatron's
level fail; so its dictionary is looked into instead. Which timers there are is up to
``--timing-log-level``: from 1 on forward and backward together and the optimizer, from 2 on forward
and backward each. They wait for the GPU where they begin and end; nothing here does.
"""

from __future__ import annotations

from typing import Any

from megatron_cg.upstream.symbols import Symbol

_GET = Symbol("megatron-core", "megatron.training.global_vars:get_timers", "Megatron's timers")
_TIMERS = Symbol(
    "megatron-core", "megatron.core.timers:Timers", "timers by name", attributes=("_timers",)
)
_TIMER = Symbol("megatron-core", "megatron.core.timers:Timer.active_time", "seconds in all")
RELIES_ON = (_GET, _TIMERS, _TIMER)

_PARTS = {
    "forward": "forward-compute",
    "backward": "backward-compute",
    "forward and backward": "forward-backward",
    "optimizer": "optimizer",
}
"""What we call them, by Megatron's names."""


class StepPhases:
    """Reads Megatron's timers after each step.

    Raises UpstreamChangedError where they are not as relied on.
    """

    def __init__(self) -> None:
        self._timers, self._seconds = _GET.find(), dict.fromkeys(_PARTS, 0.0)
        _TIMERS.find()
        _TIMER.find()

    def of_last_step(self) -> dict[str, float]:
        """Milliseconds by part since the last call; empty where Megatron measures none."""
        known: dict[str, Any] = self._timers()._timers
        found: dict[str, float] = {}
        for part, name in _PARTS.items():
            if name in known:
                seconds = float(known[name].active_time())
                found[part] = (seconds - self._seconds[part]) * 1e3
                self._seconds[part] = seconds
        if "forward" in found and "backward" in found:
            found.pop("forward and backward", None)
        return found
