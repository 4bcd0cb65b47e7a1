"""Decisions of all ranks between two training steps: capture again, or give up the graphs.

Note [One step behind]
    Each rank posts its vote at the end of a step and collects all votes at the end of the next
    step, so the exchange overlaps a whole step. A request of step n is done before step n + 2, on
    all ranks. The vote after it is under way by then, and all collect it too. It is about graphs
    that are being replaced: a request to recapture is dropped, one to give up still counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

from megatron_cg.consensus.decision import Decision, Kind, Level, Vote
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.consensus.process_exit import goes_on
from megatron_cg.errors import MegatronCGError

logger = logging.getLogger(__name__)

CLOSING = timedelta(seconds=30)
"""How long closing waits for the last vote. At a normal end all ranks have posted theirs."""


class Boundary:
    """Votes of one model's ranks on what to do between steps.

    Every rank calls :meth:`before_step` and :meth:`after_step` around each training step.

    Args:
        agreement: has no posted vote.
        vote: called after each step for this rank's request, which it repeats until it is done.
        recapture: deletes the graphs and captures again; called on all ranks before the same step.
        give_up: continues without graphs; called with the reason on all ranks before the same step.
    """

    def __init__(
        self,
        agreement: Agreement,
        vote: Callable[[], Vote],
        recapture: Callable[[], None],
        give_up: Callable[[Decision], None],
    ) -> None:
        self._agreement = agreement
        self._vote = vote
        self._recapture = recapture
        self._give_up = give_up
        self._steps = 0
        self._lost: int | None = None
        """``Agreement.left`` when this rank voted without graphs; else None."""
        self._known_lost: int | None = None
        """The same, of the last vote that is decided. If other ranks hold graphs, all give up, and
        undo together as well."""
        self._due: Decision | None = None
        self._closed = False

    def after_step(self, step: int | None = None) -> None:
        """Post this rank's vote, and collect the decision on the votes of the previous step.

        Args:
            step: the number of the training step, which detects ranks at different steps; counted
                here if not given.

        Raises:
            AgreementError: a rank is gone, or is at another step or vote. This rank must end.
        """
        if self._closed:
            return
        self._steps += 1
        self._due = self._agreement.collect()
        if self._due is not None:
            self._known_lost = self._lost
        serial = self._steps if step is None else step
        vote = self._vote()
        self._lost = self._agreement.left if vote.graphs == 0 else None
        self._agreement.post(Kind.STEP, vote, serial=serial)

    def before_step(self) -> None:
        """Apply the decision, if any. Raises what applying it raises, and AgreementError."""
        goes_on()
        due, self._due = self._due, None
        if self._closed or due is None:
            return
        if self._known_lost == self._agreement.left:
            self._agreement.together()
        if due.level is Level.KEEP:
            return
        under_way = self._agreement.collect()
        if under_way is not None and under_way.level > due.level:
            due = under_way
        if due.level is Level.GIVE_UP:
            logger.warning("megatron_cg: all ranks discard their graphs: %s.", due.reason())
            self._give_up(due)
            self._agreement.together()
        else:
            logger.info("megatron_cg: all ranks capture again: %s.", due.reason())
            self._recapture()

    def close(self) -> None:
        """Collect the last vote and stop voting; call it before graphs or groups are destroyed.

        Waits :data:`CLOSING` at most. Safe to call twice, and when ranks or groups are gone: the
        outcome of the last vote no longer matters then.
        """
        if self._closed:
            return
        self._closed = True
        goes_on()
        try:
            self._agreement.collect(CLOSING)
        except MegatronCGError as error:
            logger.warning("megatron_cg: the last vote between steps did not finish: %s", error)
