"""When graphs are verified, and which of them that has refuted.

Note [One unit at a time]
    Without an interval one unit at a time is due, and its next replay is verified. Turns go by the
    count of steps alone, so all ranks verify the same units. A verification takes as long as three
    to four replays of its unit. So if there are few units, the distance of turns doubles with each
    round, until there is one round in :data:`_ROUND` steps.

Note [Refuted on all ranks]
    Ranks vote on each verification of a graph with collectives. Another graph may be refuted on one
    rank alone. That rank leaves a note, and the others read it when the next verification is due.
"""

from collections.abc import Callable
from dataclasses import replace

from megatron_cg.replay.counters import Counters
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.verify import different

_TURN, _ROUND = 10, 200


class Verifications:
    """The verifications of one session's graphs, by the index of their units.

    ``interval`` is that of all graphs in steps; 0 means never, None one unit at a time. ``noted``
    is that of the ranks' ``Agreement``.
    """

    def __init__(
        self, interval: int | None, units: int, counters: Counters, noted: Callable[..., bool]
    ) -> None:
        self.due: set[int] = set()
        """The units whose next replay is verified."""
        self.refuted: dict[int, Mismatch] = {}
        """These graphs are wrong for good."""
        self._interval, self._units = interval, units
        self._counters, self._noted = counters, noted
        self.step = self._turn = 0
        """The training step since the capture, from 1."""
        self._gap = self._next = _TURN
        self._last: dict[int, int] = {}
        """The step in which all of a graph was last compared."""
        self._new: set[int] = set()
        """Units that were verified since notes were read."""

    def begin_step(self) -> None:
        """Count training steps, to know which units are due."""
        self.step += 1
        if self._interval is not None:
            is_due = self._interval > 0 and self.step % self._interval == 0
            self.due = set(range(self._units)) if is_due else set()
        elif is_due := self.step == self._next:
            self.due.add(self._turn % self._units)
            self._turn += 1
            if self._turn % self._units == 0:
                self._gap = min(2 * self._gap, max(_TURN, _ROUND // self._units))
            self._next += self._gap
        if is_due:
            told = {n for n in self._new - self.refuted.keys() if self._noted(str(n), here=False)}
            self.refuted |= dict.fromkeys(told, different("a result on another rank"))
            self._new.clear()

    def ended(self, index: int, found: Mismatch | None, *, gradients: bool) -> Mismatch | None:
        """Note what a verification has ``found``, of outputs and, or not, of ``gradients``.

        Returns the same, with the steps whose numbers may be wrong.
        """
        self._counters.verified += gradients and index in self.due
        self._counters.outputs_only += not gradients
        if self._interval is None:
            self.due.discard(index)
        self._new.add(index)
        last = self._last.setdefault(index, self.step)
        if found is None:
            self._last[index] = self.step if gradients else last
            return None
        if self._interval != 1 and last < self.step:
            doubt = (
                f"It was last compared in step {last} with graphs, {self.step - last} steps ago: "
                "the numbers of the steps since then may be wrong."
            )
            found = replace(found, cause=f"{found.cause} {doubt}")
        self.refuted[index] = found
        self._noted(str(index), here=True)
        return found
