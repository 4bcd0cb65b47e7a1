"""The time of each phase of a training step, where Megatron measures it.

Megatron's ``Timers`` keeps its timers in ``_timers`` by name. ``Timer.active_time`` returns the
seconds that a timer has run and is never reset. Calling ``Timers`` with a name would create a timer
at our level, and Megatron's later use at its own level would fail; so we read the dictionary.
``--timing-log-level`` decides which timers exist: from 1 on forward and backward together and the
optimizer, from 2 on forward and backward each. Megatron's timers wait for the GPU where they begin
and end; nothing here does.
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
"""Our names of the phases, by Megatron's names."""


class StepPhases:
    """Reads Megatron's timers after each step.

    Raises UpstreamChangedError when they are not as relied on.
    """

    def __init__(self) -> None:
        self._timers, self._seconds = _GET.find(), dict.fromkeys(_PARTS, 0.0)
        _TIMERS.find()
        _TIMER.find()

    def of_last_step(self) -> dict[str, float]:
        """Milliseconds by phase since the last call; empty if Megatron measures none."""
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
