"""What all ranks do together between two training steps: capture again, or give the graphs up.

Note [One step behind]
    A vote is posted at the end of a step and collected at the end of the next one, so the exchange
    has a whole step to hide behind. What it decides is applied before the step after that, on all
    ranks alike, since all collect the same rows. So a request of step n is done before step n + 2.

Note [The vote under way]
    When a decision is applied, the vote of the step after the request is on its way. Every rank has
    posted it, so every rank collects it, and ranks stay in step. Its requests are about graphs that
    are being replaced, so a request to recapture is done with; one to give up still counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

from megatron_cg.consensus.decision import Decision, Kind, Level, Vote
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import MegatronCGError

logger = logging.getLogger(__name__)

CLOSING = timedelta(seconds=30)
"""How long closing waits for the last vote: at a normal end all ranks have posted theirs."""


class Boundary:
    """The votes of one model's ranks on what to do between steps.

    Every rank calls :meth:`before_step` and :meth:`after_step` around each training step.

    Args:
        agreement: with no vote posted.
        vote: asked after each step for what this rank wants, until that was done.
        recapture: gives up the graphs and captures again; called on all ranks before one step.
        give_up: goes on without graphs; called on all ranks before one step, with the reason.
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
        """What this rank has left to be undone, as it said that it has no graphs; else None."""
        self._all_lost: int | None = None
        """The same, once all ranks were found to have none."""
        self._due: Decision | None = None
        self._closed = False

    def after_step(self, step: int | None = None) -> None:
        """Post this rank's vote, and learn what was decided on those of the step before.

        Args:
            step: the training step's number, by which ranks that are not at the same step are
                found out; counted here if not given.

        Raises:
            AgreementError: a rank is gone, or at another step or vote; this rank must end.
        """
        if self._closed:
            return
        self._steps += 1
        self._due = self._agreement.collect()
        if self._due is not None:
            self._all_lost = self._lost if self._due.same_graphs else None
        serial = self._steps if step is None else step
        vote = self._vote()
        self._lost = self._agreement.left if vote.graphs == 0 else None
        self._agreement.post(Kind.STEP, vote, serial=serial)

    def before_step(self) -> None:
        """Do what was decided, if anything was. Raises what that raises, and AgreementError."""
        due, self._due = self._due, None
        if self._closed or due is None:
            return
        if self._all_lost == self._agreement.left:
            self._agreement.together()
        if due.level is Level.KEEP:
            return
        under_way = self._agreement.collect()
        if under_way is not None and under_way.level > due.level:
            due = under_way
        if due.level is Level.GIVE_UP:
            logger.warning("megatron_cg: graphs given up on all ranks: %s.", due.reason())
            self._give_up(due)
            self._agreement.together()
        else:
            logger.info("megatron_cg: all ranks capture again: %s.", due.reason())
            self._recapture()

    def close(self) -> None:
        """Collect the last vote and decide nothing any more; before graphs or groups go.

        Waits :data:`CLOSING` at most. Safe to run twice, and when ranks or groups are gone: what
        the last vote would have said is of no use then.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._agreement.collect(CLOSING)
        except MegatronCGError as error:
            logger.warning("megatron_cg: the last vote between steps came to no end: %s", error)
