"""Handles a replay that a guard forbids: counts it, reports it once, does what the user asked for.

Note [A graph with collectives]
    One rank must not run a collective eagerly while others replay it (see ``collectives.py``).
    So if a graph contains collectives, all ranks vote before any of them falls back to eager.
    Ranks that found a mismatch in the same layer fall back together. If a guard found one on one
    rank alone, its vote times out and the rank ends with the reason instead of hanging the others.
    A verification that fails on one rank fails on all: they vote on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from megatron_cg.consensus.process_exit import exit_without_waiting_unless_it_goes_on
from megatron_cg.errors import ReplayMismatchError, ranged
from megatron_cg.replay.counters import Counters
from megatron_cg.replay.guard import Mismatch, Switches
from megatron_cg.replay.verifications import Verifications

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplayPolicy:
    """What ``--cg-on-mismatch``, ``--cg-verify-interval`` and ``--cg-verify-steps`` say."""

    on_mismatch: Literal["eager", "error"] = "eager"
    verify_interval: int | None = 0
    """Steps between two verifications of all graphs; 0 means never, None one unit in turn."""
    verify_steps: int = 0
    """Steps from one that is trained twice and compared to the next; 0 means never."""
    say: Callable[[str], str] = str
    """Errors name flags; says the same with the settings of the caller."""


class MismatchPolicy:
    """The mismatch policy of all graphs of one session.

    ``on_any_rank`` and ``noted`` are those of the ranks' ``Agreement``; None if this rank decides
    alone. ``units`` is how many graphs there are.
    """

    def __init__(
        self,
        policy: ReplayPolicy,
        counters: Counters,
        on_any_rank: Callable[..., bool] | None = None,
        *,
        units: int = 1,
        noted: Callable[..., bool] | None = None,
    ) -> None:
        self.counters = counters
        noted = noted or (lambda _name, here: here)
        self.verifications = Verifications(policy.verify_interval, units, counters, noted)
        self.issue_held: Callable[[], None] = lambda: None
        """Issues the all-gathers deferred until a launch; must be called before eager passes."""
        self.repeats = False
        """Whether every unit runs eagerly on all ranks: they repeat a step, or one has differed."""
        self.numbers_hold: Callable[[], bool] = lambda: True
        """Whether the numbers of graphs with collectives hold in this step so far. A call of all
        ranks; see ``integrations/megatron/repeat.py``."""
        self._policy = policy
        self.on_any_rank = on_any_rank or (lambda _name, here, timeout=None: here)
        """Whether something is true on any rank; all ranks ask at the same replay of a unit."""
        self.capture = ""
        """Says in reports whose unit it is, if several models have graphs."""
        self._reported: set[tuple[str, tuple[str, str]]] = set()
        self._likewise: dict[tuple[str, str], list[str]] = {}
        """Other units with a mismatch that was reported, to be named together."""
        self._switches = Switches()
        self.other_switch: Mismatch | None = None
        """What says that a switch of torch has changed, in this step."""

    def begin_step(self) -> None:
        """A training step begins."""
        for (clause, subject), units in self._likewise.items():
            names = ranged(units)
            logger.warning(
                "megatron_cg: no replay of %s for %s (%s) either.", names, subject, clause
            )
        self._likewise.clear()
        self.verifications.begin_step()
        self.other_switch = self._switches.broken()

    @property
    def verifies_step(self) -> bool:
        """Whether this whole step is trained eagerly too, and compared."""
        interval = self._policy.verify_steps
        return interval > 0 and self.verifications.step % interval == 0 and not self.repeats

    def step_differed(self, text: str) -> None:
        """Never replay again: all ranks have agreed that a verified step differs.

        Raises ReplayMismatchError: ``--cg-on-mismatch error``.
        """
        self.counters.steps_differed += 1
        if self._policy.on_mismatch == "error":
            raise self._error(f"{text} (--cg-on-mismatch error)")
        logger.warning("megatron_cg: %s This step has eager numbers; so will all others.", text)
        self.repeats = True

    def mismatched(self, mismatch: Mismatch, layer: str, *, collectives: bool) -> None:
        """Return if the unit ``layer`` must run eagerly instead of the replay.

        Raises ReplayMismatchError: ``--cg-on-mismatch error``, or the graph contains collectives
        and the ranks cannot fall back together.
        """
        text = self._report(mismatch, layer)
        if self._policy.on_mismatch == "error":
            exit_without_waiting_unless_it_goes_on()
            raise self._error(f"{text} (--cg-on-mismatch error)")
        if collectives:
            self.fall_back_together(f"{layer}/eager", text)

    def mismatched_in_backward(self, mismatch: Mismatch, layer: str) -> None:
        """Raise ReplayMismatchError: the backward of a replay cannot run eagerly."""
        text = self._report(mismatch, layer)
        exit_without_waiting_unless_it_goes_on()
        raise self._error(
            f"{text} The forward pass was replayed, so its backward cannot run eagerly."
        )

    def fall_back_together(self, name: str, text: str, timeout: timedelta | None = None) -> None:
        """Return if all ranks agree, by ``name``, on what to do with a graph with collectives.

        Otherwise raise ReplayMismatchError with a message that begins with ``text``. ``timeout`` is
        as in ``Agreement.on_any_rank``.
        """
        try:
            self.on_any_rank(name, True, timeout)
        except RuntimeError as error:
            raise self._error(
                f"{text} The graph holds collectives, which no rank may run eagerly while others "
                f"replay them, and not all ranks found the same ({error}). Leave the layer "
                "out of --cg-layers. To train without graphs: --cuda-graph-impl none."
            ) from error

    def _error(self, text: str) -> ReplayMismatchError:
        return ReplayMismatchError(self._policy.say(text))

    def _report(self, mismatch: Mismatch, layer: str) -> str:
        self.counters.mismatched += 1
        text = mismatch.text(f"{layer}{self.capture}")
        if (layer, mismatch.key) in self._reported:
            return text
        if any(key == mismatch.key for _, key in self._reported):
            self._likewise.setdefault(mismatch.key, []).append(layer)
        else:
            logger.warning("megatron_cg: no replay of %s Reported once.", text)
        self._reported.add((layer, mismatch.key))
        return text
